"""The worker thread with a fake runner: failure isolation, exactly-once results, the breaker."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from batching.batcher import DynamicBatcher
from batching.errors import (
    DeadlineExceeded,
    DeviceLost,
    ItemFailed,
    OnequeueError,
    OutOfMemory,
)
from batching.request_queue import WorkItem
from batching.step_times import MAX_TURN_ALONE_S, MAX_TURN_S
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner, batched_model
from tests.serving import wait_until
from worker.error_classification import failure_of
from worker.messages.generation import GenerationInput
from worker.messages.protocol import CUT, BatchReport, PipelineInput, StepOutcome
from worker.registry import Breaker, ServedModel
from worker.worker import OtherServedModels, Worker


class Recorder:
    """A listener that collects all events, on the worker's thread."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[Any]] = {}
        self.reports: list[BatchReport] = []
        self.steps: list[StepOutcome] = []
        self.rejected: list[str] = []
        self.errors: list[Exception] = []
        self.breaker: list[tuple[str, bool]] = []

    def on_dead(self, error: Exception) -> None:
        self.errors.append(error)

    def on_breaker(self, model: ServedModel, is_open: bool) -> None:
        self.breaker.append((model.name, is_open))

    def on_step(self, model: ServedModel, outcome: StepOutcome) -> None:
        if isinstance(outcome.report, BatchReport):
            self.reports.append(outcome.report)
            for item, result in [*outcome.outputs, *outcome.done]:
                self.resolve(item, result)
        else:
            self.steps.append(outcome)

    def on_rejected(self, items: list[WorkItem[Any, Any]]) -> None:
        for item in items:
            if isinstance(item.payload, GenerationInput):
                self.rejected.append(item.prepared)
            else:
                self.resolve(item, "rejected")

    def on_failed(self, items: list[WorkItem[Any]], error: OnequeueError) -> None:
        for item in items:
            self.resolve(item, error)

    def resolve(self, item: WorkItem[Any], outcome: Any) -> None:
        self.outcomes.setdefault(item.payload.inputs, []).append(outcome)

    def count(self) -> int:
        return sum(map(len, list(self.outcomes.values())))  # the worker's thread changes it


class Bench:
    """A running worker and its recorder."""

    def __init__(
        self, runner: FakeRunner, cooldown_s: float = 5.0, max_wait_s: float = 0.0
    ) -> None:
        self.runner, self.recorder = runner, Recorder()
        self.batcher = DynamicBatcher(max_size=8, max_tokens=1000, max_wait_s=max_wait_s)
        self.generator = FakeGenerator()
        self.pipeline = batched_model("pipeline", lambda: runner, self.batcher)
        self.generation = ServedModel("generation", lambda: self.generator, 8, generates=True)
        self.pipeline.breaker = Breaker(3, cooldown_s)
        self.generation.breaker = Breaker(3, cooldown_s)
        self.worker = Worker([self.pipeline, self.generation])

    def submit(self, *texts: str) -> list[WorkItem[PipelineInput]]:
        items = []
        for text in texts:
            item = WorkItem(PipelineInput(text), 1e12, time.monotonic())
            item.model = "pipeline"
            self.runner.prepare(item)
            items.append(item)
            self.worker.submit([item])
        return items

    def generate(self, prompt: str) -> WorkItem:
        item = WorkItem(GenerationInput(prompt), 1e12, time.monotonic())
        item.model = "generation"
        self.generator.prepare(item)
        self.worker.submit([item])
        return item

    def hold(self, *texts: str) -> None:
        """Submit texts, and hold their forward pass until the runner's gate is set."""
        self.runner.gate.clear()
        self.submit(*texts)
        assert self.runner.entered.acquire(timeout=60)

    def run_as_one_batch(self, *texts: str) -> None:
        """Make texts wait behind a first forward pass, so that they share the next batch."""
        self.hold("first")
        self.submit(*texts)
        self.runner.gate.set()
        self.wait_for(len(texts) + 1)

    def wait_for(self, outcomes: int) -> None:
        wait_until(lambda: self.recorder.count() >= outcomes)


Start = Callable[..., Bench]


def start_worker(worker: Worker, recorder: Recorder) -> None:
    worker.start(recorder, lambda function, *args: function(*args))
    for model in worker.models.values():
        worker.load(model).result(60)
    worker.end_start()


