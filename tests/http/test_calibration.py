"""`onequeue calibrate`: the search, on a simulated machine, and whole calibrations."""

import asyncio
import math
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.app import create_app
from server.commands import calibrate as command
from server.commands.calibrate import Options, calibrate
from server.commands.load_test.arguments import parse_args
from server.commands.load_test.command import make_generator
from server.commands.load_test.rate_search import BatchLimits, Search, Stage
from server.core.settings import Settings, SettingsError
from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.fakes import FakeRunner
from tests.matrix import matrix

ONLY = {"chat_model": "none", "embedding_model": "none"}


class Machine:
    """A simulated server. A batch takes 10 ms and 2 ms a row; more than 16 rows take much longer.
    A request waits for the batch before it and for the timer, and longer at a higher load."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def batch_s(self, cap: int) -> float:
        return 0.010 + 0.002 * cap + (0.2 if cap > 16 else 0)

    def capacity(self, cap: int) -> float:
        return cap / self.batch_s(cap)

    def p95_s(self, limits: BatchLimits, rate: float) -> float:
        left = 1 - rate / self.capacity(limits.cap)
        if left <= 0:
            return math.inf
        return 2 * self.batch_s(limits.cap) / left + limits.wait_ms / 1000

    async def __call__(self, limits: BatchLimits, rate: float, seconds: float) -> Stage:
        self.seconds += seconds
        capacity = self.capacity(limits.cap)
        served = min(rate or capacity, capacity)
        p95_ms = 1000 * self.p95_s(limits, rate or 0.99 * capacity)
        return Stage(limits, rate, served, p95_ms / 2, p95_ms, 0)

    def best(self, limit_s: float, caps: Sequence[int]) -> float:
        """Return the highest rate within the limit with one of these caps, by trying all."""
        rates = ((n / 10, cap) for cap in caps for n in range(1, 10_000))
        return max(rate for rate, cap in rates if self.p95_s(BatchLimits(cap), rate) <= limit_s)


@pytest.mark.parametrize("limit_ms", [60, 100, 250, 1000, 5000])
def test_the_search_finds_the_best_cap_and_nearly_its_rate(limit_ms: float) -> None:
    machine = Machine()
    search = Search(machine, limit_ms, 1.0)
    best = asyncio.run(search.run())
    assert best is not None
    rate = machine.best(limit_ms / 1000, search.caps)
    assert machine.best(limit_ms / 1000, [best.limits.cap]) >= 0.9 * rate
    assert 0.7 * rate <= best.rate <= 0.95 * rate
    again = asyncio.run(machine(best.limits, best.rate, 10))
    assert again.holds(limit_ms)
    assert machine.seconds < 60  # stages of a second


def test_the_search_returns_none_for_a_limit_that_no_rate_holds() -> None:
    assert asyncio.run(Search(Machine(), 5, 1.0).run()) is None


@pytest.mark.parametrize("seconds", [6, 12, 20, 41])
def test_a_search_keeps_to_its_time_and_confirms_what_it_has_found(seconds: float) -> None:
    machine = Machine()
    search = Search(machine, 250, 1.0, ends_at=seconds, clock=lambda: machine.seconds)
    best = asyncio.run(search.run())
    assert machine.seconds <= seconds
    assert search.is_confirmed == (best is not None)
    assert search.is_confirmed or seconds < search.max_stages


def test_a_cancelled_search_keeps_the_best_stage_so_far() -> None:
    machine, stages = Machine(), list[Stage]()

    async def measure(limits: BatchLimits, rate: float, seconds: float) -> Stage:
        if len(stages) == 20:
            raise asyncio.CancelledError
        stages.append(await machine(limits, rate, seconds))
        return stages[-1]

    search = Search(measure, 250, 1.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(search.run())
    holding = [stage.rate for stage in stages if stage.rate and stage.holds(250)]
    assert search.best is not None
    assert search.best.rate == max(holding)
    assert not search.is_confirmed


def test_a_stage_with_failures_does_not_hold() -> None:
    stage = Stage(BatchLimits(8), 100, 100, 1, 2, 0)
    assert stage.holds(2)
    assert not stage.holds(1.9)
    assert not Stage(BatchLimits(8), 100, 100, 1, 2, 1).holds(2)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 0.05)


def shorten(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a stage last so long."""
    monkeypatch.setattr(command, "WARM_UP_S", max(seconds, 0.2))
    monkeypatch.setattr(command, "MIN_STAGE_S", seconds)
    monkeypatch.setattr(command, "STAGE_PERCENTILES", 0)
    monkeypatch.setattr(command, "MIN_STAGE_REQUESTS", 1)


def run(app: Any, **options: Any) -> tuple[Stage | None, list[str]]:
    """Return the best stage, and the lines of progress and of the result."""
    lines: list[str] = []
    chosen = Options(**{"p95_ms": 60_000, **options})
    best, signal_number = calibrate(app, chosen, lines.append, lines.append)
    assert signal_number is None
    return best, lines


@pytest.mark.usefixtures("short")
def test_settings_are_printed() -> None:
    """A small queue is enlarged: two slots would refuse the clients."""
    settings = Settings(**ONLY, api_keys=("k",), max_queue_size=2)  # type: ignore[arg-type]
    best, lines = run(create_app(settings, FakeRunner))
    assert best is not None
    assert re.match(r"measuring takes at most \d+ s; Ctrl-C", lines[1])
    assert Options(250).seconds == 120
    pasted = dict(line.split("=") for line in lines if re.fullmatch(r"[A-Z_]+=\S+", line))
    assert set(pasted) == {"MAX_BATCH_SIZE", "MAX_BATCH_WAIT_MS", "MAX_QUEUE_SIZE"}
    from server.core.settings import load_settings

    assert load_settings(pasted).max_batch_size == best.limits.cap


