"""Models on one worker have separate rates, breakers and failures."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from batching.batcher import DynamicBatcher
from batching.errors import DeadlineHopeless, ItemFailed
from batching.fair_share import WorkOwner
from batching.request_queue import RequestQueue, WorkItem
from batching.step_times import StepTimes
from server.core.metrics import Metrics
from server.core.settings import Settings
from server.core.worker_client import WorkerClient
from tests.fakes import FakeRunner, batched_model
from worker.load_context import LoadStopped, add_memory, remaining_bytes
from worker.messages.protocol import PipelineInput
from worker.registry import Breaker
from worker.worker import Worker


class Setup:
    """Two pipelines, `reader` and `judge`, with batches of one text."""

    def __init__(self) -> None:
        self.runners = {name: FakeRunner() for name in ("reader", "judge")}
        self.queue = RequestQueue(100, time.monotonic)
        models = [
            batched_model(name, partial(self.runners.__getitem__, name), DynamicBatcher(1, 1000, 0))
            for name in self.runners
        ]
        for model in models:
            model.load_at_start()
        settings = Settings(stuck_after_s=60)
        metrics = Metrics(lambda: 0)
        self.client = WorkerClient(Worker(models), self.queue, metrics, settings, 2)

    def submit(self, name: str, *texts: str, within_s: float = 60) -> list[WorkItem]:
        inputs = [PipelineInput(text) for text in texts]
        return self.client.submit(WorkOwner(None), name, inputs, time.monotonic() + within_s)

    async def results(self, items: list[WorkItem]) -> list[Any]:
        results = await asyncio.gather(*(i.future for i in items), return_exceptions=True)
        self.queue.release(items)
        return results


@asynccontextmanager
async def serving() -> AsyncIterator[Setup]:
    setup = Setup()
    setup.client.start()
    await setup.client.loaded
    try:
        yield setup
    finally:
        for runner in setup.runners.values():
            runner.gate.set()
        setup.client.stop()


@pytest.mark.anyio
async def test_a_load_at_the_start_without_progress_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, gate = Setup().client, threading.Event()
    client.manager.load_timeout_s = 0.1
    monkeypatch.setattr(client.models["judge"], "_load", gate.wait)
    client.start()
    with pytest.raises(LoadStopped, match="'judge' could not be loaded: it made no progress for"):
        await client.loaded
    gate.set()
    client.stop()


@pytest.mark.anyio
async def test_models_are_idle_from_the_end_of_the_start_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, timers = Setup().client, list[object]()
    client.manager.idle_s = 60
    reader, judge = client.manager.models.values()

    def load(engine: Any) -> Any:
        timers.append(reader.timer)
        return engine()

    monkeypatch.setattr(judge.model, "_load", partial(load, judge.model._load))
    client.start()
    await client.loaded
    assert timers == [None]
    assert reader.timer
    assert judge.timer
    client.stop()


@pytest.mark.anyio
async def test_a_load_that_is_stuck_after_a_download_is_abandoned() -> None:
    progress = chain([math.inf], repeat(0.0))
    result = Setup().client.manager.result
    async with asyncio.timeout(60):
        with pytest.raises(LoadStopped, match="LOAD_TIMEOUT_S"):
            await result(Future[None](), lambda: next(progress), lambda: True, 0.05)


@pytest.mark.anyio
async def test_models_of_the_start_share_the_limit_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, rooms = Setup().client, list[int]()

    def load(engine: Any) -> Any:
        rooms.append(remaining_bytes())
        memory: Any = SimpleNamespace(nbytes=300, release=lambda: None)
        add_memory(memory)
        return engine()

    client.worker.limit_bytes = 1000
    for model in client.models.values():
        monkeypatch.setattr(model, "_load", partial(load, model._load))
    client.start()
    await client.loaded
    client.stop()
    assert rooms == [1000, 700]


@pytest.mark.anyio
async def test_each_model_has_its_own_rate() -> None:
    async with serving() as setup:
        await setup.results([*setup.submit("reader", "one"), *setup.submit("judge", "one")])
        engine: Any = setup.client.models["reader"].engine
        engine.times = StepTimes()
        engine.times.learn(1, 0, 10.0)
        for runner in setup.runners.values():
            runner.gate.clear()
        items = [item for name in setup.runners for item in setup.submit(name, "ahead")]
        with pytest.raises(DeadlineHopeless):
            setup.submit("reader", "late", within_s=5)
        items += setup.submit("judge", "in time", within_s=5)
        for runner in setup.runners.values():
            runner.gate.set()
        await setup.results(items)


@pytest.mark.anyio
async def test_an_error_in_one_model_fails_its_items_only() -> None:
    async with serving() as setup:
        engine: Any = setup.client.models["judge"].engine

        def broken(*arguments: Any) -> Any:
            raise RecursionError("in the batcher")

        engine.batcher.take = broken
        texts = [f"t{n}" for n in range(5)]
        judged, read = setup.submit("judge", *texts), setup.submit("reader", *texts)
        assert [type(result) for result in await setup.results(judged)] == [ItemFailed] * 5
        assert await setup.results(read) == [b'{"echo":"%s"}' % text.encode() for text in texts]


def test_a_breaker_opens_after_failures_in_a_row_and_closes_with_a_probe() -> None:
    breaker = Breaker(threshold=3, cooldown_s=5)
    for second in (0, 1):
        breaker.failed(second)
    breaker.succeeded()
    for second in (2, 3):
        breaker.failed(second)
    assert not breaker.is_open
    breaker.failed(4)
    assert (breaker.is_open, breaker.probe_at) == (True, 9)
    breaker.failed(9)  # the probe
    assert (breaker.is_open, breaker.probe_at) == (True, 14)
    breaker.succeeded()
    assert not breaker.is_open
