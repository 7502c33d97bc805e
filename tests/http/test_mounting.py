"""The app mounted in another one, as docs/deployment.md shows, and called in process."""

import asyncio
import gc
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from batching.errors import WorkerDown
from server import app as app_module
from server.app import create_app, import_torch
from server.core.settings import Settings
from server.http.request import NOT_STARTED, Application
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
Use = Callable[[httpx.AsyncClient], Awaitable[None]]


def make_llm(_: object = None, **more: Any) -> Application:
    only: dict[str, Any] = {"embedding_model": "none", **more}
    return create_app(Settings(**only), FakeRunner, FakeGenerator)


async def hello(request: Request) -> Response:
    return PlainTextResponse("the host's own route")


def make_host(llm: Application, **more: Any) -> Starlette:
    routes = [Route("/hello", hello), Mount("/llm", llm)]
    return Starlette(routes=routes, lifespan=llm.lifespan, **more)


def client_of(app: ASGIApp, path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url=f"http://localhost{path}", timeout=60)


@asynccontextmanager
async def started(host: Starlette, llm: Application) -> AsyncIterator[None]:
    """Run the host's lifespan, as its web server does."""
    async with host.router.lifespan_context(host):
        await llm.worker_client.loaded
        yield


def use(host: Starlette, llm: Application, requests: Use) -> None:
    async def run() -> None:
        async with started(host, llm), client_of(host) as client:
            await requests(client)

    asyncio.run(run())


def documented_lines() -> str:
    [lines] = re.findall(r"^```python\n(.*?Mount\(.*?)^```$", DEPLOYMENT.read_text(), re.M | re.S)
    return str(lines)


