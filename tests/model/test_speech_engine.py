"""The speech engine: who leaves, who fails, who has to wait."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from tests.transcribing import accepted, engine, noise, saved, tokens_of, transcribed
from worker.messages.protocol import Pending, StepReport
from worker.messages.transcription import TranscriptDelta, TranscriptionInput
from worker.speech.engine import SpeechEngine
from worker.speech.features import BLOCK


def payloads(folder: Path, *seconds: float) -> list[TranscriptionInput]:
    return [
        TranscriptionInput(saved(folder, noise(length, n), f"{n}.wav"))
        for n, length in enumerate(seconds)
    ]


def finish(engine: SpeechEngine, items: Sequence[Any]) -> dict[Any, Any]:
    """Deltas of each item, or its failure."""
    answers: dict[Any, Any] = {item: [] for item in items}
    while engine.busy:
        outcome = engine.step()
        for item, delta in outcome.deltas:
            answers[item].append(delta)
        answers |= {item: error for item, error in outcome.done if error}
    return answers


def test_a_recording_ends_within_a_step_of_its_client_leaving(tmp_path: Path) -> None:
    speaking = engine()
    items = [accepted(speaking, each) for each in payloads(tmp_path, 40.0, 2.0)]
    for item in items:
        speaking.add(item)
    for _ in range(5):
        speaking.step()
    assert len(speaking.runner.running) == 2
    items[0].open = False
    speaking.step()
    assert items[0] not in speaking.live
    assert [window.owner for window in speaking.runner.running] == [items[1]]
    assert finish(speaking, items)[items[1]]


def test_rows_are_bounded_and_recordings_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking = engine()
    monkeypatch.setattr(speaking.runner, "rows", 2)
    items = [accepted(speaking, each) for each in payloads(tmp_path, 30.0, 30.0, 2.0)]
    for item in items:
        speaking.add(item)
    most, ended = 0, []
    while speaking.busy:
        outcome = speaking.step()
        assert isinstance(outcome.report, StepReport)
        most = max(most, outcome.report.running)
        ended += [item for item, _ in outcome.done]
    assert most == 2
    assert ended[0] is items[2]  # which came last, and is short


@pytest.mark.parametrize("part", ["_encode", "_decode"])
def test_a_window_that_raises_fails_its_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    inputs = payloads(tmp_path, 5.0, 5.0, 5.0)
    expected = [tokens_of(deltas) for deltas in transcribed(engine(), inputs)]
    speaking = engine()
    items = [accepted(speaking, each) for each in inputs]
    run = getattr(speaking.runner, part)

    def fails(*args: Any) -> Any:
        windows = args[0] if part == "_encode" else args[1]
        if any(window.owner is items[1] and window.seek for window in windows):
            raise ValueError("a window of the second recording")
        return run(*args)

    monkeypatch.setattr(speaking.runner, part, fails)
    for item in items:
        speaking.add(item)
    answers = finish(speaking, items)
    assert isinstance(answers[items[1]], ItemFailed)
    others: list[list[TranscriptDelta]] = [answers[items[0]], answers[items[2]]]
    assert [tokens_of(deltas) for deltas in others] == [expected[0], expected[2]]
    assert not speaking.runner.running


def test_what_is_dropped_leaves_its_rows(tmp_path: Path) -> None:
    speaking = engine()
    items = [accepted(speaking, each) for each in payloads(tmp_path, 5.0, 2.0)]
    for item in items:
        speaking.add(item)
    for _ in range(4):
        speaking.step()
    assert speaking.clear() == items
    assert not speaking.busy
    assert not speaking.runner.running
    speaking.warm_up()


def test_a_step_is_one_window_through_the_encoder_or_a_token_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking = engine()
    runner, calls = speaking.runner, list[str]()
    encode, decode = getattr(runner, "_encode"), runner.step  # noqa: B009

    def encoded(windows: Sequence[Any]) -> None:
        calls.append(f"encode {len(windows)}")
        encode(windows)

    def said(windows: Sequence[Any]) -> None:
        calls.append("say")
        decode(windows)

    monkeypatch.setattr(runner, "_encode", encoded)
    monkeypatch.setattr(runner, "step", said)
    for payload in payloads(tmp_path, 5.0, 2.0, 3.0):
        speaking.add(accepted(speaking, payload))
    while speaking.busy:
        calls.clear()
        speaking.step()
        assert calls in (["encode 1"], ["say"], [])


def test_recordings_are_read_beside_the_worker_and_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking, kept, threads = engine(), list[int](), set[int]()
    item = accepted(speaking, payloads(tmp_path, 200.0)[0])
    frames = item.prepared.text.frames
    powers = frames.mel.powers

    def watched(samples: Any) -> Any:
        threads.add(threading.get_ident())
        kept.append(frames._kept[1].shape[1])
        return powers(samples)

    monkeypatch.setattr(frames.mel, "powers", watched)
    seek = 0
    while seek < frames.total:
        speaking._pool.submit(frames.read, seek).result()
        assert frames.window(seek) is not None
        seek += frames.mel.window
    assert threading.get_ident() not in threads
    assert max(kept) <= frames.mel.window + 2 * BLOCK < frames.total / 3


def test_a_recording_that_is_slow_to_open_keeps_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking, gate, ready = engine(), threading.Event(), threading.Event()
    opened = speaking._open

    def slowly(payload: TranscriptionInput) -> Any:
        assert gate.wait(60)
        return opened(payload)

    monkeypatch.setattr(speaking, "_open", slowly)
    item = WorkItem(payloads(tmp_path, 1.0)[0], float("inf"), 0.0)
    with pytest.raises(Pending) as pending:
        speaking.prepare(item)
    pending.value.then(lambda: True, ready.set)
    assert not ready.is_set()
    gate.set()
    assert ready.wait(60)
    speaking.prepare(item)
    speaking.add(item)
    assert finish(speaking, [item])[item]


def test_recordings_that_are_read_through_hold_up_no_other(tmp_path: Path) -> None:
    speaking, gate = engine(), threading.Event()
    item = accepted(speaking, payloads(tmp_path, 70.0)[0])
    scans = [Mock() for _ in range(3)]
    for work in scans:
        work.text.frames.scan = lambda wanted: gate.wait(60)
        speaking._scans.submit(speaking._scan, work, lambda: True, work.ended)
    speaking.add(item)
    try:
        assert finish(speaking, [item])[item]
        assert not any(work.ended.called for work in scans)
    finally:
        gate.set()
