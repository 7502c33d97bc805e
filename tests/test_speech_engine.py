"""The speech engine: who leaves, who fails, who has to wait."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batching.errors import ItemFailed
from tests.speaking import accepted, engine, noise, saved, tokens_of, transcribed
from worker.speech.engine import SpeechEngine
from worker.transcription import TranscriptDelta, TranscriptionInput


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
