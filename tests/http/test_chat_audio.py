"""Recordings in the messages of chats and responses, over a real socket: their fields with a fake
generator, and OpenAI's SDK with a tiny model that takes sound."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.http import fetch
from tests import sdk, tiny_audio
from tests.event_streams import post
from tests.fake_generator import FakeGenerator
from tests.http.test_fetch import replying
from tests.http.test_pipeline_http import error_of
from tests.model.test_audio_chats import wav
from tests.sdk import Sdk
from tests.serving import Server, serving, wait_until
from worker.messages.generation import Chat, MediaInput

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
DATA = base64.b64encode(b"wav").decode()
PLACE = {"type": "audio"}
AT = "messages[0].content[0]"


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    fake = FakeGenerator()
    fake.refused_media = {}
    return fake


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator, image_fetch=("127.0.0.1",)) as started:
        yield started


@pytest.fixture(autouse=True)
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")


def sound(data: str = DATA, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def link(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def chat(generator: FakeGenerator, server: Server, body: Any, path: str = CHAT) -> Chat:
    """Return the input that the worker receives."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


def recording(param: str) -> MediaInput:
    return MediaInput(b"wav", "auto", param, kind="audio")


def test_recordings_keep_their_positions_among_text(
    generator: FakeGenerator, server: Server
) -> None:
    url = f"data:audio/wav;base64,{DATA}"
    image = {"type": "image_url", "image_url": f"data:image/png;base64,{DATA}"}
    got = chat(generator, server, user(sound(), text("one"), image, link(url)))
    assert got.messages[0]["content"] == [PLACE, text("one"), {"type": "image"}, PLACE]
    assert [file.kind for file in got.media] == ["audio", "image", "audio"]
    first, _, last = got.media
    assert first == recording(f"{AT}.input_audio")
    assert last == recording("messages[0].content[3].audio_url")


def test_responses_accept_recordings_and_their_conversations_keep_them(
    generator: FakeGenerator, server: Server
) -> None:
    content = [{"type": "input_text", "text": "what?"}, sound()]
    body = {"input": [{"role": "user", "content": content}]}
    got = chat(generator, server, body, RESPONSES)
    assert got.messages[0]["content"] == [text("what?"), PLACE]
    assert got.media == (recording("input[0].content[1].input_audio"),)
    first = post(server, RESPONSES, body).json()
    items = httpx.get(f"{server.url}{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1] == sound()
    more = {"input": [sound()], "previous_response_id": first["id"]}
    assert len(chat(generator, server, more, RESPONSES).media) == 2


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (user(sound("%")), f"{AT}.input_audio.data", "base64"),
        (user(sound(format="xyz")), f"{AT}.input_audio.format", "wav, mp3"),
        (user({"type": "input_audio"}), f"{AT}.input_audio", "required"),
        (user(link("/etc/passwd")), f"{AT}.audio_url", "paths are not opened"),
        (user(link(None)), f"{AT}.audio_url", "expected"),
        (user(link("https://example.com/a")), f"{AT}.audio_url", "IMAGE_FETCH"),
        (user(*[sound()] * 21), "messages[0]", "at most 20"),
        (user(sound(), role="assistant"), f"{AT}.type", "of the user only"),
    ],
)
def test_invalid_recordings_are_refused(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    error = error_of(post(server, CHAT, body))
    assert error["param"].startswith(param)
    assert reason in error["message"]


def test_text_model_refuses_recordings() -> None:
    with serving(load_chat=FakeGenerator, image_fetch=("any",)) as started:
        error = error_of(post(started, CHAT, user(sound())))
        assert error["param"] == f"{AT}.input_audio"
        assert "takes text, no recordings" in error["message"]
        assert "no recordings" in error_of(post(started, "/tokenize", user(sound())))["message"]


@pytest.mark.parametrize(("media", "status"), [("audio/ogg", 200), ("image/png", 400)])
def test_links_of_audio_are_fetched(
    generator: FakeGenerator, server: Server, media: str, status: int
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media}\r\nContent-Length: 3\r\n\r\n"
    with replying(head.encode() + b"wav") as (port, requests):
        answer = post(server, CHAT, user(link(f"http://127.0.0.1:{port}/a.ogg")))
    assert answer.status_code == status
    assert b"Accept: audio/*" in requests[0]
    if status == 400:
        assert "not audio/" in error_of(answer)["message"]


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


def test_memory_of_transcribed_recordings_is_counted(
    generator: FakeGenerator, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, count = [], type(server.app).count_body

    def count_body(self: Any, scope: Any, size: int) -> None:
        counted.append(size)
        count(self, scope, size)

    monkeypatch.setattr(type(server.app), "count_body", count_body)
    url = server.url + "/v1/audio/transcriptions"
    assert httpx.post(url, files={"file": ("a.wav", bytes(1000))}).status_code == 200
    assert counted == [1000]
    wait_until(lambda: server.app.memory.used == 0)


def test_text_model_refuses_to_transcribe() -> None:
    with serving(load_chat=FakeGenerator) as started:
        answer = httpx.post(started.url + "/v1/audio/transcriptions", files={"file": ("a", b"a")})
        assert "takes text, no recordings" in error_of(answer)["message"]
