"""Prefixes on disk: blocks of keys and values, and states of recurrent layers, that outlive the
model and the process.

    a sequence ends ──▶ save: its registered blocks ──▶ writer thread: copied, written
    a prompt's prefix is not in memory ──▶ begin_read: blocks are reserved ──▶ reader thread: filled
        ──▶ finish_reads: they are registered, and the waiting sequence finds them in the pool

A block is found by a hash of all contents up to its end, of the client's namespace, and of all that
its bits depend on: the weights, the form of the model, the versions of the code
(model/fingerprint.py). What is read is what would have been computed.

The worker's thread owns this state, and neither reads nor writes files. The files are those of
worker/segment_store.py.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batching.block_pool import BlockPool, BlockTable, Content
from batching.sequence import Form, Sequence
from batching.step_times import StepTimes
from batching.stored_blocks import RegisteredBlock, StoredBlockPool
from worker.cores import unpin
from worker.model.attention.kv_cache import KVCache
from worker.model.fingerprint import weights_digest
from worker.segment_store import Buffer, SegmentStore

log = logging.getLogger("onequeue.prefix_store")

# Fewer blocks are computed: a step that runs anyway takes them along.
MIN_BLOCKS = 4
# Of the measured speed, for each read that it refuses: one is tried again after a slow one.
RETRY_FACTOR = 1.02
MAX_WAITING = 256  # chains that wait to be written
# The lowest priority: the threads use what steps leave idle, and little of a core that steps use.
NICENESS = 19
FLUSH_S = 30.0  # the longest wait for a disk when a model is unloaded or the server stops
FAILURE_PAUSE_S = 60.0  # after a failed write, such as to a full disk

Rows = list[NDArray[np.uint8]]  # bytes of a cache's tensors, [blocks or slots, size] each


@dataclass(eq=False, slots=True)
class Reading:
    """Blocks that are filled from disk."""

    sequence: Sequence
    table: BlockTable
    contents: list[Content]  # of the prefix
    keys: list[bytes]  # of the blocks that are filled, then of the states after the last one
    blocks: list[int]
    slots: list[int]  # of the states
    started_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False  # the blocks may have other contents
    count: int = 0  # of the blocks and states, those that are filled


class Unwritten(NamedTuple):
    """Blocks of a prefix that wait to be copied."""

    pool: StoredBlockPool
    blocks: list[RegisteredBlock]
    keys: Iterator[bytes]
    epoch: int


class PrefixStore:
    """The prefixes of one model. `fingerprint`: of all that the bits of its cache depend on, but
    the form of the model."""

    def __init__(self, store: SegmentStore, cache: KVCache, fingerprint: bytes) -> None:
        self._store, self._fingerprint = store, fingerprint
        # Of each form's logits, once the form is complete. A form that is not known stores nothing.
        self.form_digests: dict[Form, bytes] = {}
        self._times = StepTimes()  # of the engine, as the next
        self._wake: Callable[[], None] = lambda: None
        values = [
            v
            for v, layer in zip(cache.values, cache.layers, strict=True)
            if not layer.values_in_keys
        ]
        self._block_rows = _rows_of(*cache.keys, *values)
        self._state_rows = _rows_of(*cache.states)
        self._block_bytes: int = sum(rows.shape[1] for rows in self._block_rows)
        self._state_bytes: int = sum(rows.shape[1] for rows in self._state_rows)
        self._adapters = WeakKeyDictionary[object, bytes]()
        self._bytes_per_s = 0.0  # of reads; 0: there were none
        self._readings: set[Reading] = set()
        self._unread: list[Reading] = []  # of those, what the thread has not begun
        self._done: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._epoch = 0  # the blocks' contents are others in the next one
        self._unwritten: deque[Unwritten] = deque()
        self._paused_until = 0.0
        self._counts = Counter[str]()  # fields of StepReport, since they were last taken
        self._unsettled: list[tuple[int, float]] = []  # tokens that were read, in so many seconds
        self._written = self._reported = 0  # bytes in all, and those of them that were taken
        self._reader, self._writer = _Thread("kv-reader"), _Thread("kv-writer")

    def start(self, times: StepTimes, wake: Callable[[], None]) -> None:
        """Set the engine's step times, and the function that wakes the worker's thread after a
        read."""
        self._times, self._wake = times, wake

    @property
    def is_reading(self) -> bool:
        return bool(self._readings)

    def key_of(self, namespace: bytes, form: Form, adapter: object) -> bytes:
        """Return the key of an empty prefix: in a client's namespace, on a form of the model, with
        the weights of an adapter. Empty: nothing is stored."""
        form_digest = self.form_digests.get(form)
        if form_digest is None:
            return b""
        parts = self._fingerprint, form_digest, adapter and self._adapters[adapter], namespace
        return blake2b(repr(parts).encode(), digest_size=16, key=self._store.secret).digest()

    def add_adapter(self, weights: Any) -> None:
        """Learn which keys and values the LoraWeights of an adapter give. On the loader thread."""
        pairs = weights.pairs.items()
        parts = {
            name + end: part
            for name, pair in pairs
            for end, part in (("down", pair.down), ("up", pair.up))
        }
        self._adapters[weights] = weights_digest(parts)

    def refresh(self) -> None:
        """Learn what other processes have written. In a pool thread."""
        self._store.refresh()

    # ── reading ──

    def begin_read(
        self, pool: BlockPool, sequence: Sequence, matched: list[int], reserve: int
    ) -> bool:
        """Begin to read the blocks of a prefix after the `matched` ones, if they are on disk and
        that takes less time than to compute them. The sequence waits until the end. One that could
        not run, with `reserve` blocks left to others, takes none from those that do."""
        size, first = pool.block_size, len(matched)
        contents = sequence.contents
        needed = pool.blocks_for(len(contents)) - first + reserve
        if (len(contents) - 1) // size - first < MIN_BLOCKS or needed > pool.free:
            return False
        keys: list[bytes] = []
        for key in _chain(sequence.disk_key, contents, (len(contents) - 1) // size, size):
            if len(keys) >= first and key not in self._store:
                break
            keys.append(key)
        states: list[bytes] = []
        if pool.states:
            while len(keys) > first and _state_key(keys[-1]) not in self._store:
                keys.pop()
            states = [_state_key(key) for key in keys[-1:]]
        if (end := len(keys)) - first < MIN_BLOCKS:
            return False
        compute_s = (end - first) * size * self._times.token_s
        read_bytes = (end - first) * self._block_bytes + len(states) * self._state_bytes
        if self._bytes_per_s and compute_s and self._bytes_per_s * compute_s < read_bytes:
            self._bytes_per_s *= RETRY_FACTOR
            return False
        tokens, namespace = end * size, sequence.cache_namespace
        prefix = [*contents[:tokens]]
        checkpoints = (tokens,) if states else ()
        table = pool.open(prefix, matched, needed - (end - first), namespace, checkpoints)
        if table is None:
            return False
        slots = [segment.target for segment in pool.plan_states(table, tokens)]
        wanted, blocks = keys[first:] + states, [*table.blocks[first:]]
        reading = Reading(sequence, table, prefix, wanted, blocks, slots)
        sequence.reading = True
        self._readings.add(reading)
        self._unread.append(reading)
        self._reader.submit(self._read)
        return True

    def _read(self) -> None:
        """Read the shortest prefix of those that wait: it would also be computed the soonest."""
        reading = min(self._unread, key=self._bytes_of)
        self._unread.remove(reading)
        try:
            self._fill(reading)
        finally:
            self._done.put(reading)
            self._wake()
        self._store.use(reading.keys)

    def _fill(self, reading: Reading) -> None:
        """Fill as many blocks and states as are whole on disk."""
        started_at = time.monotonic()
        targets = [(self._block_rows, block) for block in reading.blocks]
        targets += [(self._state_rows, slot) for slot in reading.slots]
        for data, (rows, number) in zip(self._store.read(reading.keys), targets, strict=False):
            with reading.lock:
                if reading.cancelled:
                    return
                _scatter(np.frombuffer(data, np.uint8), rows, number)
            reading.count += 1
        if reading.count == len(targets):
            rate = self._bytes_of(reading) / (time.monotonic() - started_at)
            self._bytes_per_s = (self._bytes_per_s + rate) / 2 if self._bytes_per_s else rate

    def _bytes_of(self, reading: Reading) -> int:
        return len(reading.blocks) * self._block_bytes + len(reading.slots) * self._state_bytes

    def finish_reads(self, pool: BlockPool) -> list[tuple[Sequence, float]]:
        """Register the blocks of finished reads. Return their sequences, and the seconds that each
        has waited."""
        finished = []
        while not self._done.empty():
            reading = self._done.get()
            if reading.cancelled:
                continue
            self._readings.remove(reading)
            seconds = time.monotonic() - reading.started_at
            table, sequence = reading.table, reading.sequence
            if reading.count == len(reading.keys):
                pool.commit_states(table, len(reading.contents))
                self._counts["read_tokens"] += len(reading.blocks) * pool.block_size
                self._counts["read_bytes"] += self._bytes_of(reading)
                self._unsettled.append((len(reading.blocks) * pool.block_size, seconds))
            else:
                sequence.disk_key = b""  # the rest is computed
            blocks = table.registered + min(reading.count, len(reading.blocks))
            pool.register(table, reading.contents, blocks * pool.block_size)
            pool.close(table)
            sequence.reading = False
            finished.append((sequence, seconds))
        return finished

    def take_counts(self) -> Counter[str]:
        """Return what has been counted since the last call."""
        counts, self._counts = self._counts, Counter()
        if token_s := self._times.token_s:  # known from the first prompt on
            for tokens, seconds in self._unsettled:
                counts["saved_ms"] += max(0, int(1000 * (tokens * token_s - seconds)))
            self._unsettled.clear()
        written = self._written
        counts["written_bytes"], self._reported = written - self._reported, written
        return counts

    def cancel(self) -> None:
        """Leave all blocks: another pool gives them other contents."""
        self._epoch += 1
        for reading in self._readings:
            with reading.lock:
                reading.cancelled = True
            reading.sequence.reading = False
        self._readings.clear()

    # ── writing ──

    def save(self, pool: BlockPool, sequence: Sequence) -> None:
        """Have the registered blocks of a sequence written that are not on disk."""
        assert isinstance(pool, StoredBlockPool)
        if not sequence.disk_key or time.monotonic() < self._paused_until:
            return
        contents = sequence.contents
        numbers, _ = pool.match(contents, sequence.cache_namespace)
        if len(numbers) < MIN_BLOCKS or len(self._unwritten) >= MAX_WAITING:
            return
        keys = _chain(sequence.disk_key, contents, len(numbers), pool.block_size)
        self._unwritten.append(Unwritten(pool, pool.contents_of(numbers), keys, self._epoch))
        self._writer.submit(self._write)

    def _write(self) -> None:
        """Write all chains that wait, in as few segments as they fill."""
        chains = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
        if not chains or time.monotonic() < self._paused_until:
            return
        self._store.refresh()
        keys = [[*unwritten.keys] for unwritten in chains]
        most = sum(key not in self._store for key in chain(*keys))
        most += sum(block.checkpoint is not None for block in chain(*(c.blocks for c in chains)))
        seen: set[bytes] = set()
        copies = (self._copies(*parts, seen) for parts in zip(chains, keys, strict=True))
        try:
            self._written += self._store.write(chain.from_iterable(copies), most)
        except OSError as error:
            self._paused_until = time.monotonic() + FAILURE_PAUSE_S
            log.warning("KV_CACHE_DIR is not written for %.0f s: %s", FAILURE_PAUSE_S, error)
        for own in keys:
            self._store.use(own)

    def _copies(
        self, unwritten: Unwritten, keys: list[bytes], seen: set[bytes]
    ) -> Iterator[tuple[bytes, Buffer]]:
        """Yield copies of blocks and states that are not on disk or `seen`, each valid until the
        next one. A chain ends where memory has other contents by now."""
        pool, copy = unwritten.pool, np.empty(max(self._block_bytes, self._state_bytes), np.uint8)

        def is_new(key: bytes) -> bool:
            return key not in self._store and key not in seen

        for key, block in zip(keys, unwritten.blocks, strict=True):
            if is_new(key):
                data = _gather(self._block_rows, block.number, copy)
                if self._epoch != unwritten.epoch or not pool.holds(block):
                    return
                seen.add(key)
                yield key, data
            if block.checkpoint and is_new(state_key := _state_key(key)):
                data = _gather(self._state_rows, block.checkpoint[0], copy)
                if self._epoch != unwritten.epoch or not pool.holds(block):
                    return
                if pool.holds_states(block):
                    seen.add(state_key)
                    yield state_key, data

    def close(self) -> None:
        """Write what was saved, and end the threads."""
        self._reader.close(0.0)
        if not self._writer.close(FLUSH_S):
            log.warning("KV_CACHE_DIR: not all is written after %.0f s", FLUSH_S)


class _Thread:
    """A daemon thread of low priority, which starts with its first function. A disk that hangs
    does not block the exit."""

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, function: Callable[[], object]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._inbox.put(function)

    def close(self, limit_s: float) -> bool:
        """Let the thread end after what was submitted. Return whether it has, within a limit."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        unpin()
        if sys.platform == "linux":  # there a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while function := self._inbox.get():
            try:
                function()
            except Exception:
                log.exception("KV_CACHE_DIR: a part of the cache is lost")
            del function  # it holds the cache


def _chain(
    root: bytes, contents: Iterable[Content], blocks: int, block_size: int
) -> Iterator[bytes]:
    """Yield the keys of the first blocks: each hashes all contents up to the block's end."""
    key, left = root, iter(contents)
    for _ in range(blocks):
        own = repr([*islice(left, block_size)]).encode()
        key = blake2b(key + own, digest_size=16).digest()
        yield key


def _state_key(key: bytes) -> bytes:
    """Return the key of the states after a block."""
    return blake2b(key, digest_size=16, person=b"states").digest()


def _rows_of(*tensors: Tensor) -> Rows:
    """Return the bytes of tensors on a CPU by their first dimension, without a copy."""
    flat = (tensor.flatten(1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel())
    return [*flat]


def _gather(rows: Rows, number: int, copy: NDArray[np.uint8]) -> Buffer:
    end = 0
    for row in rows:
        start, end = end, end + row.shape[1]
        copy[start:end] = row[number]
    return copy[:end].data


def _scatter(data: NDArray[np.uint8], rows: Rows, number: int) -> None:
    end = 0
    for row in rows:
        start, end = end, end + row.shape[1]
        row[number] = data[start:end]
