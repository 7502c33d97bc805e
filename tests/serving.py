"""The real app over real sockets: uvicorn in a thread of this process."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import uvicorn

from server.app import create_app
from server.settings import Settings
from worker.payloads import Generator, Runner

Parser = Literal["auto", "httptools", "h11"]


class Server:
    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Runner] | None,
        load_chat: Callable[[], Generator] | None,
        http: Parser,
    ) -> None:
        self.app = create_app(settings, load, load_chat)
        self.engine = self.app.engine
        config = uvicorn.Config(self.app, port=0, log_level="error", access_log=False, http=http)
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
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    load: Callable[[], Runner] | None = None,
    ready: bool = True,
    load_chat: Callable[[], Generator] | None = None,
    http: Parser = "auto",
    **settings: Any,
) -> Iterator[Server]:
    """A started server; unless `ready` is false, one that answers /ready with 200.

    It has the models that are named or given, a pipeline if there are none.
    """
    if load_chat is None:
        settings.setdefault("chat_model", "none")
    if load is None and settings.get("chat_model") != "none":
        settings.setdefault("pipeline_model", "none")
    server = Server(Settings(**settings), load, load_chat, http)
    server.start()
    try:
        if ready:
            wait_until(lambda: httpx.get(server.url + "/ready").status_code == 200, 120)
        yield server
    finally:
        server.stop()


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer off a raw socket."""
    client.settimeout(10)
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, response.read()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
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
