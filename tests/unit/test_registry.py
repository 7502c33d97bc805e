"""Three models behind one worker, two of a kind: turns, rates, breakers and failures apart."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from batching.batcher import DynamicBatcher
from batching.errors import BreakerOpen, DeadlineHopeless, ItemFailed
from batching.request_queue import RequestQueue, WorkItem
from server.core.metrics import Metrics
from server.core.worker_client import WorkerClient
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner, batched_model
from tests.serving import wait_until
from worker.messages.deltas import Delta
from worker.messages.generation import GenerationInput
from worker.messages.protocol import BatchReport, PipelineInput, StepOutcome
from worker.registry import language_model
from worker.worker import Worker

pytestmark = pytest.mark.anyio

PIPELINES = "reader", "judge"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Stream:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.text = ""
        self.begun = asyncio.Event()

    def push(self, delta: Delta) -> None:
        self.text += delta.text
        self.begun.set()


class House:
    """`reader` and `judge`, which take one text at a time, and `writer`."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.runners = {name: self._runner(name) for name in PIPELINES}
        self.writer = self._writer()
        self.queue = RequestQueue(100, time.monotonic)
        served = [
            batched_model(name, partial(self.runners.__getitem__, name), DynamicBatcher(1, 1000, 0))
            for name in self.runners
        ]
        self.worker = Worker([*served, language_model("writer", lambda: self.writer, 100)])
        self.worker_client = WorkerClient(self.worker, self.queue, Metrics(lambda: 0), 2, 60)
        self.handed_over: list[WorkItem] = []
        self._submit = self.worker.submit
        self.worker.submit = self._watched  # type: ignore[method-assign]  # to know who is there

    def _watched(self, items: list[WorkItem]) -> None:
        self._submit(items)
        self.handed_over += items

    def _runner(self, name: str) -> FakeRunner:
        return FakeRunner(lambda texts: self.turns.append(name))

    def _writer(self) -> FakeGenerator:
        turns = self.turns

        class Writer(FakeGenerator):
            def step(self, idle_since: float = 0.0) -> StepOutcome:
                turns.append("writer")
                return super().step(idle_since)

        return Writer()

    def submit(self, name: str, *texts: str, within_s: float = 60) -> list[WorkItem]:
        deadline = time.monotonic() + within_s
        return self.worker_client.submit(name, [PipelineInput(text) for text in texts], deadline)

    def write(self, prompt: str) -> tuple[WorkItem, Stream]:
        stream = Stream()
        deadline = time.monotonic() + 60
        (item,) = self.worker_client.submit("writer", [GenerationInput(prompt)], deadline, stream)
        return item, stream

    async def ask(self, name: str, *texts: str) -> list[Any]:
        items = self.submit(name, *texts)
        answers = await asyncio.gather(*(i.future for i in items), return_exceptions=True)
        self.queue.release(items)
        return answers


@asynccontextmanager
async def serving() -> AsyncIterator[House]:
    house = House()
    house.worker_client.start()
    await house.worker_client.loaded
    try:
        yield house
    finally:
        for runner in house.runners.values():
            runner.gate.set()
        house.writer.release()
        house.worker_client.stop()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, lambda: bool(condition()))


def all_accept(worker_client: WorkerClient, names: Sequence[str]) -> bool:
    return not any(worker_client.refusal(name) for name in names)


async def test_each_model_that_has_something_due_gets_a_turn_in_each_round() -> None:
    async with serving() as house:
        reader = house.runners["reader"]
        reader.gate.clear()
        items = house.submit("reader", "opening")
        assert await asyncio.to_thread(reader.entered.acquire, timeout=60)
        items += house.submit("reader", *(f"r{n}" for n in range(8)))
        items += house.submit("judge", *(f"j{n}" for n in range(8)))
        items += [house.write("long")[0]]
        await until(lambda: len(house.handed_over) == len(items))
        reader.gate.set()
        await asyncio.gather(*(item.future for item in items[:-1]))
        await until(lambda: len(house.turns) > 8 * 3)  # the last round's writer comes after them
        assert house.turns[0] == "reader"
        rounds = house.turns[1 : 1 + 8 * 3]
        for at in range(0, len(rounds), 3):
            assert sorted(rounds[at : at + 3]) == ["judge", "reader", "writer"], house.turns
        house.queue.release(items)


async def test_a_breaker_of_one_leaves_the_others_alone() -> None:
    async with serving() as house:
        house.runners["judge"].healthy = False
        long, stream = house.write("long")
        for n in range(3):
            (answer,) = await house.ask("judge", f"bad {n}")
            assert type(answer) is ItemFailed
        await until(lambda: house.worker_client.refusal("judge"))
        with pytest.raises(BreakerOpen):
            house.submit("judge", "fine")
        assert all_accept(house.worker_client, ["reader", "writer"])
        assert await house.ask("reader", "fine") == [b'{"echo":"fine"}']
        await asyncio.wait_for(stream.begun.wait(), 60)
        assert long.open  # what runs goes on
        assert house.runners["reader"].warm_ups == 1  # at its start
        house.queue.release([long])


async def test_each_model_has_a_rate_of_its_own() -> None:
    async with serving() as house:
        model = house.worker_client.models["reader"]
        slow = BatchReport(1, 1, 0, 10.0, 10.0, (0.0,), 0, 1, saturated=True)
        house.worker_client._record_step(model, StepOutcome(slow))
        for runner in house.runners.values():
            runner.gate.clear()
        items = [item for name in PIPELINES for item in house.submit(name, "ahead")]
        with pytest.raises(DeadlineHopeless):
            house.submit("reader", "late", within_s=5)
        items += house.submit("judge", "in time", within_s=5)
        items.append(house.write("say yes")[0])
        for runner in house.runners.values():
            runner.gate.set()
        await asyncio.gather(*(item.future for item in items))
        house.queue.release(items)


async def test_what_fails_one_model_s_items_fails_no_other_s() -> None:
    async with serving() as house:
        engine: Any = house.worker_client.models["judge"].engine

        def broken(*arguments: Any) -> Any:
            raise RecursionError("in the batcher")

        engine.batcher.take = broken
        spoken, stream = house.write("say a b c")
        texts = [f"t{n}" for n in range(5)]
        judged, read = await asyncio.gather(house.ask("judge", *texts), house.ask("reader", *texts))
        assert [type(answer) for answer in judged] == [ItemFailed] * 5
        assert read == [b'{"echo":"%s"}' % text.encode() for text in texts]
        await spoken.future
        assert stream.text == "a b c"
        house.queue.release([spoken])
