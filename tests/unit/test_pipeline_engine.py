"""The pipeline engine runs items that a batch was cut before in its next batches."""

from typing import Any, cast

from batching.batcher import DynamicBatcher
from batching.fair_share import NO_OWNER, WorkOwner
from batching.request_queue import WorkItem
from tests.fakes import BusyModels, FakeRunner
from worker.engines.pipeline.engine import PipelineEngine
from worker.messages.protocol import CUT, BatchReport, PipelineInput, StepOutcome


class Slow(FakeRunner):
    """Needs as many batches for a text as it has words, each of one second."""

    now = 1.0

    def forward(self, prepared: list[Any]) -> list[Any]:
        self.now += 1.0
        self.batches.append([words[0] for words in prepared])
        for words in prepared:
            words.pop()
        return [CUT if words else "done" for words in prepared]


class Cutting(FakeRunner):
    """Cuts each batch to its first text."""

    def forward(self, prepared: list[Any]) -> list[Any]:
        self.batches.append([text for [text] in prepared])
        return ["done", *[CUT] * (len(prepared) - 1)]


def slow_engine() -> tuple[PipelineEngine, Slow]:
    runner = Slow()
    return PipelineEngine(runner, DynamicBatcher(8, 100, 0.0), lambda: runner.now), runner


def arrived(engine: PipelineEngine, text: str, owner: WorkOwner = NO_OWNER) -> WorkItem:
    item = WorkItem(None, float("inf"), 0.0, owner=owner)
    item.prepared = text.split()
    engine.add(item)
    return item


def step(engine: PipelineEngine) -> StepOutcome:
    outcome = engine.step(1.0)
    assert outcome
    return outcome


def test_a_cut_item_continues_in_the_next_batch_with_new_ones() -> None:
    engine, runner = slow_engine()
    long = arrived(engine, "long long long")
    outcome = step(engine)
    assert outcome.outputs == []
    assert outcome.unfinished
    short = arrived(engine, "short")
    assert engine.busy
    assert engine.due_at(1.0) == 0.0  # since its arrival
    outcome = step(engine)
    assert outcome.outputs == [(short, "done")]
    assert cast(BatchReport, outcome.report).size == 1
    assert step(engine).outputs == [(long, "done")]
    assert runner.batches == [["long"], ["long", "short"], ["long"]]
    assert not engine.busy
    assert engine.due_at(1.0) is None


def test_the_time_of_a_cut_item_is_reported_when_it_finishes() -> None:
    engine, _ = slow_engine()
    arrived(engine, "long long long")
    reports = [cast(BatchReport, step(engine).report) for _ in range(3)]
    assert [(report.size, report.total_s) for report in reports] == [(0, 1.0), (0, 2.0), (1, 3.0)]


def test_a_cancelled_cut_item_is_dropped() -> None:
    engine, runner = slow_engine()
    left = arrived(engine, "long long long")
    step(engine)
    left.open = False
    assert engine.step(1.0) is None
    assert len(runner.batches) == 1
    assert not engine.busy


def cutting_engine() -> tuple[PipelineEngine, Cutting]:
    runner = Cutting()
    return PipelineEngine(runner, DynamicBatcher(8, 100, 0.0), lambda: 1.0), runner


def test_items_that_a_batch_was_cut_before_run_before_new_ones_of_their_request() -> None:
    engine, runner = cutting_engine()
    first, second, third = (arrived(engine, text) for text in "abc")
    outcome = step(engine)
    assert outcome.outputs == [(first, "done")]
    assert outcome.unfinished
    assert [item.batch_size for item in (first, second, third)] == [1, 0, 0]
    later = arrived(engine, "later")
    third.open = False
    outcome = step(engine)
    assert outcome.outputs == [(second, "done")]
    assert cast(BatchReport, outcome.report).size == 1
    assert step(engine).outputs == [(later, "done")]
    assert runner.batches == [["a", "b", "c"], ["b", "later"], ["later"]]
    assert engine.step(1.0) is None  # the third was cancelled
    assert not engine.busy


def test_a_request_that_arrives_during_a_list_is_in_the_next_batch() -> None:
    engine, runner = cutting_engine()
    owner = WorkOwner("a")
    for text in "abc":
        arrived(engine, text, owner)
    step(engine)
    bystander = arrived(engine, "x", WorkOwner("b"))
    step(engine)
    assert step(engine).outputs == [(bystander, "done")]
    step(engine)
    assert runner.batches == [["a", "b", "c"], ["b", "x", "c"], ["x", "c"], ["c"]]


def test_clear_returns_cut_items_and_those_of_a_cut_batch_once() -> None:
    for (engine, _), texts, count in ((slow_engine(), ["a a"], 1), (cutting_engine(), [*"abc"], 2)):
        items = [arrived(engine, text) for text in texts]
        step(engine)
        assert engine.clear() == items[-count:]
        assert not engine.busy
        assert engine.due_at(1.0) is None


def test_a_cut_batch_does_not_count_as_one_that_fits_into_memory() -> None:
    batcher: DynamicBatcher[Any] = DynamicBatcher(8, 100, 0.0)
    engine = PipelineEngine(Cutting(), batcher, lambda: 1.0)
    batcher.out_of_memory(4)
    for _ in range(10):
        for text in "abcd":
            arrived(engine, text)
        while engine.busy:
            step(engine)
    assert batcher.cap == 4


def test_other_models_run_between_the_parts_of_a_batch_that_raises() -> None:
    runner, others = FakeRunner(), BusyModels()
    engine = PipelineEngine(runner, DynamicBatcher(8, 100, 0.0), lambda: 1.0)
    engine.others = others
    for text in ("a", "b", "bad", "c"):
        engine.add(item := WorkItem(PipelineInput(text), float("inf"), 0.0))
        runner.prepare(item)
    outcome = step(engine)
    assert len(outcome.outputs) == 3
    assert others.steps == 2  # after the batch and its second half
