"""Every response byte for byte as it was recorded, except for ids, times and the words of errors.

The models are fakes, so that no number depends on the machine; the embedding model is the demo,
with its numbers left out. To record anew, which changes the API: `RECORD=1 pytest <this file>`.
"""

import asyncio
import io
import json
import os
import re
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from batching.request_queue import WorkItem
from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.serving import Server, serving, wait_until
from worker.messages.generation import TEXT_ONLY, transcription_chat
from worker.messages.protocol import ModelInfo, StepOutcome
from worker.messages.scoring import ScoringOutput

RECORDED = Path(__file__).parent / "recorded" / "responses.json"
HEADERS = ("content-type", "retry-after", "allow", "cache-control", "connection")
ROUND_TRIPS = 20  # through the event loop, until a stream's reader has taken the last deltas

# Patterns of ids, times and error messages, each with its placeholder.
NORMALIZED = [
    (rb"(chatcmpl|cmpl|resp|msg|rs|fc|fco|rerank|score)(_|-)[0-9a-f]{24,48}", rb"\1\2ID"),
    (rb'"(created|created_at|completed_at)":\d{10}', rb'"\1":0'),
    (rb'"message":"(?:[^"\\]|\\.)*"', rb'"message":"MESSAGE"'),
]
NUMBERS = [
    (rb"-?\d+\.\d+(e-?\d+)?", rb"0.5"),
    (rb"(0\.5,)+0\.5", rb"0.5"),
    (rb'"embedding":"[A-Za-z0-9+/=]+"', rb'"embedding":"BASE64"'),
]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
AUDIO = "/v1/audio/transcriptions"
FORMATS = ("json", "verbose_json", "text", "srt", "vtt")
SCHEMA = {"type": "object", "properties": {"ö": {"type": "string"}}}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
FLAT_TOOLS = {"tools": [{"type": "function", **TOOL}]}
CALLING = 'say *think *more text !f ={"a": =1} !f'
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it?", "name": "p"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "ä"}, {"value": True}]},
    {
        "type": "score",
        "instructions": "How?",
        "levels": [{"label": "low"}, {"label": "high"}, {"label": "top"}],
    },
]
NAMED = {
    "n": {"type": "noul", "instructions": "Is it?"},
    "c": {"type": "choice", "criteria": {"a": "first", "ü": None}},
    "s": {"type": "score", "criteria": ["low", {"deep": [1, 2.5, None]}]},
}


def chat_body(text: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def by_name(method: str, bodies: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str, Any]]:
    return {
        name: (method, path, body) for path, named in bodies.items() for name, body in named.items()
    }


