"""The speech engine: cancelled, failing and waiting recordings."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batching.errors import ItemFailed
from batching.fair_share import NO_OWNER
from batching.request_queue import WorkItem
from tests.transcribing import (
    new_speech_engine,
    noise,
    prepared,
    saved,
    tokens_of,
    transcribed,
)
from worker.engines.speech.engine import SpeechEngine, SpeechItem
from worker.engines.speech.log_mel import BLOCK_FRAMES
from worker.messages.protocol import Pending, StepReport
from worker.messages.transcription import TranscriptDelta, TranscriptionInput


def payloads(folder: Path, *seconds: float) -> list[TranscriptionInput]:
    return [
        TranscriptionInput(saved(folder, noise(length, n), f"{n}.wav"))
        for n, length in enumerate(seconds)
    ]


def added(engine: SpeechEngine[Any], folder: Path, *seconds: float) -> list[SpeechItem[Any]]:
    """Add recordings of these lengths."""
    items = [prepared(engine, payload) for payload in payloads(folder, *seconds)]
    for item in items:
        engine.add(item)
    return items


def finish(engine: SpeechEngine[Any], items: Sequence[Any]) -> dict[Any, Any]:
    """The deltas of each item, or its error."""
    results: dict[Any, Any] = {item: [] for item in items}
    while engine.busy:
        outcome = engine.step()
        for item, delta in outcome.deltas:
            results[item].append(delta)
        results |= {item: error for item, error in outcome.done if error}
    return results


def test_cancelled_recording_is_dropped_in_the_next_step(tmp_path: Path) -> None:
    engine = new_speech_engine()
    items = added(engine, tmp_path, 40.0, 2.0)
    for _ in range(5):
        engine.step()
    assert len(engine.runner.running) == 2
    items[0].open = False
    engine.step()
    assert items[0] not in engine.jobs
    assert [window.item for window in engine.runner.running] == [items[1]]
    assert finish(engine, items)[items[1]]


def test_rows_are_limited_and_recordings_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_speech_engine()
    monkeypatch.setattr(engine.runner, "max_rows", 2)
    items = added(engine, tmp_path, 30.0, 30.0, 2.0)
    max_running, finished = 0, []
    while engine.busy:
        outcome = engine.step()
        assert isinstance(outcome.report, StepReport)
        max_running = max(max_running, outcome.report.running)
        finished += [item for item, _ in outcome.done]
    assert max_running == 2
    assert finished[0] is items[2]  # the short one, which was added last


@pytest.mark.parametrize("part", ["_encode", "_decode"])
def test_window_that_raises_fails_its_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    inputs = payloads(tmp_path, 5.0, 5.0, 5.0)
    expected = [tokens_of(deltas) for deltas in transcribed(new_speech_engine(), inputs)]
    engine = new_speech_engine()
    items = [prepared(engine, payload) for payload in inputs]
    original = getattr(engine.runner, part)

    def fail(*args: Any) -> Any:
        windows = args[0] if part == "_encode" else args[1]
        if any(window.item is items[1] and window.seek for window in windows):
            raise ValueError("a later window of the second recording")
        return original(*args)

    monkeypatch.setattr(engine.runner, part, fail)
    for item in items:
        engine.add(item)
    results = finish(engine, items)
    assert isinstance(results[items[1]], ItemFailed)
    others: list[list[TranscriptDelta]] = [results[items[0]], results[items[2]]]
    assert [tokens_of(deltas) for deltas in others] == [expected[0], expected[2]]
    assert not engine.runner.running


def test_clear_frees_all_rows(tmp_path: Path) -> None:
    engine = new_speech_engine()
    items = added(engine, tmp_path, 5.0, 2.0)
    for _ in range(4):
        engine.step()
    assert engine.clear() == items
    assert not engine.busy
    assert not engine.runner.running
    engine.warm_up()


def test_step_encodes_one_window_or_generates_one_token_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_speech_engine()
    runner, calls = engine.runner, list[str]()
    original_encode, original_step = getattr(runner, "_encode"), runner.step  # noqa: B009

    def encode(windows: Sequence[Any]) -> None:
        calls.append(f"encode {len(windows)}")
        original_encode(windows)

    def step(windows: Sequence[Any]) -> None:
        calls.append("generate")
        original_step(windows)

    monkeypatch.setattr(runner, "_encode", encode)
    monkeypatch.setattr(runner, "step", step)
    for payload in payloads(tmp_path, 5.0, 2.0, 3.0):
        engine.add(prepared(engine, payload))
    while engine.busy:
        calls.clear()
        engine.step()
        assert calls in (["encode 1"], ["generate"], [])


def test_recordings_are_read_ahead_in_pool_threads_and_dropped_after_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, stored, threads = new_speech_engine(), list[int](), set[int]()
    item = prepared(engine, payloads(tmp_path, 200.0)[0])
    reader: Any = item.prepared.reader
    original = reader.mel.powers

    def powers(samples: Any) -> Any:
        threads.add(threading.get_ident())
        stored.append(reader._stored[1].shape[1])
        return original(samples)

    monkeypatch.setattr(reader.mel, "powers", powers)
    seek = 0
    while seek < reader.total_frames:
        engine._readers.submit(reader.read_ahead, seek).result()
        assert reader.window(seek) is not None
        seek += reader.mel.window_frames
    assert threading.get_ident() not in threads
    assert max(stored) <= reader.mel.window_frames + 2 * BLOCK_FRAMES < reader.total_frames / 3


def test_no_step_is_due_while_recordings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's thread, which all models share, waits for nothing: a thread that has finished
    wakes it."""
    engine, may_read, woken = new_speech_engine(), threading.Event(), threading.Semaphore(0)
    engine.others = Mock(wake=woken.release, total_s=0.0)
    item = prepared(engine, payloads(tmp_path, 70.0)[0])
    reader: Any = item.prepared.reader
    read_ahead = reader.read_ahead

    def read_slowly(seek: int) -> None:
        assert may_read.wait(60)
        read_ahead(seek)

    monkeypatch.setattr(reader, "read_ahead", read_slowly)
    engine.add(item)
    assert engine.due_at(7.0) == 7.0
    while not item.prepared.reading:
        engine.step()
    for _ in range(50_000):
        if engine.due_at(7.0) is None:  # the windows that were read are through
            break
        engine.step()
    for _ in range(3):
        assert not engine.step().deltas
        assert engine.due_at(7.0) is None
    assert engine.busy
    assert not woken.acquire(blocking=False)
    may_read.set()
    assert woken.acquire(timeout=60)
    assert engine.due_at(7.0) == 7.0
    while engine.busy:
        if engine.due_at(7.0) is None:
            assert woken.acquire(timeout=60)
        engine.step()


