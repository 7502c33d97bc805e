"""What a page is tried on: a server without models, with a key, and a site of another origin."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import orjson

from batching.request_queue import WorkItem
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import Server, serving
from worker.messages.generation import TEXT_ONLY
from worker.messages.scoring import EmbeddingOutput

KEY = "the-key"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


class Masks(FakeRunner):
    """What fill-mask answers with."""

    def finish(self, item: WorkItem, raw: Any) -> bytes:
        scores = {"paris": 0.9, "rome": 0.1}
        return orjson.dumps([{"score": s, "token_str": t} for t, s in scores.items()])


class Letters(FakeRunner):
    """A text's vector says whether it has an a, and whether a b."""

    max_model_len = 8
    no_images = TEXT_ONLY

    def prepare(self, item: WorkItem) -> None:
        item.prepared = list(item.payload.inputs)
        item.tokens = item.rows = len(item.prepared)

    def forward(self, prepared: list[Any]) -> list[Any]:
        return [[[float("a" in text), float("b" in text)] for text in each] for each in prepared]

    def finish(self, item: WorkItem, raw: Any) -> Any:
        parts = [
            orjson.dumps({"object": "embedding", "index": n, "embedding": vector})
            for n, vector in enumerate(raw)
        ]
        return EmbeddingOutput(b",".join(parts), np.array(raw, np.float32), item.tokens)


class Elsewhere(BaseHTTPRequestHandler):
    """Another site: an empty page."""

    def do_GET(self) -> None:  # http.server's name
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<link rel=icon href=data:,>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def site() -> Iterator[int]:
    """Another site's port."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made.server_address[1]
    made.shutdown()


@contextmanager
def serving_all(generator: FakeGenerator, **settings: Any) -> Iterator[Server]:
    """A pipeline, a chat model and an embedder, for those who have the key."""
    load: dict[str, Any] = {"load_chat": lambda: generator, "load_embedder": Letters}
    with serving(Masks, api_keys=(KEY,), **load, **settings) as made:
        yield made


def shell(command: str) -> str:
    """A line's answer; the line is to succeed."""
    command = command.replace("curl ", "curl --silent --show-error --fail --noproxy '*' ", 1)
    done = subprocess.run(
        ["sh", "-c", command], env={"API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
