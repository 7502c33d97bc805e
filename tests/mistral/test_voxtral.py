"""Voxtral, whose conversations and transcription requests mistral-common renders: its output equals
that of the library's processor and `generate`, alone, beside other requests and with prefix hits.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import openai
import pytest
import torch

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from tests import sdk, tiny_audio
from tests.generating import GREEDY, Served, serve
from tests.multimodal import engine, in_small_chunks, loaded, request, samples, unpaged, wav
from tests.sdk import Sdk
from worker.messages.generation import GenerationInput, MediaInput, Stopping

MODEL = "voxtral"
ONE, OTHER, SHORT = wav(0), wav(1, 1.4), wav(2, 0.4)
LONG = wav(5, 31.0)  # two windows


@cache
def reference() -> tuple[Any, Any]:
    path = tiny_audio.folder(MODEL)
    auto: Any = tiny_audio.hf.VoxtralForConditionalGeneration
    network = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    network.generation_config.eos_token_id = None
    return network.eval(), tiny_audio.hf.AutoProcessor.from_pretrained(path)


def inputs_of(messages: Sequence[Any], files: Sequence[bytes]) -> Any:
    """What the library's processor makes of a conversation with recordings."""
    recordings = iter(files)

    def whole(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "audio":
            return part
        return {"type": "audio", "base64": base64.b64encode(next(recordings)).decode()}

    conversation = [{**m, "content": [whole(part) for part in m["content"]]} for m in messages]
    return reference()[1].apply_chat_template(conversation)


def output_of(inputs: Any, count: int) -> list[int]:
    output = reference()[0].generate(
        **inputs, do_sample=False, max_new_tokens=count, pad_token_id=11
    )
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def assert_generated(served: Sequence[Served]) -> None:
    for one in served:
        payload: Any = one.item.payload
        chat = payload.prompt
        inputs = inputs_of(chat.messages, [file.data for file in chat.media])
        assert list(one.prompt) == inputs["input_ids"][0].tolist()
        assert one.choices
        assert one.ids == [output_of(inputs, len(ids)) for ids in one.ids]


@pytest.mark.parametrize("tokens", [None, 50])
def test_output_is_the_same_beside_other_requests_and_in_chunks(tokens: int | None) -> None:
    generator = engine(MODEL)
    if tokens:
        in_small_chunks(generator, tokens)
    items = [
        request("No sound here, but a number of words."),
        request("What is ", ONE, "here?"),
        request("These two: ", ONE, OTHER, "now", n=2),
        request(LONG, "this?"),
        request(SHORT),
    ]
    served, _ = serve(generator, items, seed=1)
    assert_generated(served)


def test_prefix_cache_is_shared_by_equal_recordings_only() -> None:
    generator = engine(MODEL)
    cached = []
    for recording, more in ((ONE, ""), (OTHER, ""), (ONE, " And more?"), (wav(7), " And more?")):
        served, _ = serve(generator, [request("What are these? ", recording, "what?" + more)])
        assert_generated(served)
        cached.append(served[0].deltas[0].cached_tokens)
    assert cached[0] == 0 < cached[2]
    assert cached[1] == cached[3] < 32 < 375 < cached[2]


def test_output_on_transformers_cache_is_the_same() -> None:
    served, _ = serve(unpaged(MODEL), [request("Hear ", ONE, "!"), request(LONG, "this?")])
    assert_generated(served)


def test_tokens_of_recordings_in_the_text_are_refused() -> None:
    with pytest.raises(InvalidInput, match="stands for a recording"):
        loaded(MODEL).prepare(request("[AUDIO]", ONE))


def transcription_inputs(language: str | None) -> Any:
    """The library's own transcription request."""
    return reference()[1].apply_transcription_request(
        audio=[samples(ONE)], model_id="", language=language, format=["WAV"], sampling_rate=16_000
    )


@pytest.mark.parametrize("language", [None, "en"])
def test_transcription_is_that_of_the_librarys_request(language: str | None) -> None:
    generator = engine(MODEL)
    chat = generator.input_processor.transcription_chat(None, language)
    recording = MediaInput(ONE, "auto", "file", kind="audio")
    stopping = Stopping(max_tokens=20, ignore_eos=True)
    payload = GenerationInput(replace(chat, media=(recording,)), GREEDY, stopping)
    inputs = transcription_inputs(language)
    [one], _ = serve(generator, [WorkItem(payload, float("inf"), 0.0)])
    assert list(one.prompt) == inputs["input_ids"][0].tolist()
    assert one.ids == [output_of(inputs, 20)]


# ── over HTTP ──


@pytest.fixture(scope="module")
def served() -> Iterator[Sdk]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 450}
    with sdk.connect(chat_model=str(tiny_audio.folder(MODEL)), **settings) as connected:
        yield connected


@pytest.mark.parametrize("language", [None, "en"])
def test_transcriptions_are_served(served: Sdk, language: str | None) -> None:
    create: Any = served.client.audio.transcriptions.create
    given = {"language": language} if language else {}
    whole = create(file=("a.wav", ONE), model=served.model, **given)
    assert whole.usage.input_tokens == transcription_inputs(language)["input_ids"].shape[1]
    *deltas, done = create(file=("a.wav", ONE), model=served.model, stream=True, **given)
    assert "".join(delta.delta for delta in deltas).strip() == done.text == whole.text != ""


@pytest.mark.parametrize(("field", "value"), [("language", "klingon"), ("prompt", "Names")])
def test_what_the_transcription_request_does_not_take_is_refused(
    served: Sdk, field: str, value: str
) -> None:
    create: Any = served.client.audio.transcriptions.create
    with pytest.raises(openai.BadRequestError) as error:
        create(file=("a.wav", ONE), model=served.model, **{field: value})
    assert error.value.param == field


def test_chat_with_a_recording_counts_its_tokens(served: Sdk) -> None:
    sound = {"data": base64.b64encode(ONE).decode(), "format": "wav"}
    content: list[Any] = [
        {"type": "input_audio", "input_audio": sound},
        {"type": "text", "text": "What is it?"},
    ]
    parts = [{"type": "audio"}, content[1]]
    inputs = inputs_of([{"role": "user", "content": parts}], [ONE])
    stream = served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert last.usage
    assert last.usage.prompt_tokens == inputs["input_ids"].shape[1]
    assert last.usage.prompt_tokens_details
    assert last.usage.prompt_tokens_details.audio_tokens == 375
    assert any(chunk.choices[0].delta.content for chunk in chunks)
