"""Requests in the shapes in which desktop and web clients send them: none may be refused."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.page_server import KEY, LetterEmbedder
from tests.serving import Server, serving

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
CALLS = [{"index": 0, "id": "call_1", "type": "function", "function": CALL}]
TEXT = [{"type": "text", "text": "22 degrees"}]
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def called(content: str | None, result: Any, **more: Any) -> list[dict[str, Any]]:
    """A conversation in which a function was called."""
    return [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": content, "tool_calls": CALLS, **more},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


CHATS: dict[str, dict[str, Any]] = {
    "Open WebUI": {"messages": [SYSTEM, ASKED], **STREAMED},
    "Open WebUI, all that its settings have": {
        "messages": [SYSTEM, ASKED],
        "temperature": 0.8, "top_p": 0.9, "min_p": 0.0, "max_tokens": 128, "seed": 0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repeat_penalty": 1.1, "top_k": 40,
        "stop": ["###"], "logit_bias": {"1": -100}, "reasoning_effort": "medium",
        **STREAMED,
    },
    "Open WebUI, a title": {"messages": [ASKED], "stream": False, "max_tokens": 1000},
    "Open WebUI, functions": {
        "messages": called("", "22 degrees", reasoning_content="Let me see."),
        "tools": TOOLS, **STREAMED,
    },
    "Open WebUI, to be continued": {
        "messages": [ASKED, {"role": "assistant", "content": "one "}], **STREAMED,
    },
    "Jan": {
        "messages": called(None, TEXT), "tools": TOOLS, "tool_choice": "auto",
        "temperature": 0.7, "top_p": 0.95, "top_k": 2, "max_tokens": 2048,
        "frequency_penalty": 0, "presence_penalty": 0, "stop": [],
        **STREAMED,
    },
    "Cursor, asking": {
        "messages": called("", TEXT), "temperature": 0, "user": "a-hash", "max_tokens": 64,
        "tools": [{"type": "function", "function": WEATHER | {"strict": False}}],
        "tool_choice": "auto", **STREAMED,
    },
    "Cursor, a reasoning model": {
        "messages": [SYSTEM | {"role": "developer"}, ASKED], "max_completion_tokens": 64,
        "reasoning_effort": "high", "verbosity": "medium", "store": False,
        "parallel_tool_calls": True, "metadata": {"from": "cursor"}, "service_tier": "auto",
        **STREAMED,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    load: dict[str, Any] = {"load_chat": FakeGenerator, "load_embedder": LetterEmbedder}
    with serving(load_transcriber=FakeTranscriber, api_keys=(KEY,), **load) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}", "user-agent": "a client"}
    with httpx.Client(base_url=server.url + "/v1", headers=headers) as made:
        yield made


@pytest.fixture
def models(client: httpx.Client) -> list[str]:
    """As a client's settings list them."""
    return [each["id"] for each in client.get("models").json()["data"]]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat(client: httpx.Client, models: list[str], name: str) -> None:
    body = {"model": models[0], **CHATS[name]}
    answer = client.post("chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        return
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def test_what_is_meant_for_responses_is_sent_there(client: httpx.Client, models: list[str]) -> None:
    """Cursor's agent sends it to the chat's path."""
    agent = {
        "model": models[0], "stream": True, "store": False, "reasoning": {"effort": "medium"},
        "input": [SYSTEM, {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "include": ["reasoning.encrypted_content"], "user": "a-hash", "text": {"verbosity": "low"},
        "tools": [{"type": "function", **WEATHER, "strict": False}], "tool_choice": "auto",
    }  # fmt: skip
    refused = client.post("chat/completions", json=agent)
    assert refused.status_code == 400
    assert "/v1/responses" in refused.json()["error"]["message"]
    answer = client.post("responses", json=agent)
    assert answer.status_code == 200, answer.text
    assert "event: response.completed" in answer.text


def test_open_webui_embeds_documents(client: httpx.Client, models: list[str]) -> None:
    body = {"input": ["a", "b", "ab"], "model": models[1]}
    vectors = [each["embedding"] for each in client.post("embeddings", json=body).json()["data"]]
    assert vectors == [[1, 0], [0, 1], [1, 1]]


def test_open_webui_sends_speech_as_it_reads_it(client: httpx.Client, models: list[str]) -> None:
    """Of a length that is not told, the sound last and without a media type of its own."""
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(16_000), 16_000, format="WAV")
    lines = [
        b"--part", b'content-disposition: form-data; name="model"', b"", models[2].encode(),
        b"--part", b'content-disposition: form-data; name="file"; filename="a.wav"',
        b"content-type: application/octet-stream", b"", sound.getvalue(), b"--part--", b"",
    ]  # fmt: skip
    headers = {"content-type": "multipart/form-data; boundary=part"}
    body = iter([line + b"\r\n" for line in lines])
    answer = client.post("audio/transcriptions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "text" in answer.json()
