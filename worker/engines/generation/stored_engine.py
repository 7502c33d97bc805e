"""A generation engine whose prefixes outlive it on disk: blocks of keys and values, and states of
recurrent layers.

    a sequence ends ──▶ save: its registered blocks ──▶ writer thread: copied, written
    a prompt's prefix is not in memory ──▶ begin_read: blocks are reserved ──▶ reader thread: filled
        ──▶ step: they are registered, and the waiting sequence finds them in the pool

A block is found by a hash of all contents up to its end, of the client's namespace, and of all that
its bits depend on: the weights, the form of the model, the versions of the code
(model/fingerprint.py). What is read is what would have been computed.

The worker's thread owns this state, and neither reads nor writes files (worker/segment_store.py). A
copy of a block counts if the block is not evicted until its end (BlockPool.describe).
"""

import logging
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from batching.block_pool import BlockPool, BlockTable, Content
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Form, Sequence
from worker.cores import unpin, use_one_core
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem, InputProcessor, Output
from worker.messages.adapters import Adapter
from worker.messages.deltas import DeltaSource
from worker.messages.protocol import StepOutcome, StepReport
from worker.model.fingerprint import weights_digest
from worker.model.paged_runner import PagedRunner
from worker.segment_store import SegmentStore

log = logging.getLogger("onequeue.stored_engine")

# Fewer blocks are computed: a step that runs anyway takes them along.
MIN_BLOCKS = 4
# A segment ends at a multiple of so many blocks, at a checkpoint, or at the end of a sequence, and
# begins at a multiple. Longer ones share less, and more is written twice.
GROUP = 8
# By which the measured time falls with each read that it refuses: so one is tried again.
RETRY_FACTOR = 1.02
MAX_UNWRITTEN = 256  # sequences whose blocks wait to be written; the oldest are dropped
# The lowest priority: the threads use what steps leave idle, and little of a core that steps use.
NICENESS = 19
# The longest waits for a disk: for other processes' segments, for the next segment of a prefix, and
# at the end of the engine.
REFRESH_S, READ_S, FLUSH_S = 1.0, 10.0, 30.0
FAILURE_PAUSE_S = 60.0  # after a failed write, such as to a full disk

Rows = list[Tensor]  # bytes of a cache's tensors, uint8 [blocks or slots, size] each


class StoredSegment(NamedTuple):
    """What is in a segment of the store."""

    key: bytes
    rows: Rows  # of the cache
    numbers: list[int]  # of the blocks, or of the slot
    known: int = 0  # leading blocks that are not to be filled


@dataclass(eq=False, slots=True)
class Reading:
    """Blocks of a prefix, and the states after them, that are filled from disk."""

    sequence: Sequence
    table: BlockTable
    contents: list[Content]  # of the prefix
    segments: list[StoredSegment]
    started_at: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # the blocks may have other contents
    filled: int = 0  # segments


# A sequence whose blocks wait to be copied: the pool, the key of its empty prefix, its contents,
# and its registered blocks with their descriptions.
Unwritten = tuple[BlockPool, bytes, Iterable[Content], list[tuple[int, Any]]]