# The bodies of POST requests by path and name: JSON, or raw bytes.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "chat": chat_body("hi"),
        "chat, words to escape": chat_body('say "a" \\b </c> é 漢 🙂 \u2028 \x7f'),
        "chat, two choices": chat_body("hi", n=2, max_tokens=2, model="demo"),
        "chat, logprobs": chat_body("hi", logprobs=True, top_logprobs=2),
        "chat, prompt logprobs and ids": chat_body("hi", prompt_logprobs=1, return_token_ids=True),
        "chat, reasoning and calls": chat_body(CALLING, **TOOLS),
        "chat, calls alone": chat_body("say !f ={}", **TOOLS),
        "chat, reasoning alone": chat_body("say *think"),
        "chat, schema": chat_body(
            "hi",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        ),
        "chat, streamed": chat_body("hi", stream=True),
        "chat, streamed words to escape": chat_body(
            'say "a" \\b </c> é 漢 🙂 \u2028 \x7f', stream=True
        ),
        "chat, streamed choices": chat_body("say a b", n=2, **USAGE),
        "chat, streamed continuous usage": chat_body("say a b", **CONTINUOUS),
        "chat, streamed logprobs": chat_body("hi", logprobs=True, top_logprobs=1, **USAGE),
        "chat, streamed ids": chat_body("say a b", return_token_ids=True, stream=True),
        "chat, streamed reasoning and calls": chat_body(CALLING, **TOOLS, **USAGE),
        "chat, streamed calls with ids": chat_body(
            CALLING, **TOOLS, return_token_ids=True, logprobs=True, stream=True
        ),
        "chat, streamed and failing": chat_body("bad later", stream=True, max_tokens=9),
        "chat, failing": chat_body("bad"),
        "chat, failing before the stream": chat_body("bad", stream=True),
        "chat, refused": chat_body("refused"),
        "chat, no messages": {"messages": []},
        "chat, a range": chat_body("hi", temperature=3),
        "chat, an unknown value": chat_body("hi", reasoning_effort="vast"),
        "chat, a wrong type": chat_body("hi", stop=["a", 1]),
        "chat, no role": {"messages": [{"content": "hi"}]},
        "chat, unimplemented": chat_body("hi", store=True),
        "chat, unimplemented default": chat_body("hi", store=False, n=1),
        "chat, unimplemented nested": chat_body("hi", structured_outputs={"structural_tag": "x"}),
        "chat, a tool that is unknown": chat_body(
            "hi", **TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}
        ),
        "chat, a bias that is no id": chat_body("hi", logit_bias={"x": 1}),
        "chat, an image": chat_body([PICTURE]),
        "chat, an unknown model": chat_body("hi", model="gpt"),
        "chat, no JSON": b"{",
        "chat, a list": b"[]",
        "chat, half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "chat, too large": b" " * 200_000,
    },
    TEXT: {
        "text": {"prompt": "hi"},
        "text, list": {"prompt": ["say a", "say b c"], "n": 2, "max_tokens": 2},
        "text, ids": {"prompt": [104, 105], "return_token_ids": True},
        "text, echo and logprobs": {"prompt": "hi", "echo": True, "logprobs": 2},
        "text, echo alone": {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 1},
        "text, prompt logprobs": {"prompt": "hi", "prompt_logprobs": 2},
        "text, streamed": {"prompt": "hi", "stream": True},
        "text, streamed list": {"prompt": ["say a", "say b"], **USAGE},
        "text, streamed logprobs and ids": {
            "prompt": "hi",
            "logprobs": 1,
            "echo": True,
            "return_token_ids": True,
            "stream": True,
        },
        "text, streamed and failing": {"prompt": "bad later", "stream": True},
        "text, no prompt": {},
        "text, mixed": {"prompt": ["a", 1]},
        "text, best of": {"prompt": "a", "best_of": 2},
    },
    RESPONSES: {
        "responses": {"input": "hi", "store": False},
        "responses, everything": {
            "input": CALLING,
            **FLAT_TOOLS,
            "instructions": "ä",
            "temperature": 1,
            "top_p": 0.5,
            "metadata": {"a": "b"},
            "user": "u",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "tool_choice": "auto",
            "reasoning": {"effort": "low"},
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": SCHEMA},
                "verbosity": "low",
            },
        },
        "responses, cut": {"input": "hi", "max_output_tokens": 2},
        "responses, items": {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "user", "content": [{"type": "input_text", "text": "say a"}]},
            ]
        },
        "responses, streamed": {"input": "hi", "stream": True},
        "responses, streamed reasoning and calls": {"input": CALLING, **FLAT_TOOLS, "stream": True},
        "responses, streamed logprobs": {
            "input": "hi",
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
        "responses, streamed and cut": {"input": "hi", "stream": True, "max_output_tokens": 2},
        "responses, streamed and failing": {"input": "bad later", "stream": True},
        "responses, failing": {"input": "bad"},
        "responses, json object": {"input": "hi", "text": {"format": {"type": "json_object"}}},
        "responses, a chosen tool": {
            "input": "hi",
            **FLAT_TOOLS,
            "tool_choice": {"type": "function", "name": "f"},
        },
        "responses, unimplemented": {"input": "hi", "prompt": "a"},
        "responses, unknown previous": {"input": "hi", "previous_response_id": "resp_1"},
        "responses, unknown item": {"input": [{"type": "item_reference", "id": "x"}]},
        "responses, no output": {"input": [{"type": "function_call_output", "call_id": "c"}]},
    },
    "/v1/decisions": {
        "decisions": {"input": "it", "questions": QUESTIONS},
        "decisions, items": {
            "input": [{"role": "user", "content": [{"type": "input_json", "data": {"ä": 1}}]}],
            "questions": QUESTIONS,
        },
        "decisions, no questions": {"input": "it", "questions": []},
        "decisions, an unknown kind": {"input": "it", "questions": [{"type": "x"}]},
    },
    "/v1/systemone": {
        "systemone": {"state": {"ä": [1]}, "questions": NAMED},
        "systemone, images": {"state": "x", "questions": NAMED, "assets": {"a": 1}},
    },
    "/v1/embeddings": {
        "embeddings": {"input": "hi"},
        "embeddings, list": {"input": ["hi", "ho"], "dimensions": None},
        "embeddings, base64": {"input": ["hi", "ho"], "encoding_format": "base64"},
        "embeddings, both": {"input": "hi", "inputs": "ho"},
        "embeddings, empty": {"input": []},
        "embeddings, too long": {"input": "hi " * 5000},
    },
    "/embed": {"embeddings, bare": {"inputs": ["hi", "ho"]}},
    "/rerank": {
        "rerank": {"query": "q", "documents": ["a", {"text": "ccc"}, "bb"]},
        "rerank, bare without texts": {"query": "q", "texts": ["a", "ß"]},
        "rerank, nothing": {"query": "q"},
    },
    "/v1/rerank": {
        "rerank, top": {
            "query": "q",
            "documents": ["a", "bb"],
            "top_n": 1,
            "return_documents": False,
        }
    },
    "/v2/rerank": {"rerank, bare": {"query": "q", "texts": ["a", "ß"], "return_text": True}},
    "/v1/score": {
        "score": {"text_1": "q", "text_2": ["a", "bb"]},
        "score, embedded": {"model": "demo-embedding", "text_1": "q", "text_2": ["a", "q"]},
        "score, unequal": {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]},
    },
    "/tokenize": {
        "tokenize": {"prompt": "aé", "return_token_strs": True},
        "tokenize, chat": chat_body("hi", add_generation_prompt=True),
        "tokenize, nothing": {},
    },
    "/detokenize": {
        "detokenize": {"tokens": [97, 233]},
        "detokenize, unknown": {"tokens": [97, 5000]},
    },
    "/load_model": {"load": {"model": "demo"}},
    "/": {"no pipeline": b"hi"},
    AUDIO: {"audio, no form": {"file": "x"}},
}
# Those of forms with a recording.
FORMS: dict[str, dict[str, Any]] = {
    AUDIO: {
        **{f"audio, {format}": {"response_format": format} for format in FORMATS},
        "audio, words": {
            "response_format": "verbose_json",
            "timestamp_granularities[]": ["word", "segment"],
        },
        "audio, logprobs": {"include[]": "logprobs", "language": "de"},
        "audio, streamed": {"stream": "true", "include[]": "logprobs"},
        "audio, streamed and failing": {"stream": "true", "prompt": "bad later"},
        "audio, refused": {"prompt": "refused"},
        "audio, unimplemented": {"chunking_strategy": "server_vad"},
        "audio, a range": {"temperature": "2"},
    },
    "/v1/audio/translations": {"audio, translated": {"response_format": "verbose_json"}},
}
# name: (method, path, body)
REQUESTS: dict[str, tuple[str, str, Any]] = {
    **by_name("POST", BODIES),
    **by_name("FORM", FORMS),
    "chat, GET": ("GET", CHAT, None),
    "responses, unknown": ("GET", RESPONSES + "/resp_1", None),
    "responses, unknown items": ("GET", RESPONSES + "/resp_1/input_items", None),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/demo", None),
    "model, unknown": ("GET", "/v1/models/other", None),
    "health": ("GET", "/health", None),
    "ready": ("GET", "/ready", None),
    "ping": ("GET", "/ping", None),
    "no path": ("GET", "/v1/nothing", None),
    "method": ("DELETE", "/v1/embeddings", None),
}


