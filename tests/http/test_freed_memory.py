"""What a request holds is freed with it: a full garbage collection is rare in a server."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from server.core.delta_stream import TokenStream
from tests.event_streams import post
from tests.serving import Server, serving
from worker.messages.generation import GenerationInput

TEXT = [{"type": "text", "text": "a"}] * 800
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT = {"messages": MESSAGES, "max_tokens": 2, "ignore_eos": True}
BODIES: dict[str, tuple[int, dict[str, Any]]] = {
    "answered": (200, CHAT),
    "streamed": (200, CHAT | {"stream": True}),
    "refused by its fields": (400, {"messages": [{}] * 100_000}),
    "refused by the model": (400, CHAT | {"messages": MESSAGES * 9}),
    "refused by its tools": (400, {"messages": "a", "tools": [{}] * 100, "stop": ["a"] * 20_000}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings: dict[str, Any] = {"pipeline_model": "none", "embedding_model": "none"}
    with serving(chat_model="demo", compile="off", kv_cache_gb=0.05, **settings) as demo:
        yield demo


@pytest.mark.parametrize("kind", BODIES)
def test_a_request_leaves_nothing_behind(kind: str, server: Server) -> None:
    status, body = BODIES[kind]

    def send() -> int:
        """Return the memory blocks of all objects after a request."""
        answer = post(server, "/v1/chat/completions", body)
        assert answer.status_code == status, answer.text
        return sys.getallocatedblocks()

    def count() -> int:
        return sum(isinstance(o, GenerationInput | TokenStream) for o in gc.get_objects())

    send()
    gc.collect()
    before = count()
    gc.disable()
    try:
        blocks = [send() for _ in range(12)]
        held = count() - before
    finally:
        gc.enable()
    assert blocks[-1] - blocks[3] < 8 * 5000
    assert held <= 4  # by the threads that prepare