class StoredEngine(GenerationEngine):
    """`forms`: fingerprints of the forms of the model, added as these are complete. A sequence of
    another form reads and writes nothing."""

    def __init__(
        self,
        runner: PagedRunner,
        input_processor: InputProcessor,
        new_scheduler: Callable[[], ContinuousScheduler],
        speculates: bool,
        store: SegmentStore,
        forms: Mapping[Form, bytes],
    ) -> None:
        super().__init__(runner, input_processor, new_scheduler, speculates)
        self._store, self._forms = store, forms
        self._adapters = WeakKeyDictionary[object, bytes]()  # digests of their weights
        cache, device = runner.cache, runner.language.device
        values = zip(cache.values, cache.layers, strict=True)
        own_values = (value for value, layer in values if not layer.values_in_keys)
        self._blocks, self._states = _rows_of(*cache.keys, *own_values), _rows_of(*cache.states)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read_token_s = 0.0  # the time that reading a token takes; 0: there were no reads
        self._lock = threading.Lock()  # held while blocks are filled or readings cancelled
        self._readings: list[Reading] = []
        self._progress_at = 0.0  # when the reader thread last filled something
        self._unread: list[Reading] = []  # of those, what the thread has not begun
        self._done: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._unwritten = deque[Unwritten](maxlen=MAX_UNWRITTEN)
        self._paused_until = 0.0
        self._disk_counts = Counter[str]()  # fields of the next StepReport
        self._written = self._reported = 0  # bytes in all, and those of them in reports
        self._refresh, self._refreshed_at = threading.Thread(), 0.0
        self._rests = False  # until a read ends: the last step had nothing to do
        self._reads, self._reader = _start("kv-reader")
        self._writes, self._writer = _start("kv-writer")
        self._use_scheduler()

    def _use_scheduler(self) -> None:
        self.scheduler.begin_read, self.scheduler.save = self.begin_read, self.save

    # ── hooks of the engine ──

    def prepare(self, item: GenerationItem) -> None:
        """Learn meanwhile what other processes have written. A disk that hangs delays no later
        item."""
        if not self._refresh.is_alive():
            refresh = threading.Thread(target=self._store.refresh, daemon=True)
            refresh.start()
            self._refresh, self._refreshed_at = refresh, time.monotonic()
        super().prepare(item)
        self._refresh.join(max(0.0, self._refreshed_at + REFRESH_S - time.monotonic()))

    def load_adapter(self, adapter: Adapter) -> None:
        super().load_adapter(adapter)
        weights: Any = adapter.weights
        pairs = ((name, (pair.down, pair.up)) for name, pair in weights.pairs.items())
        parts = {f"{name}.{n}": part for name, pair in pairs for n, part in enumerate(pair)}
        self._adapters[weights] = weights_digest(parts)

    def _new_sequence(self, output: Output) -> Sequence:
        sequence, namespace = super()._new_sequence(output), output.request.cache_namespace
        if form := self._forms.get(sequence.form):
            adapter = sequence.adapter and self._adapters[sequence.adapter]
            parts, secret = repr((form, adapter, namespace)).encode(), self._store.secret
            sequence.disk_key = blake2b(parts, digest_size=16, key=secret).digest()
        return sequence

    def add(self, item: GenerationItem) -> None:
        self._rests = False
        super().add(item)

    def due_at(self, idle_since: float) -> float | None:
        return self._progress_at + READ_S if self._rests else super().due_at(idle_since)

    def step(  # type: ignore[override]  # none is due while only reads are left
        self, idle_since: float = 0.0
    ) -> StepOutcome[DeltaSource] | None:
        if not self._finish_reads() and self._rests:
            return None
        outcome = super().step(idle_since)
        report, encoder = outcome.report, self._encoder_scheduler
        assert isinstance(report, StepReport)
        is_idle = not (report.prefill_tokens or report.decode_tokens or outcome.done)
        is_reading = any(not reading.cancelled for reading in self._readings)
        others_wait = self._in_flight or self.scheduler.running
        is_encoding = encoder and encoder.waiting(self.scheduler)
        self._rests = is_idle and is_reading and not (others_wait or is_encoding)
        return outcome

    def _report(self) -> StepReport:
        written = self._written
        self._disk_counts["written_bytes"], self._reported = written - self._reported, written
        self._counts += self._disk_counts
        self._disk_counts.clear()
        return super()._report()

    def clear(self) -> list[WorkItem]:
        self._rests = False
        for reading in self._readings:
            self._cancel(reading)
        items = super().clear()
        self._use_scheduler()
        return items

    def flush(self) -> None:
        for sequence in chain(*self.live.values()):
            self.save(self.scheduler.pool, sequence)
        self._reads.put(None)
        self._writes.put(self._write)
        self._writes.put(None)
        self._writer.join(FLUSH_S)
        if self._writer.is_alive():
            log.warning("KV_CACHE_DIR: not all is written after %.0f s", FLUSH_S)

    # ── reading ──

    def begin_read(
        self, pool: BlockPool, sequence: Sequence, matched: list[int], reserve: int
    ) -> bool:
        """Begin to read the blocks of a prefix after the `matched` ones, if they are on disk and
        that takes less time than to compute them. The sequence waits until the end. One that could
        not run, with `reserve` blocks left to others, takes none from those that do."""
        size, first, contents = pool.block_size, len(matched), sequence.contents
        full, needed = (len(contents) - 1) // size, pool.blocks_for(len(contents)) - first
        is_stuck = any(reading.cancelled for reading in self._readings)
        if full - first < MIN_BLOCKS or needed + reserve > pool.free or is_stuck:
            return False
        ends = self._stored_ends(_chain(sequence.disk_key, contents, size), first, full, pool)
        if (end := max(ends, default=0)) - first < MIN_BLOCKS:
            return False
        if self._read_token_s > self.times.token_s > 0:
            self._read_token_s /= RETRY_FACTOR
            return False
        prefix, checkpoints = [*contents[: end * size]], (end * size,) if pool.states else ()
        reserve += needed - (end - first)
        table = pool.open(prefix, matched, reserve, sequence.cache_namespace, checkpoints)
        if table is None:
            return False
        segments, start = list[StoredSegment](), first // GROUP * GROUP
        for stop in sorted(stop for stop in ends if stop == end or stop % GROUP == 0):
            blocks = [*table.blocks[start:stop]]
            segments.append(StoredSegment(ends[stop], self._blocks, blocks, max(0, first - start)))
            start = stop
        for state in pool.plan_states(table, end * size):
            segments.append(StoredSegment(_state_key(ends[end]), self._states, [state.target]))
        if self._stream:  # a step in flight may still write to blocks that were freed
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if not self._readings:
            self._progress_at = time.monotonic()
        reading = Reading(sequence, table, prefix, segments)
        sequence.reading = True
        self._readings.append(reading)
        self._unread.append(reading)
        self._reads.put(self._read)
        return True

    def _stored_ends(
        self, keys: Iterator[bytes], first: int, full: int, pool: BlockPool
    ) -> dict[int, bytes]:
        """Return the ends of a prefix's segments, in blocks, with their keys: full ones after
        `first` up to that of the longest prefix on disk, and shorter ones."""
        ends: dict[int, bytes] = {}
        for number, key in enumerate(islice(keys, full), 1):
            if number > first and key in self._store:
                ends[number] = key
            elif number > first and number % GROUP == 0:
                break
        if pool.states:
            resumable = [end for end, key in ends.items() if _state_key(key) in self._store]
            ends = {end: key for end, key in ends.items() if end <= max(resumable, default=0)}
        return ends

    def _read(self) -> None:
        """Read the shortest prefix of those that wait: it would also be computed the soonest."""
        reading = min(self._unread, key=lambda reading: len(reading.segments))
        self._unread.remove(reading)
        try:
            self._fill(reading)
        except BaseException:
            reading.sequence.disk_key = b""
            raise
        finally:
            self._done.put(reading)
            self.others.wake()
        self._store.use(segment.key for segment in reading.segments)

    def _fill(self, reading: Reading) -> None:
        """Fill blocks and states, as far as they are whole on disk."""
        buffer, started_at = self._new_buffer(), time.monotonic()
        for key, rows, numbers, known in reading.segments:
            size = _size_of(rows)
            if not self._store.read(key, buffer[: len(numbers) * size].numpy().data):
                return
            with self._lock:
                if reading.cancelled:
                    return
                self._copy(rows, numbers[known:], buffer[known * size :], fills=True)
            reading.filled += 1
            self._progress_at = time.monotonic()
        known = reading.table.registered * self.scheduler.pool.block_size
        token_s = (time.monotonic() - started_at) / (len(reading.contents) - known)
        self._read_token_s = (token_s + (self._read_token_s or token_s)) / 2

    def _finish_reads(self) -> bool:
        """Register the blocks of finished reads; give up the others, if the disk hangs. Return
        whether there are any."""
        now, pool, ended = time.monotonic(), self.scheduler.pool, False
        while not self._done.empty():
            reading = self._done.get()
            self._readings.remove(reading)
            if reading.cancelled:
                continue
            table, seconds, ended = reading.table, now - reading.started_at, True
            filled = reading.segments[: reading.filled]
            blocks = sum(len(s.numbers) - s.known for s in filled if s.rows is self._blocks)
            tokens, end = blocks * pool.block_size, table.registered + blocks
            if len(filled) == len(reading.segments):
                pool.commit_states(table, len(reading.contents))
                read_bytes = sum(len(s.numbers) * _size_of(s.rows) for s in filled)
                saved_ms = max(0, int(1000 * (tokens * self.times.token_s - seconds)))
                self._disk_counts.update(
                    read_tokens=tokens, read_bytes=read_bytes, saved_ms=saved_ms
                )
            pool.register(table, reading.contents, end * pool.block_size)
            pool.close(table)
            reading.sequence.reading = False
            if output := self._outputs.get(reading.sequence):
                output.item.read_s = seconds
        for reading in self._readings:
            if now >= self._progress_at + READ_S and not reading.cancelled:
                log.warning("KV_CACHE_DIR: a read got nothing for %.0f s", READ_S)
                self._cancel(reading)
                pool.close(reading.table)
                ended = True
        return ended

    def _cancel(self, reading: Reading) -> None:
        with self._lock:
            reading.cancelled, reading.sequence.reading = True, False

    # ── writing ──

    def save(self, pool: BlockPool, sequence: Sequence) -> None:
        """Have the registered blocks of a sequence written that are not on disk."""
        table, root = sequence.table, sequence.disk_key
        if not root or not table or table.registered < MIN_BLOCKS:
            return
        blocks = [(block, pool.describe(block)) for block in table.blocks[: table.registered]]
        self._unwritten.append((pool, root, sequence.contents, blocks))
        if time.monotonic() >= self._paused_until:
            self._writes.put(self._write)

    def _write(self) -> None:
        """Write the blocks of all sequences that wait."""
        self._store.refresh()
        self._store.measure()
        while self._unwritten:
            unwritten = self._unwritten.popleft()
            try:
                self._write_segments(unwritten)
            except OSError as error:
                self._unwritten.appendleft(unwritten)
                self._paused_until = time.monotonic() + FAILURE_PAUSE_S
                log.warning("KV_CACHE_DIR is not written for %.0f s: %s", FAILURE_PAUSE_S, error)
                return

    def _write_segments(self, unwritten: Unwritten) -> None:
        """Write copies of blocks and states that are not on disk, but those whose memory has other
        contents by now."""
        pool, root, contents, blocks = unwritten
        buffer, start, keys = self._new_buffer(), 0, list[bytes]()
        for stop, key in enumerate(islice(_chain(root, contents, pool.block_size), len(blocks)), 1):
            _, checkpoint = blocks[stop - 1][1] or (0, None)
            if stop % GROUP and stop < len(blocks) and not checkpoint:
                continue
            group = blocks[start:stop]
            segments = [StoredSegment(key, self._blocks, [number for number, _ in group])]
            if checkpoint:
                segments.append(StoredSegment(_state_key(key), self._states, [checkpoint[0]]))
            for own, rows, numbers, _ in segments:
                keys.append(own)
                if own in self._store:
                    continue
                data = buffer[: len(numbers) * _size_of(rows)]
                self._copy(rows, numbers, data, fills=False)
                parts = 2 if rows is self._states else 1
                held = [(pool.describe(number) or ())[:parts] for number, _ in group]
                was = [(description or (0,))[:parts] for _, description in group]
                if pool is self.scheduler.pool and held == was:
                    self._store.write(own, data.numpy().data)
                    self._written += len(data)
            start = stop // GROUP * GROUP
        self._store.use(keys)

    def _new_buffer(self) -> Tensor:
        """Return memory of the host for a segment; of a GPU's, that it copies directly."""
        size = max(GROUP * _size_of(self._blocks), _size_of(self._states))
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _copy(self, rows: Rows, numbers: list[int], buffer: Tensor, fills: bool) -> None:
        """Copy rows of the cache to a buffer, or `fills` them from it; on a GPU beside its steps.
        Wait for the end."""
        sizes = [row.shape[1] for row in rows]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for number, content in zip(numbers, torch.split(buffer, sum(sizes)), strict=False):
                for row, part in zip(rows, torch.split(content, sizes), strict=True):
                    target, source = (row[number], part) if fills else (part, row[number])
                    target.copy_(source, non_blocking=True)
        if self._stream:
            self._stream.synchronize()


def _start(name: str) -> tuple["queue.SimpleQueue[Callable[[], object] | None]", threading.Thread]:
    """Return a queue of functions and the thread of the lowest priority that runs them, until None.
    It is a daemon: a disk that hangs does not block the exit."""
    functions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def run() -> None:
        unpin()
        use_one_core()
        if sys.platform == "linux":  # there a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while function := functions.get():
            try:
                function()
            except Exception:
                log.exception("KV_CACHE_DIR: a part of the cache is lost")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return functions, thread


def _chain(root: bytes, contents: Iterable[Content], block_size: int) -> Iterator[bytes]:
    """Yield the keys of blocks: each hashes all contents up to the block's end."""
    key, left = root, iter(contents)
    while own := [*islice(left, block_size)]:
        key = blake2b(key + repr(own).encode(), digest_size=16).digest()
        yield key


def _state_key(key: bytes) -> bytes:
    """Return the key of the states after a block."""
    return blake2b(key, digest_size=16, person=b"states").digest()


def _rows_of(*tensors: Tensor) -> Rows:
    """Return the bytes of tensors by their first dimension, without a copy."""
    return [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def _size_of(rows: Rows) -> int:
    return sum(row.shape[1] for row in rows)