# Responses that are stored, each with the requests that follow.
LIVES = {
    "response, stored": {"input": "hi", "metadata": {"ä": "b"}},
    "response, in the background": {"input": CALLING, **FLAT_TOOLS, "background": True},
}
LIFE = [
    ("GET", ""),
    ("GET", "?stream=true"),
    ("GET", "/input_items?order=asc&limit=1"),
    ("GET", "/input_items?limit=0"),
    ("POST", "/cancel"),
    ("DELETE", ""),
    ("GET", ""),
]


class PacedGenerator(FakeGenerator):
    """Steps once the readers of streams have taken the last step's deltas: deltas that are read
    late are merged, and the number of events would depend on the machine."""

    loop: asyncio.AbstractEventLoop | None = None

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        wait_for_readers(self.loop)
        return super().step(idle_since)


class PacedTranscriber(FakeTranscriber):
    loop: asyncio.AbstractEventLoop | None = None

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        wait_for_readers(self.loop)
        return super().step(idle_since)


def wait_for_readers(loop: asyncio.AbstractEventLoop | None) -> None:
    for _ in range(ROUND_TRIPS if loop else 0):
        passed = threading.Event()
        assert loop is not None
        loop.call_soon_threadsafe(passed.set)
        assert passed.wait(60)


class FakeReranker:
    """Scores a document by its length."""

    info = ModelInfo("text-ranking", "fake", "cpu", "float32", 0, "packed")
    max_model_len = 512
    refused_media = TEXT_ONLY
    transcription_chat = staticmethod(transcription_chat)

    @property
    def text_model(self) -> Any:
        return self

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = [len(document) for _, document in item.payload.pairs]

    def forward(self, prepared: list[Any]) -> list[Any]:
        return prepared

    def finish(self, item: WorkItem, raw: Any) -> Any:
        return ScoringOutput([1 - 1 / (1 + entry / 3) for entry in raw], sum(raw))

    def warm_up(self) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    generator, transcriber = PacedGenerator(), PacedTranscriber()
    loaders: Any = {
        "load_chat": lambda: generator,
        "load_reranker": FakeReranker,
        "load_transcriber": lambda: transcriber,
    }
    with serving(embedding_model="demo", compile="off", max_body_mb=0.1, **loaders) as started:
        generator.loop = transcriber.loop = started.worker_client.loop
        yield started


