"""Exceptions become error responses by their class or its nearest known base."""

import asyncio
from collections.abc import AsyncIterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Message

from batching.errors import ClientGone, ContextExceeded, InvalidInput, OutOfMemory, QueueFull
from batching.request_queue import WorkItem
from server.apis.openai.audio.endpoint import OPERATIONS
from server.apis.openai.embedding.embeddings import EMBEDDINGS
from server.apis.openai.embedding.rerank import RERANK
from server.core.request_context import RequestRecord
from server.core.settings import Settings
from server.http.errors import (
    MAX_MESSAGE,
    MAX_PARAM,
    PATHS_BY_REPLACEMENT,
    REPLACEMENT_FOR_PATH,
    SETTING_FOR_PATH,
    HttpError,
    as_http_error,
)
from server.http.paths import route_path
from server.http.sse import EventStream
from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.fakes import FakeRunner, PanicException
from tests.serving import Server, metric, server_fixture, serving

APP = SimpleNamespace(routes=[])
SCOPE: dict[str, Any] = {"record": RequestRecord(), "path": "/x", "method": "GET", "app": APP}


server = server_fixture(FakeRunner)


class VeryFull(QueueFull):
    pass


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (VeryFull("full"), 503, "queue_full", "queue_full"),
        (OutOfMemory("large"), 500, "out_of_memory", "out_of_memory"),
        (InvalidInput("x", "a"), 400, "invalid_value", "invalid_value"),
        (ContextExceeded.of(8, "x", "a"), 400, *["context_length_exceeded"] * 2),
        (HTTPException(404), 404, "not_found", "routing"),
        (HTTPException(418), 418, "http_error", "routing"),
        (HttpError(404, "x", code="model_not_found"), 404, "model_not_found", "not_found"),
        (KeyError("a"), 500, "internal", "internal"),
    ],
)
def test_an_error_gets_the_status_of_its_nearest_known_class(
    error: Exception, status: int, code: str, kind: str
) -> None:
    response = as_http_error(error, SCOPE, debug=False)
    assert (response.status, response.code, response.kind) == (status, code, kind)
    assert (b"retry-after" in dict(response.headers)) == isinstance(error, VeryFull)


def test_a_path_without_its_model_names_the_setting(server: Server) -> None:
    operations = [*OPERATIONS.values(), *EMBEDDINGS, *RERANK]
    assert {operation.key.split()[1] for operation in operations} <= set(SETTING_FOR_PATH)
    for path in set(SETTING_FOR_PATH) - {"/"}:
        response = httpx.post(server.url + path, json={})
        assert response.status_code == 404
        reason = f"{path}: it needs {SETTING_FOR_PATH[path]}"
        assert response.json()["error"]["message"].endswith(reason)
        assert "needs" not in httpx.get(server.url + path).text
    assert "needs" not in httpx.post(server.url + "/nope").text
    scope = SCOPE | {"path": "/", "method": "POST"}
    refused = as_http_error(HTTPException(405), scope, debug=False)
    assert refused.document["error"]["message"] == "/ does not take POST: it needs PIPELINE_MODEL"


def test_an_unknown_path_or_method_names_the_known_ones() -> None:
    with serving(FakeRunner, load_chat=FakeGenerator) as server:

        def message(method: str, path: str) -> str:
            response = httpx.request(method, server.url + path)
            return str(response.json()["error"]["message"])

        meant = ": the path is /v1/chat/completions"
        for path in ("/v1/chat/completions/", "/v1/v1/chat/completions", "/v1/chat"):
            assert message("POST", path).endswith(path + meant)
        assert message("GET", "/v1/health").endswith(": the path is /health")
        for path in ("/api", "/v1", "/v1/", "/v1/agents", "/v1/v1", "//"):
            assert "GET /docs lists the routes" in message("POST", path)
        expected = "/v1/chat/completions does not take GET, but POST"
        assert message("GET", "/v1/chat/completions") == expected
        assert message("PUT", "/").startswith("/ does not take PUT, but ")
        empty = message("POST", "/v1/chat/completions")
        assert empty == "the body is empty: it must be JSON"


def test_a_path_of_another_server_names_what_to_use_instead(server: Server) -> None:
    instead = {
        "/api/chat": "POST /v1/chat/completions",
        "/completion": "POST /v1/completions",
        "/v1/images/generations": "another server: no images are generated here",
        "/info": "GET /models",
    }
    for (path, use), method in product(instead.items(), ("GET", "POST")):
        response = httpx.request(method, server.url + path)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"there is no route {path}: use {use}"
    routes = {route.path for route in server.app.routes}
    assert not routes & set(REPLACEMENT_FOR_PATH)
    for method, known in (("GET", routes), ("POST", set(SETTING_FOR_PATH))):
        uses = [use.split() for use in PATHS_BY_REPLACEMENT if use.startswith(f"{method} ")]
        assert {path.rstrip(":") for _, path, *_ in uses} <= known


