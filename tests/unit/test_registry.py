"""Three models on one worker have separate steps, rates, breakers and failures."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
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
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner, batched_model
from tests.serving import wait_until
from worker.load_context import LoadStopped
from worker.messages.deltas import DeltaSource
from worker.messages.generation import GenerationInput
from worker.messages.protocol import PipelineInput, StepOutcome
from worker.registry import ServedModel
from worker.worker import Worker

pytestmark = pytest.mark.anyio

PIPELINES = "reader", "judge"


class Stream:
    """Collects the text."""

    def __init__(self) -> None:
        self.text = ""
        self.started = asyncio.Event()

    def push(self, source: DeltaSource) -> None:
        self.text += source.take_delta().text
        self.started.set()


class Setup:
    """Two pipelines, `reader` and `judge`, with batches of one text, and a generator, `writer`."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.runners = {name: self._runner(name) for name in PIPELINES}
        self.writer = self._writer()
        self.queue = RequestQueue(100, time.monotonic)
        served = [
            batched_model(name, partial(self.runners.__getitem__, name), DynamicBatcher(1, 1000, 0))
            for name in self.runners
        ]
        self.worker = Worker(
            [*served, ServedModel("writer", lambda: self.writer, 8, generates=True)]
        )
        metrics, settings = Metrics(lambda: 0), Settings(stuck_after_s=60)
        self.worker_client = WorkerClient(self.worker, self.queue, metrics, settings, 2)
        self.submitted: list[WorkItem] = []
        self._submit = self.worker.submit
        self.worker.submit = self._record  # type: ignore[method-assign]  # records the items at the worker

    def _record(self, items: list[WorkItem]) -> None:
        self._submit(items)
        self.submitted += items

    def _runner(self, name: str) -> FakeRunner:
        return FakeRunner(lambda texts: self.steps.append(name))

    def _writer(self) -> FakeGenerator:
        steps = self.steps

        class Writer(FakeGenerator):
            def step(self, idle_since: float = 0.0) -> StepOutcome:
                steps.append("writer")
                return super().step(idle_since)

        return Writer()

    def submit(self, name: str, *texts: str, within_s: float = 60) -> list[WorkItem]:
        deadline = time.monotonic() + within_s
        inputs = [PipelineInput(text) for text in texts]
        return self.worker_client.submit(WorkOwner(None), name, inputs, deadline)

    def write(self, prompt: str) -> tuple[WorkItem, Stream]:
        stream = Stream()
        deadline = time.monotonic() + 60
        owner, inputs = WorkOwner(None), [GenerationInput(prompt)]
        (item,) = self.worker_client.submit(owner, "writer", inputs, deadline, stream)
        return item, stream

    async def ask(self, name: str, *texts: str) -> list[Any]:
        items = self.submit(name, *texts)
        results = await asyncio.gather(*(i.future for i in items), return_exceptions=True)
        self.queue.release(items)
        return results


@asynccontextmanager
async def serving() -> AsyncIterator[Setup]:
    setup = Setup()
    setup.worker_client.start()
    await setup.worker_client.loaded
    try:
        yield setup
    finally:
        for runner in setup.runners.values():
            runner.gate.set()
        setup.writer.release()
        setup.worker_client.stop()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, lambda: bool(condition()))


async def test_each_model_with_a_due_step_runs_one_per_round_if_steps_take_equally_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count_one_second(worker: Worker, name: str) -> None:
        worker._used_s[name] += 1.0

    monkeypatch.setattr(Worker, "_count_time", count_one_second)
    async with serving() as setup:
        reader = setup.runners["reader"]
        reader.gate.clear()
        items = setup.submit("reader", "opening")
        assert await asyncio.to_thread(reader.entered.acquire, timeout=60)
        items += setup.submit("reader", *(f"r{n}" for n in range(8)))
        items += setup.submit("judge", *(f"j{n}" for n in range(8)))
        items += [setup.write("long")[0]]
        await until(lambda: len(setup.submitted) == len(items))
        reader.gate.set()
        await asyncio.gather(*(item.future for item in items[:-1]))
        await until(lambda: len(setup.steps) > 8 * 3)  # the last round may end with the writer
        assert setup.steps[0] == "reader"
        rounds = setup.steps[1 : 1 + 8 * 3]
        for at in range(0, len(rounds), 3):
            assert sorted(rounds[at : at + 3]) == ["judge", "reader", "writer"], setup.steps
        setup.queue.release(items)


async def test_a_load_at_the_start_without_progress_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, gate = Setup(), threading.Event()
    client = setup.worker_client
    client.manager.load_timeout_s = 0.1
    monkeypatch.setattr(setup.worker.models["judge"], "_load", gate.wait)
    client.start()
    with pytest.raises(LoadStopped, match="'judge' could not be loaded: it made no progress for"):
        await client.loaded
    gate.set()
    setup.writer.release()
    client.stop()


async def test_each_model_has_its_own_rate() -> None:
    async with serving() as setup:
        measured = [item for name in PIPELINES for item in setup.submit(name, "measured")]
        await asyncio.gather(*(item.future for item in measured))
        setup.queue.release(measured)
        engine: Any = setup.worker_client.models["reader"].engine
        engine.times = StepTimes()
        engine.times.learn(1, 0, 10.0)
        for runner in setup.runners.values():
            runner.gate.clear()
        items = [item for name in PIPELINES for item in setup.submit(name, "ahead")]
        with pytest.raises(DeadlineHopeless):
            setup.submit("reader", "late", within_s=5)
        items += setup.submit("judge", "in time", within_s=5)
        items.append(setup.write("say yes")[0])
        for runner in setup.runners.values():
            runner.gate.set()
        await asyncio.gather(*(item.future for item in items))
        setup.queue.release(items)


async def test_an_error_in_one_model_fails_its_items_only() -> None:
    async with serving() as setup:
        engine: Any = setup.worker_client.models["judge"].engine

        def broken(*arguments: Any) -> Any:
            raise RecursionError("in the batcher")

        engine.batcher.take = broken
        spoken, stream = setup.write("say a b c")
        texts = [f"t{n}" for n in range(5)]
        judged, read = await asyncio.gather(setup.ask("judge", *texts), setup.ask("reader", *texts))
        assert [type(result) for result in judged] == [ItemFailed] * 5
        assert read == [b'{"echo":"%s"}' % text.encode() for text in texts]
        await spoken.future
        assert stream.text == "a b c"
        setup.queue.release([spoken])