@pytest.fixture
def start() -> Iterator[Start]:
    benches: list[Bench] = []

    def make(runner: FakeRunner | None = None, **settings: Any) -> Bench:
        bench = Bench(runner or FakeRunner(), **settings)
        benches.append(bench)
        start_worker(bench.worker, bench.recorder)
        return bench

    yield make
    for bench in benches:
        bench.runner.gate.set()
        bench.worker.stop()
        bench.worker.thread.join(60)
        assert not bench.worker.thread.is_alive()


@pytest.fixture
def bench(start: Start) -> Bench:
    return start()


def test_one_bad_input_fails_alone(bench: Bench) -> None:
    texts = [f"t{n}" for n in range(7)] + ["bad"]
    bench.run_as_one_batch(*texts)
    for text in texts[:-1]:
        assert bench.recorder.outcomes[text] == [text.upper()]
    (failure,) = bench.recorder.outcomes["bad"]
    assert type(failure) is ItemFailed
    assert bench.runner.warm_ups == 1  # others succeeded: no probe is needed


def test_bad_inputs_alone_do_not_open_the_breaker(bench: Bench) -> None:
    for n in range(5):
        bench.submit(f"bad {n}")
        bench.wait_for(n + 1)
    bench.submit("good")
    bench.wait_for(6)
    assert bench.recorder.outcomes["good"] == ["GOOD"]
    assert bench.recorder.breaker == []
    assert bench.runner.warm_ups == 1 + 5  # a probe after each batch without a success


def test_a_bad_input_beside_a_cut_item_needs_no_probe(start: Start) -> None:
    class Slow(FakeRunner):
        def forward(self, prepared: list[Any]) -> list[Any]:
            continues = len(self.batches) < 5
            outputs = super().forward(prepared)
            return [CUT if continues and text == "LONG" else text for text in outputs]

    bench = start(Slow())
    bench.run_as_one_batch("long", "bad")
    assert type(bench.recorder.outcomes["bad"][0]) is ItemFailed
    assert bench.recorder.outcomes["long"] == ["LONG"]
    assert bench.runner.warm_ups == 1  # a probe would restart the long item


