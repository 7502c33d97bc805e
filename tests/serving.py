"""Run the real app over real sockets, with uvicorn in a thread of this process."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
import uvicorn

from server.app import create_app
from server.core.settings import Settings
from server.http.connections import LimitedH11, LimitedHttpTools
from worker.messages.protocol import Engine, Generator, Runner

Parser = Literal["httptools", "h11"]
# the lifespan sets these only where it finds uvicorn's server, in the main thread
PROTOCOLS = {"httptools": LimitedHttpTools, "h11": LimitedH11}


async def short_sleep(delay_s: float) -> None:
    await asyncio.sleep(delay_s / 20)


# uvicorn checks every tenth of a second whether to stop, and waits as long when it stops.
vars(uvicorn.server)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "sleep": short_sleep})


class Server:
    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Runner] | None,
        load_chat: Callable[[], Generator] | None,
        http: Parser,
        load_embedder: Callable[[], Runner] | None = None,
        load_reranker: Callable[[], Runner] | None = None,
        load_transcriber: Callable[[], Engine] | None = None,
    ) -> None:
        loaders = load, load_chat, load_embedder, load_reranker, load_transcriber
        self.app = create_app(settings, *loaders)
        self.worker_client = self.app.worker_client
        config = uvicorn.Config(
            self.app,
            port=0,
            log_level="error",
            access_log=False,
            timeout_keep_alive=3600,
            http=PROTOCOLS[http],
        )
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)

    @property
    def port(self) -> int:
        port: int = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.thread.start()
        wait_until(lambda: self.uvicorn.started)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    load: Callable[[], Runner] | None = None,
    ready: bool = True,
    load_chat: Callable[[], Generator] | None = None,
    http: Parser = "httptools",
    load_embedder: Callable[[], Runner] | None = None,
    load_reranker: Callable[[], Runner] | None = None,
    load_transcriber: Callable[[], Engine] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Run a server and wait until /ready returns 200, unless `ready` is false.

    It has the models that settings name or loaders return, or else a pipeline.
    """
    loaders: dict[str, Any] = {"chat": load_chat, "embedding": load_embedder}
    loaders |= {"rerank": load_reranker, "transcription": load_transcriber}
    for name, loader in loaders.items():
        settings.setdefault(f"{name}_model", "none" if loader is None else "demo")
    if load is None and any(settings[f"{name}_model"] != "none" for name in loaders):
        settings.setdefault("pipeline_model", "none")
    others = load_embedder, load_reranker, load_transcriber
    server = Server(Settings(**settings), load, load_chat, http, *others)
    server.start()
    try:
        if ready:
            wait_until(lambda: httpx.get(server.url + "/ready").status_code == 200, 300)
        yield server
    finally:
        server.stop()


def server_fixture(*arguments: Any, **settings: Any) -> Any:
    """Return a fixture: `serving` with these arguments, for the tests of a module."""

    def server() -> Iterator[Server]:
        with serving(*arguments, **settings) as started:
            yield started

    return pytest.fixture(scope="module")(server)


def chat_server_fixture(**settings: Any) -> Any:
    """Return a fixture: `serving` with the generator of a module and these settings."""

    def server(generator: Generator) -> Iterator[Server]:
        with serving(load_chat=lambda: generator, **settings) as started:
            yield started

    return pytest.fixture(scope="module")(server)


class ManualTimers:
    """The worker client's event loop, with timers that fire only when a test fires them."""

    def __init__(self, server: Server) -> None:
        self._loop: Any = server.worker_client.loop
        self._set: list[tuple[float, Any, Callable[[], object]]] = []
        server.worker_client.loop = self  # type: ignore[assignment]  # call_later only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, function: Callable[..., object], *args: Any) -> Any:
        handle = self._loop.call_later(24 * 3600, function, *args)
        self._set.append((delay_s, handle, partial(function, *args)))
        return handle

    def fire(self, within_s: float) -> None:
        """Fire the timers with a delay of at most `within_s`, unless they were cancelled."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._fire, within_s, done)
        assert done.wait(60)

    def _fire(self, within_s: float, done: threading.Event) -> None:
        due = [timer for timer in self._set if timer[0] <= within_s]
        self._set = [timer for timer in self._set if timer[0] > within_s]
        for _, handle, function in due:
            if not handle.cancelled():
                handle.cancel()
                function()
        done.set()


def read_response(client: socket.socket) -> tuple[int, bytes]:
    """Return status and body of one response on a raw socket."""
    client.settimeout(60)
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, response.read()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait for a condition that another thread will fulfil, where there is no event for it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def metric(server: Server, name: str) -> float:
    """Return a sample's value from /metrics, by its name and labels: the sum of those that have
    further labels."""
    name, _, labels = name.removesuffix("}").partition("{")
    total = 0.0
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        series, _, value = line.rpartition(" ")
        series, _, given = series.removesuffix("}").partition("{")
        if series == name and set(filter(None, labels.split(","))) <= set(given.split(",")):
            total += float(value)
    return total