def test_a_step_is_due_for_a_recording_that_is_added_while_another_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_speech_engine()
    first, second = (prepared(engine, payload) for payload in payloads(tmp_path, 1.0, 1.0))
    monkeypatch.setattr(first.prepared.decoder, "next_window", lambda: None)
    engine.add(first)
    engine.step()
    assert engine.due_at(7.0) is None
    engine.add(second)
    assert engine.due_at(7.0) == 7.0


def test_a_step_is_due_if_a_thread_finishes_while_the_last_one_looks_at_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, woken = new_speech_engine(), threading.Semaphore(0)
    engine.others = Mock(wake=woken.release, total_s=0.0)
    item = prepared(engine, payloads(tmp_path, 1.0)[0])

    def next_window() -> None:
        engine._submit(int)
        assert woken.acquire(timeout=60)

    monkeypatch.setattr(item.prepared.decoder, "next_window", next_window)
    engine.add(item)
    engine.step()
    assert engine.due_at(7.0) == 7.0


def test_recording_that_opens_slowly_occupies_no_pool_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate, ready = new_speech_engine(), threading.Event(), threading.Event()
    original = engine._open_decoder

    def open_slowly(payload: TranscriptionInput) -> Any:
        assert gate.wait(60)
        return original(payload)

    monkeypatch.setattr(engine, "_open_decoder", open_slowly)
    item: SpeechItem[Any] = WorkItem(payloads(tmp_path, 1.0)[0], float("inf"), 0.0)
    with pytest.raises(Pending) as pending:
        engine.prepare(item)
    pending.value.then(NO_OWNER, lambda: True, ready.set)
    assert not ready.is_set()
    gate.set()
    assert ready.wait(60)
    engine.prepare(item)
    engine.add(item)
    assert finish(engine, [item])[item]


def test_scans_of_long_recordings_do_not_delay_others(tmp_path: Path) -> None:
    engine, gate = new_speech_engine(), threading.Event()
    item = prepared(engine, payloads(tmp_path, 70.0)[0])
    scans = [Mock() for _ in range(3)]
    for job in scans:
        job.decoder.reader.scan = lambda is_wanted: gate.wait(60)
        engine._scanners.submit(engine._scan, job, lambda: True, job.notify)
    engine.add(item)
    try:
        assert finish(engine, [item])[item]
        assert not any(job.notify.called for job in scans)
    finally:
        gate.set()
