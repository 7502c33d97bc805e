"""The speech engine: windows of many recordings, one step at a time.

    drop cancelled recordings → start windows, or generate a token of each → retry or accept windows

Implements worker.messages.protocol.Engine. A step is one batch through the encoder or one token of
every window, so that other models get steps in between, and also between the layers of a long one.
Recordings get windows in round robin.
Runners compute windows (whisper.py, ctc.py). Pool threads of the engine read recordings ahead and
compute the times of words.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar

from batching.errors import DeviceLost, OnequeueError
from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from worker.cores import use_one_core
from worker.engines.pipeline.yield_points import YieldPoints
from worker.engines.speech.interfaces import Align, AudioReader, Decoder, SpeechRunner, W
from worker.error_classification import failure_of, run_in_halves
from worker.messages.protocol import (
    ALONE,
    Fallback,
    IsWanted,
    ModelInfo,
    Notify,
    OtherModels,
    Pending,
    StepOutcome,
    StepReport,
)
from worker.messages.transcription import TranscriptDelta, TranscriptionInput

log = logging.getLogger("onequeue.speech")

T = TypeVar("T")

# Threads that open recordings, which may be slow, and that scan long ones: separate pools, so that
# other recordings wait for neither.
OPEN_THREADS = 4
SCAN_THREADS = 2
READ_THREADS = 2  # that read ahead and align
# Windows per encoder run; on a CPU a batch takes as long as its windows one by one.
ENCODER_BATCH = {"cpu": 1, "cuda": 8}


@dataclass(eq=False, slots=True)
class TranscriptionJob(Generic[W]):
    """A recording from `prepare` to its last segment."""

    reader: AudioReader | None = None  # once it is open
    decoder: Decoder[W] = field(init=False)  # likewise
    error: BaseException | None = None  # of opening or scanning
    started: bool = False
    window: W | None = None  # running, or waiting for its token times
    reading: Future[None] | None = None
    aligning: Future[Sequence[float]] | None = None


SpeechItem = WorkItem[TranscriptionInput, TranscriptionJob[W]]


class SpeechEngine(Generic[W]):
    """`prepare` runs in pool threads, the rest on the worker's.

    `open_decoder` opens a recording, and raises InvalidInput. `example`: a window for warming up.
    `align` computes token times, for decoders without them.
    """

    text_model = None
    others: OtherModels = ALONE
    compile_state: Literal["running", "done", "off"] = "off"
    stage = ""
    fallbacks: Sequence[Fallback] = ()

    def __init__(
        self,
        runner: SpeechRunner[W],
        open_decoder: Callable[[TranscriptionInput], Decoder[W]],
        info: ModelInfo,
        example: Callable[[], W],
        align: Align[W] | None = None,
    ) -> None:
        self.runner = runner
        self.times = StepTimes()  # in which a window is a token
        self.info = info
        self._open_decoder = open_decoder
        self._example = example
        self._align = align
        self._yield_points = YieldPoints(runner.model)
        self._encoder_batch = ENCODER_BATCH[info.device.split(":")[0]]
        self._readers = ThreadPoolExecutor(READ_THREADS, "speech", use_one_core)
        self._openers = ThreadPoolExecutor(OPEN_THREADS, "open", use_one_core)
        self._scanners = ThreadPoolExecutor(SCAN_THREADS, "scan", use_one_core)
        self.jobs: dict[WorkItem, TranscriptionJob[W]] = {}
        self._waiting: deque[WorkItem] = deque()  # for a row
        self._stalled = False  # a step has nothing to do before a reading thread has finished
        # of the current step
        self._started_at = 0.0
        self._others_s = 0.0  # that other models had taken before it
        self._deltas: list[tuple[WorkItem, TranscriptDelta]] = []
        self._done: dict[WorkItem, Exception | None] = {}
        self._waits: list[float] = []

    # ── in pool threads ──

    def prepare(self, item: SpeechItem[W]) -> None:
        """Raise Pending while the engine's own threads open the recording, and scan a long one."""
        if not hasattr(item, "prepared"):
            raise Pending(lambda _, *then: self._openers.submit(self._open, item, *then))
        if item.prepared.error:
            raise item.prepared.error

    def _open(self, item: SpeechItem[W], is_wanted: IsWanted, notify: Notify) -> None:
        if not is_wanted():
            return
        job: TranscriptionJob[W] = TranscriptionJob()
        item.prepared, is_short = job, True
        with self._keep_errors(job, is_wanted):
            job.decoder = self._open_decoder(item.payload)
            job.reader = job.decoder.reader
            is_short = job.reader.read_if_short()
        if is_short:
            notify()
        else:
            self._scanners.submit(self._scan, job, is_wanted, notify)

    def _scan(self, job: TranscriptionJob[W], is_wanted: IsWanted, notify: Notify) -> None:
        with self._keep_errors(job, is_wanted):
            job.decoder.reader.scan(is_wanted)
        notify()

    @contextmanager
    def _keep_errors(self, job: TranscriptionJob[W], is_wanted: IsWanted) -> Iterator[None]:
        """Store an exception in the job. Close the recording after one, or if the job is not wanted
        any more."""
        try:
            yield
        except BaseException as error:  # a panic in a tokenizer is not an Exception
            job.error = error.with_traceback(None)  # its frames hold the item
        if job.reader and (job.error or not is_wanted()):
            job.reader.close()

    def finish(self, item: WorkItem, raw: object) -> NoReturn:
        raise NotImplementedError("transcripts are sent as deltas")

    def close(self) -> None:
        for pool in (self._readers, self._openers, self._scanners):
            pool.shutdown(wait=False, cancel_futures=True)

    # ── on the worker's thread ──

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.jobs and not self._stalled else None

    def add(self, item: SpeechItem[W]) -> None:
        self.jobs[item] = item.prepared
        self._waiting.append(item)
        self._stalled = False

    def clear(self) -> list[WorkItem]:
        items = list(self.jobs)
        for item in items:
            self._release(item)
        return items

    def warm_up(self) -> None:
        """Run the example if there is a row for it."""
        if len(self.runner.running) < self.runner.max_rows:
            self.run_example()

    def run_example(self) -> W:
        """Return the example with its results."""
        window = self._example()
        try:
            self.runner.start([window])
            if not window.finished:
                self.runner.step([window])
        finally:
            self.runner.remove(window)
        return window

    def step(self, idle_since: float = 0.0) -> StepOutcome[TranscriptDelta]:
        self._started_at, self._others_s = time.monotonic(), self.others.total_s
        self._deltas, self._done, self._waits = [], {}, []
        self._stalled = True  # before any job is looked at: its thread may finish in between
        self._drop_cancelled()
        self._accept_aligned()
        with self._yield_points.active(self.others):
            generated = self._compute()
        return self._outcome(generated)

    def _compute(self) -> int:
        """Start windows, or generate a token of each. Return the number of tokens."""
        running, generated = self.runner.running, 0
        if windows := self._next_windows():
            self._run(self.runner.start, windows)
        elif running:
            generated = len(running)
            self._run(self.runner.step, list(running))
        if windows or generated:
            self._stalled = False
            self.times.learn(len(windows), generated, self._spent_s())
            for window in running:
                _item(window).progress_at = time.monotonic()
        for window in [window for window in running if window.finished]:
            self._finish(window)
        return generated

    def _spent_s(self) -> float:
        """Return the time of the step so far, without that of other models."""
        return time.monotonic() - self._started_at - (self.others.total_s - self._others_s)

    def _drop_cancelled(self) -> None:
        for item in [item for item in self.jobs if not item.open]:
            self._release(item)

    def _next_windows(self) -> list[W]:
        """Return the next windows of waiting recordings, as many as there are rows."""
        room = min(self._encoder_batch, self.runner.max_rows - len(self.runner.running))
        windows: list[W] = []
        for item in list(self._waiting):
            if len(windows) >= room:
                break
            if (window := self._next_window(item)) is not None:
                windows.append(window)
        return windows

    def _next_window(self, item: WorkItem) -> W | None:
        """Return the recording's next window, if it is read."""
        job = self.jobs[item]
        if job.reading and job.reading.done() and (error := job.reading.exception()):
            self._fail(item, error)
            return None
        if (window := job.decoder.next_window()) is None:
            return None
        self._waiting.remove(item)
        if not job.started:
            job.started = True
            item.started_at = self._started_at
            self._waits.append(self._started_at - item.accepted_at)
        job.window, window.item = window, item
        item.computed += 1
        return window

    def _submit(self, run: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a function in a reading thread; the next step is due when it has finished."""
        future = self._readers.submit(run, *arguments)
        future.add_done_callback(self._resume)
        return future

    def _resume(self, _: Future[Any]) -> None:
        self._stalled = False
        self.others.wake()

    def _finish(self, window: W) -> None:
        """Retry a finished window, or align it, or accept it."""
        item = _item(window)
        job = self.jobs[item]
        try:
            if job.decoder.retry(window):
                return
            if self._align and job.decoder.payload.words:
                job.aligning = self._submit(self._align(window))
            self.runner.remove(window)
            if not job.aligning:
                self._accept(item, None)
        except BaseException as error:
            self._fail(item, error)

    def _accept_aligned(self) -> None:
        for item, job in list(self.jobs.items()):
            if (aligning := job.aligning) and aligning.done():
                job.aligning = None
                try:
                    self._accept(item, aligning.result())
                except BaseException as error:
                    self._fail(item, error)

    def _accept(self, item: WorkItem, token_ends: Sequence[float] | None) -> None:
        """Collect the segments of a window and queue the recording for its next one."""
        job = self.jobs[item]
        decoder, window = job.decoder, job.window
        assert window is not None
        job.window = None
        self._deltas += ((item, delta) for delta in decoder.accept(window, token_ends))
        if decoder.finished:
            self._done[item] = None
        else:
            self._waiting.append(item)
            job.reading = self._submit(decoder.reader.read_ahead, decoder.seek)

    # ── failures and results ──

    def _run(self, run: Callable[[Sequence[W]], None], windows: list[W]) -> None:
        def failed(windows: Sequence[W], failure: OnequeueError) -> None:
            if len(windows) == 1:
                self._fail(_item(windows[0]), failure)

        run_in_halves(windows, run, failed, lambda window: window.item not in self._done)

    def _fail(self, item: WorkItem, error: BaseException) -> None:
        """Drop an item whose own work raised."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        id, cause = item.owner.request_id, failure.__cause__ or failure
        log.warning("transcription failed id=%s error=%.200r", id, cause)
        error.with_traceback(None)
        self._done[item] = failure
        if (window := self.jobs[item].window) is not None:
            self.runner.remove(window)

    def _release(self, item: WorkItem) -> None:
        job = self.jobs.pop(item)
        if job.window is not None:
            self.runner.remove(job.window)
        if item in self._waiting:
            self._waiting.remove(item)
        with suppress(RuntimeError):  # the engine is closed
            self._readers.submit(job.decoder.reader.close)

    def _outcome(self, generated: int) -> StepOutcome[TranscriptDelta]:
        for item in self._done:
            self._release(item)
        failed = {item for item, error in self._done.items() if error}
        running = len(self.runner.running)
        report = StepReport(
            decode_tokens=generated,
            admitted=len(self._waits),
            running=running,
            waiting=len(self._waiting),
            total_s=self._spent_s(),
            waits_s=tuple(self._waits),
        )
        deltas = [(item, delta) for item, delta in self._deltas if item not in failed]
        return StepOutcome(report, deltas, done=list(self._done.items()))


def _item(window: W) -> WorkItem:
    assert window.item is not None
    return window.item