def test_the_documented_lines_serve_under_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len([line for line in documented_lines().splitlines() if line]) == 6
    monkeypatch.setattr(app_module, "create_app", make_llm)
    names: dict[str, Any] = {}
    exec(documented_lines(), names)
    host, llm = names["app"], names["llm"]
    question = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}

    async def requests(client: httpx.AsyncClient) -> None:
        assert (await client.get("/llm/ready")).status_code == 200
        assert (await client.post("/llm/", content="a")).json() == {"echo": "a"}
        answer = await client.post("/llm/v1/chat/completions", json=question)
        assert answer.json()["choices"][0]["message"]["content"]
        streamed = await client.post("/llm/v1/chat/completions", json={**question, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await client.get("/hello")).status_code == 404  # the host has no such route

    use(host, llm, requests)
    assert not llm.worker_client.worker.thread.is_alive()


def test_errors_paths_and_the_document_are_those_of_the_mounted_app() -> None:
    llm = make_llm()
    host = make_host(llm)

    async def requests(client: httpx.AsyncClient) -> None:
        assert (await client.get("/hello")).text == "the host's own route"
        missing = await client.post("/llm/nope")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert missing.json()["error"]["message"].startswith("there is no route /nope: ")
        versioned = (await client.post("/llm/chat/completions")).json()["error"]["message"]
        assert "/v1 is missing" in versioned
        wrong = await client.put("/llm/")
        assert (wrong.status_code, "POST" in wrong.headers["allow"]) == (405, True)
        failed = await client.post("/llm/", content="bad")
        assert failed.json()["error"]["code"] == "item_failed"
        document = (await client.get("/llm/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/chat/completions" in document["paths"]
        examples = (await client.get("/llm/")).text
        assert "curl http://localhost/llm/ -d" in examples
        assert "http://localhost/llm/v1/chat/completions" in examples
        page = await client.get("/llm/", headers={"accept": "text/html"})
        assets = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert len(assets) > 3
        for path in assets:
            assert (await client.get(f"/llm/{path}")).status_code == 200, path
        counted = (await client.get("/llm/metrics")).text
        assert 'onequeue_requests_total{endpoint="/v1/chat/completions"' not in counted
        assert 'onequeue_requests_total{endpoint="/",status="500"}' in counted

    use(host, llm, requests)


@pytest.mark.parametrize("root", ["", "/api"])
def test_the_path_without_a_slash_is_redirected(root: str) -> None:
    llm = make_llm()
    host = make_host(llm)

    async def run() -> None:
        transport = httpx.ASGITransport(host, root_path=root)
        client = httpx.AsyncClient(transport=transport, base_url="http://their.site")
        async with started(host, llm), client:
            for method, query in (("GET", ""), ("POST", "?top_k=1&targets=a%20b")):
                moved = await client.request(method, f"{root}/llm{query}")
                assert moved.status_code == 307
                assert moved.headers["location"] == f"http://their.site{root}/llm/{query}"
            path = f"{root}/llm?top_k=1"
            answer = await client.post(path, content="a", follow_redirects=True)
            assert answer.json() == {"echo": "a"}

    asyncio.run(run())


def test_keys_and_cross_site_rules_hold_in_a_mounted_app() -> None:
    keyed = make_llm(api_keys=("key",))

    async def with_keys(client: httpx.AsyncClient) -> None:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/")).status_code == 200
        assert (await client.get("/llm/assets/page.js")).status_code == 200
        assert (await client.get("/llm/openapi.json")).status_code == 401
        refused = await client.post("/llm/", content="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": "Bearer key"}
        assert (await client.post("/llm/", content="a", headers=headers)).status_code == 200

    use(make_host(keyed), keyed, with_keys)
    open_app = make_llm()

    async def without_keys(client: httpx.AsyncClient) -> None:
        foreign = {"origin": "https://their.site"}
        assert (await client.post("/llm/", content="a", headers=foreign)).status_code == 403
        assert (await client.post("/llm/", content="a")).status_code == 200

    use(make_host(open_app), open_app, without_keys)


def test_it_works_behind_the_middleware_of_a_host() -> None:
    async def add_header(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-host"] = "seen"
        return response

    llm = make_llm()
    middleware = [Middleware(GZipMiddleware), Middleware(BaseHTTPMiddleware, dispatch=add_header)]
    host = make_host(llm, middleware=middleware)

    async def requests(client: httpx.AsyncClient) -> None:
        response = await client.post("/llm/", content="a")
        assert (response.json(), response.headers["x-host"]) == ({"echo": "a"}, "seen")
        page = await client.get("/llm/assets/page.js")
        assert page.headers["content-encoding"] == "gzip"

    use(host, llm, requests)


def test_without_the_lifespan_each_request_gets_503_with_the_remedy() -> None:
    llm = make_llm(api_keys=("key",))
    without = Starlette(routes=[Mount("/llm", llm)])

    async def run() -> None:
        async with without.router.lifespan_context(without), client_of(without, "/llm") as client:
            for method, path in (
                ("POST", "/"), ("GET", "/"), ("GET", "/health"), ("POST", "/v1/responses"),
            ):  # fmt: skip
                refused = await client.request(method, path)
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == NOT_STARTED

    asyncio.run(run())
    assert "async with llm.lifespan()" in NOT_STARTED


def state_of_process() -> list[object]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    collection = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()
    return [handlers, sys.getswitchinterval(), *collection]


def test_the_host_keeps_its_signals_threads_and_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[str] = []
    for name in ("disable", "enable", "freeze", "unfreeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *args, name=name: changes.append(name))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.004)

    def load() -> FakeRunner:
        import_torch()
        return FakeRunner()

    only: dict[str, Any] = {"embedding_model": "none", "chat_model": "none"}
    llm = create_app(Settings(**only), load)
    host = make_host(llm)

    async def run() -> None:
        before = state_of_process()
        async with started(host, llm), client_of(host) as client:
            assert (await client.post("/llm/", content="a")).status_code == 200
            assert state_of_process() == before
        assert state_of_process() == before

    try:
        asyncio.run(run())
        assert changes == []
    finally:
        sys.setswitchinterval(interval)


def test_a_model_that_cannot_be_loaded_leaves_the_host_running(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> FakeRunner:
        raise OSError("no such file")

    llm = create_app(Settings(chat_model="none", embedding_model="none"), fail)
    host = make_host(llm)

    async def run() -> None:
        async with host.router.lifespan_context(host), client_of(host) as client:
            with pytest.raises(WorkerDown):
                await llm.worker_client.loaded
            assert (await client.get("/hello")).status_code == 200
            assert (await client.post("/llm/", content="a")).status_code == 503

    asyncio.run(run())
    assert "no such file" in capsys.readouterr().err