@pytest.mark.matrix
@pytest.mark.usefixtures("short")
def test_a_chat_model_is_measured_by_whole_responses() -> None:
    settings = Settings(pipeline_model="none", embedding_model="none", max_running=8)
    best, lines = run(create_app(settings, load_chat=FakeGenerator))
    assert best is not None
    settings_lines = [line for line in lines if line.startswith("MAX_")]
    assert settings_lines == ["MAX_QUEUE_SIZE=" + lines[-1][15:]]


@pytest.mark.matrix
def test_a_speech_model_is_measured_by_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 0.5)  # each recording is read in a process of its own
    nothing = {"pipeline_model": "none", "embedding_model": "none", "chat_model": "none"}
    transcriber = FakeTranscriber()
    settings = Settings(**nothing, transcription_model="a/model")  # type: ignore[arg-type]
    app = create_app(settings, load_transcriber=lambda: transcriber)
    best, lines = run(app)
    assert best is not None
    assert lines[0].startswith("/v1/audio/transcriptions of fake")
    assert transcriber.payloads


def serving(task: str) -> Any:
    """Return an app that has models of all kinds."""
    info = SimpleNamespace(task=task, mask="[MASK]")
    model = SimpleNamespace(engine=SimpleNamespace(info=info))
    models = {registry_name: model for registry_name, _, _ in command.SERVES.values()}
    client, settings = SimpleNamespace(models=models), SimpleNamespace(api_keys=("k",))
    return SimpleNamespace(worker_client=client, settings=settings)


def test_a_task_that_takes_json_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--input FILE is required: the task table-question"):
        command.load_flags(serving("table-question-answering"), "pipeline", Options(9), tmp_path)


@pytest.mark.parametrize(
    ("name", "task", "file", "expected"),
    [
        ("pipeline", "fill-mask", None, b"[MASK]"),
        ("pipeline", "fill-mask", b'{"inputs": "a"}', b'{"inputs": "a"}'),
        ("pipeline", "image-classification", None, b"\x89PNG"),
        ("pipeline", "audio-classification", None, b"WAVE"),
        ("chat", "", None, b'"max_tokens": 7'),
        ("embedding", "", None, b'"input": '),
        ("rerank", "", None, b'"query": '),
        ("speech", "", b"a recording", b'name="file"; filename="0"'),
    ],
)
def test_each_model_gets_requests_of_its_kind(
    name: str, task: str, file: bytes | None, expected: bytes, tmp_path: Path
) -> None:
    options = Options(250, words=(3, 5), tokens=7, file=file)
    flags = command.load_flags(serving(task), name, options, tmp_path)
    generator = make_generator(parse_args("calibrate", ["http://x/", *flags]))
    bodies = [next(generator.bodies) for _ in range(3)]
    assert all(expected in body for body in bodies)
    assert len({*bodies}) == (1 if file else 3)
    assert b"authorization: Bearer k" in generator.client.head
    is_json = name not in ("pipeline", "speech") or (file or b"").startswith(b"{")
    assert (b"content-type: application/json" in generator.client.head) == is_json


@pytest.mark.parametrize(("rate", "places"), [(10, 16), (400, 200)])
def test_the_queue_holds_the_requests_of_twice_the_limit(rate: float, places: int) -> None:
    best = Stage(BatchLimits(256), rate, rate, 50, 200, 0)
    assert command.settings_lines(best, 250, True) == [f"MAX_QUEUE_SIZE={places}"]
    assert command.settings_lines(best, 250, False)[-1] == "MAX_QUEUE_SIZE=512"


@pytest.mark.parametrize("number", matrix([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_prints_the_best_settings_so_far(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 0.2)
    progress: list[str] = []
    lines: list[str] = []

    def on_progress(line: str) -> None:
        progress.append(line)
        if len(progress) == 8:  # of the table, after three lines
            os.kill(os.getpid(), number)

    settings = Settings(**ONLY)  # type: ignore[arg-type]
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    app = create_app(settings, FakeRunner)
    best, received = calibrate(app, Options(60_000), lines.append, on_progress)
    assert received == number
    assert best is not None
    assert len(progress) == 8
    assert "is the best so far, not confirmed" in lines[0]
    assert any(line.startswith("MAX_BATCH_SIZE=") for line in lines)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_time_that_is_too_short_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose responses take longer than all the time."""
    monkeypatch.setattr(command, "STOP_S", 0.1)
    runner = FakeRunner(before=lambda texts: runner.gate.clear())
    settings = Settings(**ONLY)  # type: ignore[arg-type]
    lines: list[str] = []

    def load() -> FakeRunner:
        runner.gate.set()
        return runner

    app = create_app(settings, load)
    try:
        best, received = calibrate(app, Options(250, seconds=0.5), lines.append, lines.append)
    finally:
        runner.gate.set()
    assert (best, received) == (None, None)
    assert lines[-1] == "no rate was found before the end; allow more time by --seconds"


def failing_loader() -> FakeRunner:
    raise ValueError("no weights")


def test_a_model_or_input_that_cannot_be_measured_is_refused() -> None:
    settings = Settings(**ONLY)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no such model is served"):
        run(create_app(settings, FakeRunner), serves="chat")
    with pytest.raises(SettingsError, match="no weights"):
        run(create_app(settings, failing_loader))
    with pytest.raises(SettingsError, match="requests failed"):
        run(create_app(settings, FakeRunner), file=b"refused")