def ask(server: Server, method: str, path: str, body: Any) -> httpx.Response:
    url = server.url + path
    if method == "FORM":
        return CLIENT.post(url, files={"file": ("a.wav", wav())}, data=body)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return CLIENT.request(
        method, url, content=content, headers={"content-type": "application/json"}
    )


def wav() -> bytes:
    """A second and a half of silence."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(48_000))
    return buffer.getvalue()


def normalized(name: str, response: httpx.Response) -> dict[str, Any]:
    content = response.content
    for pattern, stand_in in NORMALIZED + (NUMBERS if "embed" in name else []):
        content = re.sub(pattern, stand_in, content)
    headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
    if response.status_code >= 400:  # closes if the body has not arrived yet
        headers.pop("connection", None)
    if "allow" in headers:
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
    return {"status": response.status_code, "headers": headers, "body": content.decode()}


def answers(server: Server, name: str) -> list[dict[str, Any]]:
    """One response, or those of a stored response's life."""
    if name in REQUESTS:
        return [normalized(name, ask(server, *REQUESTS[name]))]
    response = ask(server, "POST", RESPONSES, LIVES[name])
    found = [normalized(name, response)]
    path = f"{RESPONSES}/{response.json()['id']}"
    wait_until(lambda: ask(server, "GET", path, None).json()["status"] == "completed")
    for method, suffix in LIFE:
        found.append(normalized(name, ask(server, method, path + suffix, None)))
    return found


@pytest.fixture(scope="module")
def recorded(server: Server) -> dict[str, Any]:
    if "RECORD" in os.environ:
        responses = {name: answers(server, name) for name in (*REQUESTS, *LIVES)}
        content = json.dumps(responses, ensure_ascii=False, indent=0)
        RECORDED.write_text(content.replace("\u2028", "\\u2028") + "\n")
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.mark.parametrize("name", [*REQUESTS, *LIVES])
def test_response_is_byte_for_byte_as_recorded(
    server: Server, recorded: dict[str, Any], name: str
) -> None:
    assert answers(server, name) == recorded[name]
