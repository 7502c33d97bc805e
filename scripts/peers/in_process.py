#!/usr/bin/env python3
"""in_process.py TASK MODEL URL [FLAGS]: the library that a server is compared with, called in this
process with the bodies of a load test. Flags and the line of JSON are those of `onequeue load`. A
peer for scripts/bench.py; embeddings and rerank need sentence-transformers."""

import asyncio
import importlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from server.commands.load_test.arguments import parse_args
from server.commands.load_test.command import make_generator, measure
from server.commands.load_test.http_client import Client, HttpResponse, OnData
from server.commands.load_test.report import summarize

SPEECH = {"num_beams": 1, "language": "en", "task": "transcribe"}
Call = Callable[[bytes], object]
hf: Any = importlib.import_module("transformers")  # untyped in part


def fill_mask(model: str) -> Call:
    pipe = hf.pipeline("fill-mask", model=model)
    return lambda body: pipe(body.decode())


def speech(model: str) -> Call:
    import soundfile

    pipe = hf.pipeline("automatic-speech-recognition", model=model, device="cpu")

    def transcribe(form: bytes) -> object:
        file = io.BytesIO(form[form.index(b"RIFF") :])
        samples, rate = soundfile.read(file, dtype="float32")
        audio = {"raw": samples, "sampling_rate": rate}
        return pipe(audio, return_timestamps=True, generate_kwargs=dict(SPEECH))

    return transcribe


def encoder(model: str) -> Call:
    """Run a speech model's encoder for one window."""
    import torch

    from worker.engines.speech.loading import SpeechOptions, load_speech
    from worker.engines.speech.whisper import WhisperRunner

    engine = load_speech(SpeechOptions(model))
    runner = engine.runner
    assert isinstance(runner, WhisperRunner)
    window: Any = engine.run_example()
    features = window.features[None].to(runner.model.dtype)

    def encode(_: bytes) -> object:
        with torch.inference_mode():
            return runner.encoder(features)

    return encode


def embeddings(model: str) -> Call:
    library: Any = importlib.import_module("sentence_transformers")
    encode = library.SentenceTransformer(model, device="cpu").float().encode
    return lambda body: encode(json.loads(body)["input"])


def rerank(model: str) -> Call:
    library: Any = importlib.import_module("sentence_transformers")
    predict = library.CrossEncoder(model, device="cpu").predict

    def score(body: bytes) -> object:
        request = json.loads(body)
        return predict([(request["query"], document) for document in request["documents"]])

    return score


def decisions(model: str) -> Call:
    loaded = hf.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    config = importlib.import_module("transformers.decision").DecisionConfig()
    decide = hf.pipeline("decision", model=loaded, tokenizer=tokenizer, decision_config=config)

    def ask(body: bytes) -> object:
        request = json.loads(body)
        questions = {question["name"]: to_library(question) for question in request["questions"]}
        return decide({"state": request["input"], "questions": questions})

    return ask


def to_library(question: dict[str, Any]) -> dict[str, Any]:
    """Convert a question of /v1/decisions to the form of the pipeline."""
    criteria: Any = [level["label"] for level in question.get("levels", [])]
    criteria = criteria or dict.fromkeys(choice["value"] for choice in question["choices"])
    instructions, kind = question["instructions"], question["type"]
    return {"type": kind, "criteria": criteria, "instructions": instructions}


class InProcess(Client):
    """Calls a function instead of a server."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.idle = []

    async def resolve(self) -> None:
        pass

    async def post(self, body: bytes, on_event_data: OnData | None = None) -> HttpResponse:
        self.call(body)
        return HttpResponse(200, {}, b"", True)


TASKS = [fill_mask, speech, encoder, embeddings, rerank, decisions]


def main() -> None:
    task, model, *flags = sys.argv[1:]
    args = parse_args("in_process.py", flags)
    generator = make_generator(args)
    generator.client = InProcess({load.__name__: load for load in TASKS}[task](model))
    record = asyncio.run(measure(args, generator))
    print(json.dumps(summarize(args, args.urls[0], record)))


if __name__ == "__main__":
    main()