def test_a_path_without_v1_has_a_hint() -> None:
    served = ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions"]
    served += ["/v1/completions", "/v1/responses", "/v1/responses/resp_1"]
    served += ["/v1/embeddings", "/v1/models/demo"]
    fakes: dict[str, Any] = {"load_chat": FakeGenerator, "load_transcriber": FakeTranscriber}
    with serving(load_embedder=FakeRunner, **fakes, ready=False) as server:
        for path in served:
            missing = httpx.post(server.url + path.removeprefix("/v1"), json={})
            assert missing.status_code == 404
            assert f": /v1 is missing. The path is {path};" in missing.json()["error"]["message"]
        for path in ("/nope", "/v1/nope", "/v1"):
            assert "missing" not in httpx.post(server.url + path).text
    with serving(FakeRunner, ready=False) as server:
        assert "/v1 is missing" in httpx.post(server.url + "/chat/completions").text
        assert "/v1 is missing" not in httpx.get(server.url + "/models/a").text  # not served at all


def test_the_root_path_is_not_part_of_a_path() -> None:
    """uvicorn prefixes each path with `--root-path`."""
    with serving(FakeRunner, api_keys=("key",)) as server:
        server.uvicorn.config.root_path = "/llm"
        for path in ("/health", "/ready", "/", "/assets/chat.js"):
            assert httpx.get(server.url + path).status_code == 200
        assert httpx.post(server.url, content="a").status_code == 401
        key = {"x-api-key": "key"}
        refused = httpx.post(server.url + "/v1/embeddings", headers=key, json={})
        assert "it needs EMBEDDING_MODEL" in refused.text
        assert metric(server, 'onequeue_requests_total{endpoint="/health",status="200"}') == 1


@pytest.mark.parametrize("root", ["", "/llm", "/llm/", "/llm/v1"])
@pytest.mark.parametrize("path", ["", "/", "/health", "/llm", "/llm/", "/llm/health", "/llmx", "*"])
def test_a_path_is_read_as_the_router_reads_it(root: str, path: str) -> None:
    """Else a key that a route needs is not asked for."""
    scope = SCOPE | {"type": "http", "path": path, "root_path": root}
    _, child = Route("/{path:path}", lambda _: None).matches(scope)
    below = route_path(scope)
    assert below == f"/{child['path_params']['path']}" if child else below in ("", "*")


def test_messages_and_fields_are_cut() -> None:
    details = HttpError(400, "m" * 9999, "p" * 999).document["error"]
    assert len(details["message"]) == MAX_MESSAGE
    assert len(details["param"]) == MAX_PARAM


def test_a_failed_probe_is_not_counted_as_an_error(server: Server) -> None:
    server.worker_client.draining = True
    assert httpx.get(server.url + "/ready").json()["error"]["code"] == "not_ready"
    server.worker_client.draining = False
    for kind in ("not_ready", "draining"):
        assert metric(server, f'onequeue_errors_total{{kind="{kind}"}}') == 0


NO_FIT = "the input does not fit the task fill-mask"


@pytest.mark.parametrize(
    ("raised", "status", "code", "message"),
    [
        (MemoryError(), 500, "out_of_memory", "this input does not fit into memory"),
        (OutOfMemory("large"), 500, "out_of_memory", "large"),
        (torch.OutOfMemoryError("a text of so many tokens"), 400, "invalid_value", NO_FIT),
        (RuntimeError("CUDA error: invalid"), 400, "invalid_value", NO_FIT),
        (InvalidInput("x", "inputs"), 400, "invalid_value", "x"),
        (PanicException("in the tokenizer"), 400, "invalid_value", NO_FIT),
    ],
)
def test_an_error_of_preparing_is_400_unless_memory_runs_out(
    raised: BaseException, status: int, code: str, message: str
) -> None:
    class Unpreparing(FakeRunner):
        def prepare(self, item: WorkItem) -> None:
            raise raised

    with serving(Unpreparing) as server:
        response = httpx.post(server.url + "/", content="a text")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (status, code, message)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("broken pipe"), ClientGone),
        (RuntimeError("unable to perform operation on <transport closed=True>"), ClientGone),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_an_error_of_sending_an_event_becomes_client_gone(
    error: Exception, raised: type[Exception]
) -> None:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise error

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    async def stream() -> None:
        scope = {"send": send, "app": SimpleNamespace(settings=Settings())}
        await EventStream(scope, send, lambda: None).run(events())

    with pytest.raises(raised):
        asyncio.run(stream())


def test_a_path_with_a_slash_at_the_end_is_no_redirect(server: Server) -> None:
    for path in ("/assets/icon.svg/", "/health/", "/ready/"):
        response = httpx.get(server.url + path, headers={"Host": "10.0.0.1"})
        assert response.status_code == 404
        assert "location" not in response.headers
