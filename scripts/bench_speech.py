"""Transcriptions over HTTP: clips of 3 to 60 seconds, one client and eight, beside a plain server
around transformers' pipeline, `transformers serve`, and the pipeline called in process. All say
each window once: ours is given thresholds that no attempt exceeds. `transformers serve` cuts a
recording off after 30 seconds: seconds that a server does not hear are not counted for it.

Without --model one of whisper-base's shape is made, of random weights, which says 100 tokens of
each window: about what somebody who speaks does. Its clips are noise.
"""

import argparse
import asyncio
import importlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import soundfile
from bench_servers import ROOT, Launch, Server, free_port, is_ours, onequeue, running, say

from server.commands.load_test.http_client import Client

RATE = 16000
SECONDS = (3, 60, 6, 42, 10, 28, 15, 20)
CLIENTS = (1, 8)
TOKENS = 100  # of each window
CUT_S = {"transformers": 30}  # of each recording, what a server hears
PATH = "/v1/audio/transcriptions"
BOUNDARY = "onequeue-bench"
IN_PROCESS = """
import io, sys, time, soundfile
sys.path.insert(0, 'scripts')
from bench_speech import clips
from transformers import pipeline
pipe = pipeline('automatic-speech-recognition', model=sys.argv[1], device='cpu')
asked = {'num_beams': 1, 'language': 'en', 'task': 'transcribe'}
def run(clip):
    samples, rate = soundfile.read(io.BytesIO(clip), dtype='float32')
    pipe({'raw': samples, 'sampling_rate': rate}, return_timestamps=True, generate_kwargs=asked)
given = clips()
run(given[0])
started = time.perf_counter()
for clip in given:
    run(clip)
print(time.perf_counter() - started)
"""


def speech(arguments: argparse.Namespace) -> None:
    """Seconds that a second of sound takes, of each server in turn."""
    model = str(Path(arguments.model or make_model()).resolve())
    factors: dict[tuple[str, int], list[float]] = {}
    names = [name for name in arguments.servers if name != "in-process"]
    with ExitStack() as stack:
        once = said_once(Path(model), stack)
        launches = [(name, launch(arguments, name, model, once)) for name in names]
        servers = [stack.enter_context(running(name, each)) for name, each in launches]
        for server in servers:
            measure(server, model_of(server.name, model, once), clips()[:1], 1)
        for _ in range(arguments.rounds):
            if "in-process" in arguments.servers:
                note(factors, "in-process", 1, in_process(model))
            for server in servers:
                for clients in CLIENTS:
                    asked = model_of(server.name, model, once)
                    note(factors, server.name, clients, measure(server, asked, clips(), clients))
    middle = {key: statistics.median(each) for key, each in factors.items()}
    for (name, clients), ours in middle.items():
        if name.startswith("onequeue"):
            ratios = {
                f"{peer}, {count}": round(theirs / ours, 2)
                for (peer, count), theirs in middle.items()
                if count == clients and peer != name
            }
            say(bench="speech", server=name, clients=clients, times_as_fast_as=ratios)


def note(
    factors: dict[tuple[str, int], list[float]], name: str, clients: int, wall_s: float
) -> None:
    heard = sum(min(seconds, CUT_S.get(name, seconds)) for seconds in SECONDS)
    factors.setdefault((name, clients), []).append(wall_s / heard)
    factor = round(wall_s / heard, 4)
    say(bench="speech", server=name, clients=clients, real_time_factor=factor, heard_s=heard)


def said_once(model: Path, stack: ExitStack) -> str:
    """The checkpoint, with thresholds by which nothing is said again."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    settings = json.loads(config.read_text())
    settings |= {"compression_ratio_threshold": 1e9, "logprob_threshold": -1e9}
    config.unlink()
    config.write_text(json.dumps(settings | {"no_speech_threshold": 1.0}))
    return str(folder)


def model_of(name: str, model: str, once: str) -> str:
    return once if is_ours(name) else model


def launch(arguments: argparse.Namespace, name: str, model: str, once: str) -> Launch:
    port, offline = free_port(), {"HF_HUB_OFFLINE": "1"}
    if name == "plain":
        script = str(ROOT / "scripts" / "peers" / "serve_speech.py")
        return Launch([sys.executable, script, model, str(port)], port, "/", offline)
    if name == "transformers":
        program = str(Path(arguments.peer_python).parent / "transformers")
        command = [program, "serve", model, "--port", str(port), "--device", "cpu"]
        return Launch(command, port, "/health", offline)
    others = {f"{each}_MODEL": "none" for each in ("CHAT", "PIPELINE", "EMBEDDING", "RERANK")}
    settings = {"TRANSCRIPTION_MODEL": once, "REQUEST_TIMEOUT_S": "600"}
    return onequeue(name, port, settings | others)


def measure(server: Server, model: str, given: Sequence[bytes], clients: int) -> float:
    """Seconds for all clips, of which each client has one under way."""
    started = time.perf_counter()
    with server.awake():
        asyncio.run(ask(server.port, model, given, clients))
    return time.perf_counter() - started


async def ask(port: int, model: str, given: Sequence[bytes], clients: int) -> None:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    http = Client(urlsplit(f"http://127.0.0.1:{port}{PATH}"), {"content-type": kind})
    rest = iter(given)

    async def client() -> None:
        for clip in rest:
            answer = await http.post(form(model, clip), None)
            if answer.status != 200:
                raise SystemExit(answer.body.decode())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    http.close()


def form(model: str, clip: bytes, **more: str) -> bytes:
    fields = {"model": model, "language": "en", "response_format": "json"} | more
    head = "".join(
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    file = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="clip.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    return f"{head}{file}".encode() + clip + f"\r\n--{BOUNDARY}--\r\n".encode()


def in_process(model: str) -> float:
    command = [sys.executable, "-c", IN_PROCESS, model]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def clips() -> list[bytes]:
    """WAV files of noise that changes twice a second."""
    random = np.random.default_rng(1)
    made = []
    for seconds in SECONDS:
        loud = random.uniform(0.02, 0.5, seconds * 2).repeat(RATE // 2)
        file = io.BytesIO()
        soundfile.write(file, loud * random.normal(size=loud.size) / 4, RATE, format="WAV")
        made.append(file.getvalue())
    return made


def make_model() -> str:
    """A random-weight model of whisper-base's shape and vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    hf: Any = importlib.import_module("transformers")  # untyped in part
    folder = Path(tempfile.gettempdir()) / "onequeue-bench-whisper-base"
    if folder.exists():
        return str(folder)
    words = sorted(ByteLevel.alphabet())
    words += [f"Ġw{number}" for number in range(len(words), 50257)]
    end, start = 50257, 50258
    vocabulary = {word: number for number, word in enumerate([*words, "<|endoftext|>"])}
    tokenizer = hf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    names = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    special = ["<|startoftranscript|>", *languages, *(f"<|{name}|>" for name in names)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    ends |= {"decoder_start_token_id": start}
    sizes = {f"{side}_layers": 6 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
    config = hf.WhisperConfig(vocab_size=len(tokenizer), d_model=512, **sizes, **ends)
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        max_new_tokens=TOKENS,
        is_multilingual=True,
        lang_to_id={token: ids[token] for token in languages},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        **ends,
    )
    for part in (model, tokenizer, hf.WhisperFeatureExtractor()):
        part.save_pretrained(folder)
    return str(folder)
