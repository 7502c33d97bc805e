"""Requests in the form of desktop and web clients: none may be refused."""

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
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def history_with_call(content: str | None, result: Any, **more: Any) -> list[dict[str, Any]]:
    """Return a history with a function call and its result."""
    return [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": content, "tool_calls": CALLS, **more},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


CHATS: dict[str, dict[str, Any]] = {
    "Open WebUI": {"messages": [SYSTEM, USER], **STREAMED},
    "Open WebUI, all settings": {
        "messages": [SYSTEM, USER],
        "temperature": 0.8, "top_p": 0.9, "min_p": 0.0, "max_tokens": 128, "seed": 0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repeat_penalty": 1.1, "top_k": 40,
        "stop": ["###"], "logit_bias": {"1": -100}, "reasoning_effort": "medium",
        **STREAMED,
    },
    "Open WebUI, a title": {"messages": [USER], "stream": False, "max_tokens": 1000},
    "Open WebUI, functions": {
        "messages": history_with_call("", "22 degrees", reasoning_content="Let me see."),
        "tools": TOOLS, **STREAMED,
    },
    "Open WebUI, to be continued": {
        "messages": [USER, {"role": "assistant", "content": "one "}], **STREAMED,
    },
    "Jan": {
        "messages": history_with_call(None, TEXT), "tools": TOOLS, "tool_choice": "auto",
        "temperature": 0.7, "top_p": 0.95, "top_k": 2, "max_tokens": 2048,
        "frequency_penalty": 0, "presence_penalty": 0, "stop": [],
        **STREAMED,
    },
    "Cursor, asking": {
        "messages": history_with_call("", TEXT),
        "temperature": 0, "user": "a-hash", "max_tokens": 64,
        "tools": [{"type": "function", "function": WEATHER | {"strict": False}}],
        "tool_choice": "auto", **STREAMED,
    },
    "Cursor, a reasoning model": {
        "messages": [SYSTEM | {"role": "developer"}, USER], "max_completion_tokens": 64,
        "reasoning_effort": "high", "verbosity": "medium", "store": False,
        "parallel_tool_calls": True, "metadata": {"from": "cursor"}, "service_tier": "auto",
        **STREAMED,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    load: dict[str, Any] = {"load_chat": FakeGenerator, "load_embedder": LetterEmbedder}
    with serving(load_transcriber=FakeTranscriber, api_keys=(KEY,), **load) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}", "user-agent": "a client"}
    with httpx.Client(base_url=server.url + "/v1", headers=headers) as client:
        yield client


@pytest.fixture
def models(client: httpx.Client) -> list[str]:
    """Return the ids of /v1/models, as a client's settings list them."""
    return [model["id"] for model in client.get("models").json()["data"]]


@pytest.mark.parametrize("name", CHATS)
def test_chat_requests_of_clients_are_served(
    client: httpx.Client, models: list[str], name: str
) -> None:
    body = {"model": models[0], **CHATS[name]}
    response = client.post("chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        assert response.json()["choices"][0]["message"]["role"] == "assistant"
        return
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line for line in response.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def test_a_responses_request_to_chat_names_the_right_path(
    client: httpx.Client, models: list[str]
) -> None:
    """Cursor's agent sends such requests to the path of chats."""
    agent = {
        "model": models[0], "stream": True, "store": False, "reasoning": {"effort": "medium"},
        "input": [SYSTEM, {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "include": ["reasoning.encrypted_content"], "user": "a-hash", "text": {"verbosity": "low"},
        "tools": [{"type": "function", **WEATHER, "strict": False}], "tool_choice": "auto",
    }  # fmt: skip
    refused = client.post("chat/completions", json=agent)
    assert refused.status_code == 400
    assert "/v1/responses" in refused.json()["error"]["message"]
    response = client.post("responses", json=agent)
    assert response.status_code == 200, response.text
    assert "event: response.completed" in response.text


def test_open_webui_embeds_documents(client: httpx.Client, models: list[str]) -> None:
    body = {"input": ["a", "b", "ab"], "model": models[1]}
    vectors = [item["embedding"] for item in client.post("embeddings", json=body).json()["data"]]
    assert vectors == [[1, 0], [0, 1], [1, 1]]


def test_open_webui_streams_audio_uploads(client: httpx.Client, models: list[str]) -> None:
    """Without a content length; the file comes last and has no audio type."""
    audio = io.BytesIO()
    soundfile.write(audio, np.zeros(16_000), 16_000, format="WAV")
    lines = [
        b"--part", b'content-disposition: form-data; name="model"', b"", models[2].encode(),
        b"--part", b'content-disposition: form-data; name="file"; filename="a.wav"',
        b"content-type: application/octet-stream", b"", audio.getvalue(), b"--part--", b"",
    ]  # fmt: skip
    headers = {"content-type": "multipart/form-data; boundary=part"}
    body = iter([line + b"\r\n" for line in lines])
    response = client.post("audio/transcriptions", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "text" in response.json()
