"""The real app over real sockets: uvicorn in a thread of this process."""

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
import uvicorn

from server.app import create_app
from server.core.settings import Settings
from server.http.connections import LimitedH11, LimitedHttpTools
from worker.messages.protocol import Engine, Generator, Runner

Parser = Literal["httptools", "h11"]
# off the main thread the lifespan does not find uvicorn's server to set these
PROTOCOLS = {"httptools": LimitedHttpTools, "h11": LimitedH11}


async def moment(delay_s: float) -> None:
    await asyncio.sleep(delay_s / 20)


# uvicorn looks every tenth of a second whether it is to stop, and rests as long when it stops.
vars(uvicorn.server)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "sleep": moment})


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
    """A started server; unless `ready` is false, one that answers /ready with 200.

    It has the models that are named or given, a pipeline if there are none.
    """
    loaders: dict[str, Any] = {"chat": load_chat, "embedding": load_embedder}
    loaders |= {"rerank": load_reranker, "transcription": load_transcriber}
    for name, given in loaders.items():
        settings.setdefault(f"{name}_model", "none" if given is None else "demo")
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


class Timers:
    """The worker client's event loop, whose timers fire only when the test fires them."""

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

    def go_off(self, within_s: float) -> None:
        """Those that were set for at most so many seconds, unless they have been cancelled."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._go_off, within_s, done)
        assert done.wait(60)

    def _go_off(self, within_s: float, done: threading.Event) -> None:
        due = [each for each in self._set if each[0] <= within_s]
        self._set = [each for each in self._set if each[0] > within_s]
        for _, handle, function in due:
            if not handle.cancelled():
                handle.cancel()
                function()
        done.set()


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer off a raw socket."""
    client.settimeout(60)
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, response.read()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """For what another thread is about to do, where there is no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def metric(server: Server, name: str) -> float:
    """A sample's value off /metrics, by its full name with labels."""
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0