def test_out_of_memory_halves_the_batch_and_retries(start: Start) -> None:
    def two_fit(texts: list[str]) -> None:
        if len(texts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    bench = start(FakeRunner(two_fit))
    texts = [f"t{n}" for n in range(8)]
    bench.run_as_one_batch(*texts)
    assert all(bench.recorder.outcomes[text] == [text.upper()] for text in texts)
    assert bench.recorder.reports[-1].size == 8
    assert bench.recorder.reports[-1].out_of_memory == 3  # 8, 4 and the other 4
    assert bench.recorder.reports[-1].cap == 2
    assert bench.batcher.cap == 2


def test_an_item_too_large_for_memory_fails_alone(start: Start) -> None:
    def raises(texts: list[str]) -> None:
        if "huge" in texts:
            raise MemoryError

    bench = start(FakeRunner(raises))
    bench.run_as_one_batch("a", "huge", "b")
    assert bench.recorder.outcomes["a"] == ["A"]
    assert type(bench.recorder.outcomes["huge"][0]) is OutOfMemory


def test_steps_with_failures_only_probe_the_model(start: Start) -> None:
    bench = start(cooldown_s=60.0)
    bench.generator.healthy = False
    for n in range(3):
        bench.generate("bad")
        wait_until(lambda n=n: len(bench.recorder.steps) == n + 1)  # type: ignore[misc]
    wait_until(lambda: bench.recorder.breaker == [("generation", True)])
    bench.generate("say a b")
    wait_until(lambda: bench.recorder.rejected == ["say a b"])
    bench.submit("a")  # the other model is unaffected
    bench.wait_for(1)
    assert bench.recorder.outcomes["a"] == ["A"]
    assert bench.runner.warm_ups == 1


def test_an_item_cancelled_during_bisection_is_not_run_again(start: Start) -> None:
    cancelled: list[WorkItem] = []

    def cancel(texts: list[str]) -> None:
        if "bad" in texts:
            cancelled[0].open = False

    bench = start(FakeRunner(cancel))
    bench.hold("first")
    items = bench.submit("bad", "b", "c", "d")
    cancelled.append(items[3])
    bench.runner.gate.set()
    bench.wait_for(4)  # the fifth is cancelled
    assert bench.runner.batches[1] == ["bad", "b", "c", "d"]
    assert ["c"] in bench.runner.batches
    assert not any("d" in batch for batch in bench.runner.batches[2:])


def test_items_that_waited_during_a_forward_pass_do_not_wait_for_the_deadline(start: Start) -> None:
    bench = start(max_wait_s=60.0)
    bench.hold(*(f"full {n}" for n in range(8)))  # a full batch leaves at once
    bench.submit("waited")
    bench.runner.gate.set()
    bench.wait_for(9)
    assert bench.runner.batches[-1] == ["waited"]


def test_a_failed_batchs_memory_is_free_before_its_halves_run(start: Start) -> None:
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def takes_much(texts: list[str]) -> None:
        alive.append(sum(ref() is not None for ref in held))
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if len(texts) > 1:
            raise MemoryError

    bench = start(FakeRunner(takes_much))
    bench.run_as_one_batch("a", "b", "c", "d")
    assert len(alive) > 5
    assert set(alive) == {0}


def test_an_idle_worker_returns_memory_once_and_then_waits_without_a_timeout(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr("worker.worker.IDLE_S", 0.0)
    monkeypatch.setattr("worker.worker.trim_heap", lambda pad: trimmed.release())
    bench = start()
    assert trimmed.acquire(timeout=60)  # after loading
    wait_until(lambda: bench.worker._wait_s() is None)
    bench.run_as_one_batch("a", "b")
    assert trimmed.acquire(timeout=60)
    wait_until(lambda: bench.worker._wait_s() is None)


def test_memory_is_returned_after_a_refused_input_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start()
    trimmed = threading.Event()
    monkeypatch.setattr("worker.worker.IDLE_S", 0.0)
    monkeypatch.setattr("worker.worker.trim_heap", lambda pad: trimmed.set())
    bench.worker.submit([])  # the pool sends this when it has refused all items
    assert trimmed.wait(60)


class Interruptible(FakeRunner):
    """Lets other models run a step in the middle of each forward pass after the warm-up."""

    def __init__(self, before: Callable[[list[str]], object] | None = None) -> None:
        super().__init__(before)
        self.were_busy: list[bool] = []
        self.turns_s: list[float] = []

    def forward(self, prepared: list[Any]) -> list[Any]:
        outputs = super().forward(prepared)
        self.were_busy.append(self.others.busy)
        self.turns_s.append(self.others.max_turn_s)
        self.others.run_steps()
        return outputs


def test_an_interrupted_step_is_not_entered_again() -> None:
    events: list[str] = []
    runners = {name: FakeRunner() for name in "ab"}
    for name, runner in runners.items():

        def nest(texts: list[str], name: str = name, runner: FakeRunner = runner) -> None:
            events.append(f"{name} begins")
            runner.others.run_steps()
            events.append(f"{name} ends")

        runner.before = nest
    models = [
        batched_model(name, partial(runners.__getitem__, name), DynamicBatcher(1, 100, 0.0))
        for name in "ab"
    ]
    worker, recorder = Worker(models), Recorder()
    start_worker(worker, recorder)
    items: list[WorkItem] = []
    for text in ("a1", "a2", "b"):
        items.append(WorkItem(PipelineInput(text), 1e12, time.monotonic()))
        items[-1].model = text[0]
        runners[text[0]].prepare(items[-1])
    worker.submit(items)
    wait_until(lambda: recorder.count() == 3)
    worker.stop()
    worker.thread.join(60)
    assert events == ["a begins", "b begins", "b ends", "a ends", "a begins", "a ends"]


def test_an_engine_runs_its_own_steps_while_it_encodes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, events = start(), list[str]()
    step = bench.generator.step

    def encoding_step(idle_since: float) -> Any:
        if not events:
            events.append("encoder begins")
            bench.generator.others.run_all_steps()
            events.append("encoder ends")
        events.append("step")
        return step(idle_since)

    monkeypatch.setattr(bench.generator, "step", encoding_step)
    bench.generate("say a b c")
    wait_until(lambda: not bench.generator.running and "encoder ends" in events)
    assert events[:4] == ["encoder begins", "step", "encoder ends", "step"]


def test_an_engine_without_a_due_step_wakes_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.worker.IDLE_S", 1e6)  # the worker has nothing else to wake for
    bench = start()
    due = threading.Event()
    monkeypatch.setattr(bench.generator, "due_at", lambda since: since if due.is_set() else None)
    bench.generate("say a b c")
    assert bench.generator.responded.wait(60)  # items run a step
    assert bench.generator.running
    due.set()
    bench.generator.others.wake()
    wait_until(lambda: not bench.generator.running)


def test_a_model_knows_whether_others_have_work(start: Start) -> None:
    runner = Interruptible()
    bench = start(runner)
    bench.submit("alone")
    bench.wait_for(1)
    stream = bench.generate("long")
    wait_until(lambda: len(bench.recorder.steps) > 0)
    bench.submit("shared")
    bench.wait_for(2)
    stream.open = False
    assert runner.were_busy == [False, True]
    assert runner.turns_s == [MAX_TURN_ALONE_S, MAX_TURN_S]


def test_a_failure_in_the_middle_of_another_models_step_stays_its_own(start: Start) -> None:
    bench = start(Interruptible())
    bench.generator.healthy = False
    bench.hold("a")
    bench.generate("bad")
    bench.runner.gate.set()
    bench.wait_for(1)
    assert bench.recorder.outcomes["a"] == ["A"]
    assert bench.generation.breaker.failures == 1
    assert bench.pipeline.breaker.failures == 0


def test_a_device_lost_in_the_middle_of_another_models_step_ends_the_worker(start: Start) -> None:
    bench = start(Interruptible())
    bench.generator.step_error = RuntimeError("CUDA error: an illegal memory access")
    bench.hold("a")
    bench.generate("x")
    bench.runner.gate.set()
    wait_until(lambda: bool(bench.recorder.errors))
    assert bench.runner.batches == [["a"]]


def test_a_stop_in_the_middle_of_a_step_ends_the_thread_after_it(start: Start) -> None:
    bench = start(Interruptible())
    bench.hold("a")
    bench.worker.stop()
    bench.runner.gate.set()
    bench.worker.thread.join(60)
    assert not bench.worker.thread.is_alive()
    assert bench.recorder.outcomes["a"] == ["A"]


def test_the_watchdogs_time_counts_from_the_last_forward_pass(start: Start) -> None:
    times: list[tuple[float, float]] = []

    def measured(texts: list[str]) -> None:
        before = watched.worker.busy_since
        watched.runner.others.run_steps()
        times.append((before, watched.worker.busy_since))

    watched = start(FakeRunner(measured))
    watched.submit("a")
    watched.wait_for(1)
    [(before, after)] = times
    assert before < after < float("inf")


class TimedEngine:
    """An engine whose steps take a time on a manual clock, and which stays busy."""

    busy = True

    def __init__(self, step_s: float, clock: list[float], steps: list[float]) -> None:
        self.step_s, self.clock, self.steps = step_s, clock, steps
        self.others: Any = None

    def add(self, item: WorkItem) -> None:
        pass

    def step(self, idle_since: float) -> StepOutcome:
        self.clock[0] += self.step_s
        if self.step_s > 1 and self.others:
            self.others.run_steps()
        self.steps.append(self.step_s)
        report = BatchReport(0, 0, 0.0, 0.0, self.step_s, (), 0, 1)
        return StepOutcome(report)


@pytest.mark.parametrize("long_s", [0.13, 1.0, 2.0])  # others run in the middle of the last
def test_models_compute_as_long_as_others_whatever_their_steps_take(long_s: float) -> None:
    clock, steps = [0.0], list[float]()
    models = [batched_model(name, FakeRunner, DynamicBatcher(1, 100, 0.0)) for name in "ab"]
    worker = Worker(models, lambda: clock[0])
    worker._listener = Recorder()
    for model, step_s in zip(models, (long_s, 0.125), strict=True):
        engine: Any = TimedEngine(step_s, clock, steps)
        model.engine, model.state = engine, "ready"
        engine.others = OtherServedModels(worker, model.name)
        item: WorkItem = WorkItem(PipelineInput(""), 1e12, 0.0)
        item.model = model.name
        worker._add(item)
    for _ in range(10):
        worker._run_steps()
    assert steps.count(long_s) == 10
    assert 0.9 < steps.count(0.125) * 0.125 / (10 * long_s) < 1.2


# ── an item's fault, a lack of memory or a lost device ──


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            OutOfMemory,
        ),
        (RuntimeError("CUDA error: out of memory"), OutOfMemory),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            OutOfMemory,
        ),
        (RuntimeError("CUDA driver error: out of memory"), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost),
        (RuntimeError("CUDA driver error: device-side assert triggered"), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), DeviceLost),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("The size of tensor a must match the size of tensor b"), ItemFailed),
        (IndexError("index out of range in self"), ItemFailed),
    ],
)
def test_an_exception_is_classified_with_its_cause(
    error: Exception, kind: type[OnequeueError]
) -> None:
    failure = failure_of(error)
    assert type(failure) is kind
    assert failure.__cause__ is error


def test_an_error_of_ours_is_returned_as_it_is() -> None:
    late = DeadlineExceeded("too late")
    assert failure_of(late) is late
