"""Every response byte for byte as it was recorded, except for ids, times and the words of errors,
and what the models of language and speech get for each request.

`recorded/exchanges.json` has requests by name, in order, each name with the inputs of the model and
the responses. `{id}` in a later request is the id of the first response. The models are fakes, so
that no number depends on the machine; the embedding model is the demo, with its numbers left out.
To record anew, which changes the API, or to add requests: `RECORD=1 pytest <this file>`.
"""

import asyncio
import io
import json
import os
import re
import threading
import wave
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from batching.request_queue import WorkItem
from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.fakes import FakeRunner
from tests.response_events import events, response_document
from tests.serving import Server, serving, wait_until
from worker.messages.protocol import ModelInfo, StepOutcome
from worker.messages.scoring import ScoringOutput

FILE = Path(__file__).parent / "recorded" / "exchanges.json"
EXCHANGES: dict[str, dict[str, list[Any]]] = json.loads(FILE.read_text())
HEADERS = ["content-type", "retry-after", "allow", "cache-control", "connection"]
HEADERS += ["x-ignored-fields", "x-dropped-tools"]
ROUND_TRIPS = 20  # through the event loop, until a stream's reader has taken the last deltas

# Patterns of ids, times and error messages, each with its placeholder.
NORMALIZED = [
    (rb"(chatcmpl|cmpl|resp|msg|rs|fc|fco|ctc|lsh|rerank|score)(_|-)[0-9a-f]{24,48}", rb"\1\2ID"),
    (rb'"(request_id|signature|encrypted_content)":"[^"]+"', rb'"\1":"ID"'),
    (rb'"(created|created_at|completed_at)":\d{10}', rb'"\1":0'),
    (rb'"message":"(?:[^"\\]|\\.)*"', rb'"message":"MESSAGE"'),
]
NUMBERS = [
    (rb"-?\d+\.\d+(e-?\d+)?", rb"0.5"),
    (rb"(0\.5,)+0\.5", rb"0.5"),
    (rb'"embedding":"[A-Za-z0-9+/=]+"', rb'"embedding":"BASE64"'),
]


UNSTABLE = ("cache_namespace", "path")  # fields of inputs


class PacedGenerator(FakeGenerator):
    """Steps once the readers of streams have taken the last step's deltas: deltas that are read
    late are merged, and the number of events would depend on the machine."""

    loop: asyncio.AbstractEventLoop | None = None

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        wait_for_readers(self.loop)
        return super().step(idle_since)


class PacedTranscriber(FakeTranscriber, PacedGenerator):
    pass


def wait_for_readers(loop: asyncio.AbstractEventLoop | None) -> None:
    for _ in range(ROUND_TRIPS if loop else 0):
        passed = threading.Event()
        assert loop is not None
        loop.call_soon_threadsafe(passed.set)
        assert passed.wait(60)


Models = tuple[PacedGenerator, PacedTranscriber]


class FakeReranker(FakeRunner):
    """Scores a document by its length."""

    info = ModelInfo("text-ranking", "fake", "cpu", "float32", 0, "packed")

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = [len(document) for _, document in item.payload.pairs]

    def forward(self, prepared: list[Any]) -> list[Any]:
        return prepared

    def finish(self, item: WorkItem, raw: Any) -> Any:
        return ScoringOutput([1 - 1 / (1 + entry / 3) for entry in raw], sum(raw))


@pytest.fixture(scope="module")
def models() -> Models:
    return PacedGenerator(), PacedTranscriber()


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    generator, transcriber = models
    loaders: Any = {
        "load_chat": lambda: generator,
        "load_reranker": FakeReranker,
        "load_transcriber": lambda: transcriber,
    }
    settings: Any = {"compile": "off", "model_aliases": ("claude-*=demo", "gpt-*=demo")}
    with serving(embedding_model="demo", **settings, **loaders) as started:
        generator.loop = transcriber.loop = started.worker_client.loop
        yield started


