"""The speech engine: windows of many recordings, one step at a time.

    drop who left → windows that are read join, or all that run say a token → judge those that ended

Implements worker.messages.protocol.Engine. A step is one batch through the encoder or one token of
every window, so that other models have their turns between. Recordings take turns, a window each.
How a window is run is for whisper.py and ctc.py to say; pool threads of the engine read recordings
ahead, and look where words are.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from batching.errors import DeviceLost, OnequeueError
from batching.request_queue import WorkItem
from worker.cores import use_one_core
from worker.error_classification import failure_of, run_in_halves
from worker.messages.protocol import ModelInfo, Pending, StepOutcome, StepReport
from worker.messages.transcription import TranscriptDelta, TranscriptionInput
from worker.speech.work import Align, Audio, Decoder, SpeechRunner, Work

log = logging.getLogger("onequeue.speech")

# Threads that open recordings, which may be slow to begin, and threads that read long ones through
# before their turn, so that others wait for neither.
OPENERS = 4
SCANNERS = 2
# Threads that read ahead, and how long the worker waits for them where nothing else is to be done.
READERS = 2
PATIENCE_S = 0.005
# Windows that go through the encoder together: on a CPU one after another takes no longer.
ENCODED = {"cpu": 1, "cuda": 8}

# Those of Pending.
Wanted = Callable[[], bool]
Again = Callable[[], None]


class SpeechEngine:
    """`prepare` runs in pool threads, the rest on the worker's."""

    text_model = None

    def __init__(
        self,
        runner: SpeechRunner,
        open_audio: Callable[[TranscriptionInput], Audio],
        read_text: Callable[[TranscriptionInput, Any], Decoder],
        info: ModelInfo,
        example: Callable[[], Any],
        align: Align | None = None,
    ) -> None:
        """`open_audio` opens a recording, `read_text` begins what is said in it: InvalidInput from
        either. `example` is a window to warm up with; without `align`, texts know of themselves
        where their words are."""
        self.runner = runner
        self.info = info
        self._open = open_audio
        self._text = read_text
        self._example = example
        self._align = align
        self._encoded = ENCODED[info.device.split(":")[0]]
        self._pool = ThreadPoolExecutor(READERS, "speech", use_one_core)
        self._openers = ThreadPoolExecutor(OPENERS, "open", use_one_core)
        self._scans = ThreadPoolExecutor(SCANNERS, "scan", use_one_core)
        self.live: dict[WorkItem, Work] = {}
        self._waiting: deque[WorkItem] = deque()  # for a row
        # of the step that is under way
        self._started = 0.0
        self._deltas: list[tuple[WorkItem, TranscriptDelta]] = []
        self._done: dict[WorkItem, Exception | None] = {}
        self._waits: list[float] = []

    # ── in pool threads ──

    def prepare(self, item: WorkItem) -> None:
        """Recordings are opened, and long ones read once, in threads of ours."""
        work: Work | None = item.prepared
        if work is None:
            raise Pending(lambda *then: self._openers.submit(self._begin, item, *then))
        if work.error:
            raise work.error

    def _begin(self, item: WorkItem, wanted: Wanted, again: Again) -> None:
        if not wanted():
            return
        item.prepared, is_short = Work(), True
        with self._reading(item.prepared, wanted) as work:
            work.audio = self._open(item.payload)
            work.text = self._text(item.payload, work.audio)
            is_short = work.audio.measure()
        if is_short:
            again()
        else:
            self._scans.submit(self._scan, work, wanted, again)

    def _scan(self, work: Work, wanted: Wanted, again: Again) -> None:
        with self._reading(work, wanted):
            work.text.frames.scan(wanted)
        again()

    @contextmanager
    def _reading(self, work: Work, wanted: Wanted) -> Iterator[Work]:
        """Work keeps what is raised inside; after that, or if nobody wants it, its recording is
        closed."""
        try:
            yield work
        except BaseException as error:  # a panic in a tokenizer is no Exception
            work.error = error.with_traceback(None)  # its frames hold the item
        if work.audio and (work.error or not wanted()):
            work.audio.close()

    def finish(self, item: WorkItem, raw: Any) -> Any:
        raise NotImplementedError("a step has deltas, no outputs")

    def close(self) -> None:
        for pool in (self._pool, self._openers, self._scans):
            pool.shutdown(wait=False, cancel_futures=True)

    # ── on the worker's thread ──

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.live else None

    def add(self, item: WorkItem) -> None:
        self.live[item] = item.prepared
        self._waiting.append(item)

    def clear(self) -> list[WorkItem]:
        items = list(self.live)
        for item in items:
            self._forget(item)
        return items

    def warm_up(self) -> None:
        """A window, if there is a row for it."""
        if len(self.runner.running) < self.runner.rows:
            self.try_example()

    def try_example(self) -> Any:
        """The example through everything; the window, with what was said in it."""
        window = self._example()
        try:
            self.runner.begin([window])
            if not window.ended:
                self.runner.step([window])
        finally:
            self.runner.leave(window)
        return window

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        self._started = time.monotonic()
        self._deltas, self._done, self._waits = [], {}, []
        self._drop_closed()
        self._take_aligned()
        running, said = self.runner.running, 0
        if joining := self._joining():
            self._guarded(self.runner.begin, joining)
        elif running:
            said = len(running)
            self._guarded(self.runner.step, list(running))
        else:
            self._wait()
        for window in [window for window in running if window.ended]:
            self._judge(window)
        return self._outcome(said)

    def _drop_closed(self) -> None:
        for item in [item for item in self.live if not item.open]:
            self._forget(item)

    def _joining(self) -> list[Any]:
        """Windows whose turn it is, and for which there is a row; they run from now on."""
        room = min(self._encoded, self.runner.rows - len(self.runner.running))
        windows: list[Any] = []
        for item in list(self._waiting):
            if len(windows) >= room:
                break
            if (window := self._next(item)) is not None:
                windows.append(window)
        return windows

    def _next(self, item: WorkItem) -> Any:
        """The item's next window, if it is read."""
        work = self.live[item]
        if work.reading and work.reading.done() and (error := work.reading.exception()):
            self._fail(item, error)
            return None
        if (window := work.text.next()) is None:
            return None
        self._waiting.remove(item)
        if not work.begun:
            work.begun = True
            self._waits.append(self._started - item.accepted_at)
        work.window, window.owner = window, item
        return window

    def _wait(self) -> None:
        """For pool threads: nothing else is to be done."""
        begun: list[Future[Any] | None] = [w.aligning or w.reading for w in self.live.values()]
        wait([future for future in begun if future], PATIENCE_S, FIRST_COMPLETED)

    def _judge(self, window: Any) -> None:
        """It has ended: is it said again, and if not, what does it add?"""
        item: WorkItem = window.owner
        work = self.live[item]
        try:
            if work.text.again(window):
                return
            if self._align and work.text.payload.words:
                work.aligning = self._pool.submit(self._align(window))
            self.runner.leave(window)
            if not work.aligning:
                self._take(item, None)
        except BaseException as error:
            self._fail(item, error)

    def _take_aligned(self) -> None:
        for item, work in list(self.live.items()):
            if (aligning := work.aligning) and aligning.done():
                work.aligning = None
                try:
                    self._take(item, aligning.result())
                except BaseException as error:
                    self._fail(item, error)

    def _take(self, item: WorkItem, times: Sequence[float] | None) -> None:
        """What a window adds, and the recording waits for its next turn."""
        work = self.live[item]
        text, window = work.text, work.window
        work.window = None
        self._deltas += ((item, delta) for delta in text.take(window, times))
        if text.ended:
            self._done[item] = None
        else:
            self._waiting.append(item)
            work.reading = self._pool.submit(text.frames.read, text.seek)

    # ── failures and ends ──

    def _guarded(self, run: Callable[[Sequence[Any]], None], windows: list[Any]) -> None:
        run_in_halves(windows, run, self._forward_failed, self._is_running)

    def _is_running(self, window: Any) -> bool:
        return window.owner not in self._done

    def _forward_failed(self, windows: Sequence[Any], failure: OnequeueError) -> None:
        if len(windows) == 1:
            self._fail(windows[0].owner, failure)

    def _fail(self, item: WorkItem, error: BaseException) -> None:
        """It raised while working on this item alone, which is dropped."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("transcription failed error=%r", failure.__cause__ or failure)
        error.with_traceback(None)
        self._done[item] = failure
        if (window := self.live[item].window) is not None:
            self.runner.leave(window)

    def _forget(self, item: WorkItem) -> None:
        work = self.live.pop(item)
        if work.window is not None:
            self.runner.leave(work.window)
        if item in self._waiting:
            self._waiting.remove(item)
        with suppress(RuntimeError):  # the engine is closed
            self._pool.submit(work.text.frames.close)

    def _outcome(self, said: int) -> StepOutcome:
        for item in self._done:
            self._forget(item)
        failed = {item for item, error in self._done.items() if error}
        running = len(self.runner.running)
        report = StepReport(
            decode_tokens=said,
            admitted=len(self._waits),
            running=running,
            waiting=len(self._waiting),
            saturated=bool(self._waiting) and running == self.runner.rows,
            total_s=time.monotonic() - self._started,
            waits_s=tuple(self._waits),
        )
        deltas = [(item, delta) for item, delta in self._deltas if item not in failed]
        return StepOutcome(report, deltas, done=list(self._done.items()))
