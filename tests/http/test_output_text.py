"""Texts of a loaded model in all four APIs, streamed or not: their ends, the sampling defaults."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests import tiny_chat
from tests.event_streams import CLIENT, chat, chunks, post
from tests.serving import Server, serving

HI = [{"role": "user", "content": "hi"}]
# The body of a request, and its limit of tokens.
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": HI}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, "max_tokens"),
}
each_api = pytest.mark.parametrize("path", APIS)
each_way = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings: dict[str, Any] = {"chat_model": str(tiny_chat.folder()), "dtype": "float32"}
    settings |= {"compile": "off", "kv_cache_gb": 0.05, "sampling_defaults": '{"temperature": 0}'}
    with serving(**settings) as started:
        yield started


def texts(document: Any, path: str) -> list[str]:
    """Return the parts of the output's text in a response, or in an event."""
    match document:
        case {"choices": choices}:
            parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
            return [part.get("content", part.get("text")) or "" for part in parts]
        case {"type": "response.output_text.delta" | "content_block_delta", "delta": delta}:
            return [delta if path == "/v1/responses" else delta["text"]]
        case {"output": [message]}:
            return [part["text"] for part in message["content"]]
        case {"content": content}:
            return [part["text"] for part in content]
    return []


def text_of(server: Server, path: str, stream: bool, tokens: int, **fields: Any) -> str:
    body, limit = APIS[path]
    answer = post(server, path, {**body, limit: tokens, "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(text for document in documents for text in texts(document, path))


@each_api
@each_way
def test_an_output_that_is_cut_within_a_character_ends_before_it(
    server: Server, path: str, stream: bool
) -> None:
    """The tokens are bytes."""
    for tokens in range(1, 10):
        fields = {"structured_outputs": {"regex": "a🚀{9}"}}
        text = text_of(server, path, stream, tokens, **fields)
        assert text == "a" + "🚀" * ((tokens - 1) // 4)


@pytest.mark.parametrize("tokens", [3, 4])
def test_log_probabilities_of_a_character_that_is_cut_have_its_bytes(
    server: Server, tokens: int
) -> None:
    grammar = {"regex": "🚀{9}"}
    answer = chat(server, structured_outputs=grammar, logprobs=True, max_tokens=tokens)
    [choice] = answer.json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "🚀".encode()[:tokens]]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_stop_reason_is_the_stop_string_or_token_that_ended_the_choice(
    server: Server, path: str
) -> None:
    body, _ = APIS[path]
    letter = post(server, "/tokenize", {"prompt": "Z", "add_special_tokens": False}).json()
    asked: list[tuple[dict[str, Any], tuple[str, Any]]] = [
        ({"stop": ["x", "ZK"]}, ("stop", "ZK")),
        ({"stop_token_ids": letter["tokens"]}, ("stop", letter["tokens"][0])),
        ({"max_tokens": 2}, ("length", None)),
        ({}, ("stop", None)),
    ]
    for (fields, expected), n in product(asked, (1, 2)):
        grammar = {"structured_outputs": {"regex": "QXZK"}, "max_tokens": 30, "n": n}
        whole = post(server, path, {**body, **grammar, **fields}).json()
        ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
        assert ends == [expected] * n
        stream = chunks(post(server, path, {**body, **grammar, **fields, "stream": True}))
        choices = [choice for chunk in stream for choice in chunk["choices"]]
        assert not any(
            choice.get("stop_reason") for choice in choices if not choice["finish_reason"]
        )
        last = [choice for choice in choices if choice["finish_reason"]]
        assert [(choice["finish_reason"], choice["stop_reason"]) for choice in last] == ends


@each_api
@each_way
def test_sampling_defaults_hold_where_a_request_sets_nothing(
    server: Server, path: str, stream: bool
) -> None:
    greedy = text_of(server, path, stream, 9, temperature=0)
    assert text_of(server, path, stream, 9) == greedy
    assert text_of(server, path, stream, 9, temperature=2, seed=1) != greedy


def test_the_listing_has_the_sampling_defaults(server: Server) -> None:
    expected = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "configured": True,
    }  # fmt: skip
    for path in ("/models", "/v1/models"):
        [model] = CLIENT.get(server.url + path).json()["data"]
        assert model["sampling_defaults"] == expected
    response = post(server, "/v1/responses", {"input": "hi", "max_output_tokens": 1}).json()
    assert (response["temperature"], response["top_p"]) == (0.0, 1.0)
