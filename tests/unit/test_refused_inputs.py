"""A refused input is freed at once: a full garbage collection is rare in a server."""

import gc
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from batching.errors import InvalidInput
from server.core import worker_client
from server.core.worker_client import WorkerClient
from server.http.json import in_thread


class Input: ...


def refuse(_: Any) -> None:
    raise InvalidInput("no")


@pytest.fixture(autouse=True)
def without_collections() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.anyio
async def test_a_body_that_a_thread_refuses_is_freed() -> None:
    body = Input()
    freed = weakref.ref(body)
    with suppress(InvalidInput):  # pytest.raises keeps the error
        await in_thread(refuse, body, time.monotonic() + 60, None)
    del body
    await in_thread(str, None, time.monotonic() + 60, None)  # the thread has let go
    assert freed() is None


def test_an_item_that_its_engine_refuses_is_freed() -> None:
    item: Any = Input()
    item.model, freed = "m", weakref.ref(item)
    outcomes: list[Any] = []
    client: Any = SimpleNamespace(
        models={"m": SimpleNamespace(engine=SimpleNamespace(prepare=refuse))},
        worker=SimpleNamespace(submit=lambda items: None),
        _post=lambda resolve, failed: outcomes.extend(map(str, dict(failed).values())),
    )
    with patch.object(worker_client, "is_alive", lambda item: True):
        WorkerClient._prepare_items(client, [item])
    del item
    assert outcomes == ["no"]
    assert freed() is None