def ask(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Send a request with a body of JSON, `{"raw": text}`, or a form with a recording."""
    url = server.url + path
    if method == "FORM":
        return CLIENT.post(url, files={"file": ("a.wav", wav())}, data=body)
    if body is not None:
        body = body["raw"] if "raw" in body else json.dumps(body)
    headers = {"content-type": "application/json"} | (headers or {})
    return CLIENT.request(method, url, content=body, headers=headers)


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


def described(value: Any) -> Any:
    """Return a model's input as JSON, without fields that have their default."""
    if is_dataclass(value):
        defaults = {
            field.name: field.default
            if field.default_factory is MISSING
            else field.default_factory()
            for field in fields(value)
        }
        own = {name: getattr(value, name) for name in defaults if name not in UNSTABLE}
        return {name: described(it) for name, it in own.items() if it != defaults[name]}
    if isinstance(value, Mapping):
        return {str(name): described(it) for name, it in value.items()}
    return [*map(described, value)] if isinstance(value, tuple | list) else value


def exchanged(server: Server, models: Models, name: str) -> dict[str, list[Any]]:
    """Send the requests of a name; return them with the model's inputs and the responses."""
    requests, inputs, responses, id = EXCHANGES[name]["requests"], [], [], ""
    for request in requests:
        payloads: list[list[Any]] = [model.payloads for model in models]
        for each in payloads:
            each.clear()
        response = ask(server, *json.loads(json.dumps(request).replace("{id}", id)))
        responses.append(normalized(name, response))
        if not id and (found := re.search(r"resp_[0-9a-f]{24,}", response.text)):
            id = found[0]
            wait_until(lambda: is_ended(server, id))  # noqa: B023
        by_choice = sorted(
            chain(*payloads), key=lambda payload: getattr(payload, "first_choice", 0)
        )
        inputs.append(described(by_choice))
    return {"requests": requests, "inputs": inputs, "responses": responses}


def is_ended(server: Server, id: str) -> bool:
    """Return whether a response is not generated any more, or not stored."""
    status = ask(server, "GET", f"/v1/responses/{id}").json().get("status")
    return status not in ("queued", "in_progress")


@pytest.fixture(scope="module", autouse=True)
def _record(server: Server, models: Models) -> None:
    if "RECORD" in os.environ:
        for name in EXCHANGES:
            EXCHANGES[name] = exchanged(server, models, name)
        FILE.write_text(written(EXCHANGES).replace("\u2028", "\\u2028"))


def written(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each request, input and response."""
    if depth == 3 or not value:
        return json.dumps(value, ensure_ascii=False)
    start, end = "{}" if isinstance(value, dict) else "[]"
    entries = [written(entry, depth + 1) for entry in (value.values() if start == "{" else value)]
    if start == "{":
        entries = [f"{json.dumps(key)}: {entry}" for key, entry in zip(value, entries, strict=True)]
    lines = ",\n".join(" " * (depth + 1) + entry for entry in entries)
    return f"{start}\n{lines}\n{' ' * depth}{end}" + "\n" * (depth == 0)


@pytest.mark.parametrize("name", EXCHANGES)
def test_response_is_byte_for_byte_as_recorded(server: Server, models: Models, name: str) -> None:
    assert exchanged(server, models, name) == EXCHANGES[name]


@pytest.mark.parametrize(
    "name", [name for name in EXCHANGES if "/v1/responses" in str(EXCHANGES[name])]
)
def test_recorded_responses_and_events_are_valid_for_the_sdk(name: str) -> None:
    exchange = EXCHANGES[name]
    for (_, path, *_), recorded in zip(exchange["requests"], exchange["responses"], strict=True):
        if recorded["status"] == 200 and re.fullmatch(r"/v1/responses(/{id}(\?.*)?)?", path):
            answer = httpx.Response(200, headers=recorded["headers"], text=recorded["body"])
            if "stream" in recorded["headers"]["content-type"]:
                after = path.partition("starting_after=")[2] or -1
                events(answer, int(after) + 1)
            elif '"deleted":true' not in answer.text:
                response_document(answer)
