"""A request's work items in batches: submitted, awaited, and let go whatever becomes of them.

For what is answered all at once: POST /, embeddings, reranking. What is generated goes by
token_stream.py.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive

from batching.request_queue import WorkItem
from server.engine import Engine
from server.http.json import Header
from server.http.request import abort_on_disconnect, expire


@contextmanager
def submitted(
    engine: Engine, name: str, payloads: Sequence[Any], deadline: float, receive: Receive
) -> Iterator[list[WorkItem]]:
    """Items on their way to a model by its name in the registry, whose futures get an answer, the
    deadline's error or the client's leave. Refused if they are not accepted."""
    items = engine.submit(name, payloads, deadline)
    timer = engine.loop.call_later(deadline - time.monotonic(), expire, items)
    engine.loop.create_task(abort_on_disconnect(receive, items))  # receive() holds it
    try:
        yield items
    finally:
        timer.cancel()
        engine.queue.forget(items)


def timing_headers(items: list[WorkItem]) -> list[Header]:
    """Where the time went, in milliseconds; of several items, the one that took longest."""
    item = items[0] if len(items) == 1 else max(items, key=lambda item: item.finished_at)
    timing = b"queue;dur=%.2f, batch;dur=%.2f, model;dur=%.2f" % (
        (item.arrived_at - item.accepted_at) * 1e3,
        (item.started_at - item.arrived_at) * 1e3,
        (item.finished_at - item.started_at) * 1e3,
    )
    return [(b"server-timing", timing), (b"x-batch-size", b"%d" % item.batch_size)]
