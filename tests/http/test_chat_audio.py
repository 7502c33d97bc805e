"""OpenAI's SDK and a tiny model that takes sound: chats with recordings, and transcripts."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import sdk, tiny_audio
from tests.event_streams import error_of
from tests.http.test_chat_media import AT, CHAT, sound, text, user
from tests.multimodal import wav
from tests.sdk import Sdk


@pytest.fixture(scope="module")
def hearing() -> Iterator[Sdk]:
    folder = str(tiny_audio.folder("qwen2_audio"))
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 128}
    with sdk.connect(chat_model=folder, **settings) as connected:
        yield connected


def test_sdk_sends_recordings_and_counts_their_tokens(hearing: Sdk) -> None:
    data = base64.b64encode(wav(1)).decode()
    messages: list[Any] = [{"role": "user", "content": [text("What is it?"), sound(data)]}]
    asked: dict[str, Any] = {
        "model": hearing.model,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = hearing.client.chat.completions.create(**asked)
    stream = hearing.client.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole.choices[0].message.content
    assert whole.usage
    details = whole.usage.prompt_tokens_details
    assert details
    assert details.audio_tokens == 22  # of 0.9 seconds
    assert hearing.client.models.list().data[0].input_modalities == ["text", "audio"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "param", "reason"),
    [
        (b"not audio", f"{AT}.input_audio", "not an audio file"),
        (wav(1)[:50], f"{AT}.input_audio", "audio"),
        (wav(1, 3.0), f"{AT}.input_audio", "lasts 3 seconds in 1 channels; at most 2 seconds"),
    ],
)
def test_recordings_that_the_model_does_not_take_are_refused(
    hearing: Sdk, data: bytes, param: str, reason: str
) -> None:
    body = user(sound(base64.b64encode(data).decode())) | {"model": hearing.model}
    url = str(hearing.client.base_url).removesuffix("v1/").rstrip("/")
    error = error_of(httpx.post(url + CHAT, json=body))
    assert error["param"] == param
    assert reason in error["message"]


def test_chat_model_transcribes(hearing: Sdk) -> None:
    """The transcript is the response to a message with the recording and a request for its text."""
    file, asked = ("a.wav", wav(1)), {"model": hearing.model}
    create: Any = hearing.client.audio.transcriptions.create
    content = [sound(base64.b64encode(wav(1)).decode()), text("Write.")]
    messages: list[Any] = [{"role": "user", "content": content}]
    chats: Any = hearing.client.chat.completions
    said = chats.create(messages=messages, temperature=0, **asked).choices[0].message.content
    whole = create(file=file, prompt="Write.", **asked)
    assert whole.text == said.strip()
    assert whole.usage.type == "tokens"
    assert whole.usage.input_tokens > 22
    line = create(file=file, prompt="Write.", response_format="text", **asked)
    assert line == said.strip() + "\n"
    *deltas, done = create(file=file, prompt="Write.", stream=True, **asked)
    assert "".join(delta.delta for delta in deltas) == said
    assert done.text == said.strip()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("transcriptions", {"response_format": "srt"}, "response_format"),
        ("transcriptions", {"response_format": "verbose_json"}, "response_format"),
        ("transcriptions", {"include[]": "logprobs"}, "include"),
        ("translations", {}, "model"),
    ],
)
def test_what_a_chat_model_does_not_transcribe_is_refused(
    hearing: Sdk, path: str, fields: dict[str, str], param: str
) -> None:
    url = f"{hearing.client.base_url}audio/{path}"
    answer = httpx.post(url, files={"file": ("a.wav", wav(1))}, data=fields)
    assert error_of(answer)["param"] == param
