"""Servers for tests of the page: one with fake models and a key, and one of another origin."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import orjson
import pytest

from batching.request_queue import WorkItem
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import Server, serving
from worker.messages.scoring import EmbeddingOutput

KEY = "the-key"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


class FillMaskRunner(FakeRunner):
    """Returns results of fill-mask."""

    def finish(self, item: WorkItem, raw: Any) -> bytes:
        scores = {"paris": 0.9, "rome": 0.1}
        return orjson.dumps([{"score": s, "token_str": t} for t, s in scores.items()])


class LetterEmbedder(FakeRunner):
    """Returns vectors of two numbers: whether the text has an a, and whether it has a b."""

    max_model_len = 8

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        item.prepared = list(item.payload.inputs)
        item.tokens = item.rows = len(item.prepared)

    def forward(self, prepared: list[Any]) -> list[Any]:
        return [[[float("a" in text), float("b" in text)] for text in texts] for texts in prepared]

    def finish(self, item: WorkItem, raw: Any) -> Any:
        parts = [
            orjson.dumps({"object": "embedding", "index": n, "embedding": vector})
            for n, vector in enumerate(raw)
        ]
        return EmbeddingOutput(b",".join(parts), np.array(raw, np.float32), item.tokens)


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # http.server's name
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<link rel=icon href=data:,>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def other_origin() -> Iterator[int]:
    """Serve an empty page of another origin; yield its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


@contextmanager
def serving_all(generator: FakeGenerator, **settings: Any) -> Iterator[Server]:
    """Run a server with a pipeline, a chat model and an embedder, for requests with the key."""
    load: dict[str, Any] = {"load_chat": lambda: generator, "load_embedder": LetterEmbedder}
    with serving(FillMaskRunner, api_keys=(KEY,), **load, **settings) as server:
        yield server


def server_fixture(generator: FakeGenerator) -> Any:
    """Return a fixture: `serving_all`, for the tests of a module that run in a browser."""

    def server(browser: Any) -> Iterator[Server]:
        with serving_all(generator) as started:
            yield started

    return pytest.fixture(scope="module")(server)


def open_page(
    visitor: Any, server: Server, path: str = "/", role: str = "tab", name: str = "Live"
) -> Any:
    """Return the page, opened with the key, once it shows an element of this role and name."""
    visitor.add_init_script(f"try {{ sessionStorage.setItem('onequeue-key', '{KEY}') }} catch {{}}")
    visitor.goto(server.url + path)
    visitor.get_by_role(role, name=name).wait_for()
    return visitor


def run_shell(command: str) -> str:
    """Run a line with curl, which must succeed, and return its output."""
    command = command.replace("curl ", "curl --silent --show-error --fail --noproxy '*' ", 1)
    done = subprocess.run(
        ["sh", "-c", command], env={"API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
