"""Static batches: generation for models that do not run on paged memory.

    admit → forward (model/cached_runner.py) → sample → accept (text, ends) → report

Implements worker.protocol.Generator as engine.py does, with the same draws and texts. Each step
gives every running row a token. Nobody joins a batch that has begun; rows that end, or whose client
has gone, leave it at once. Rows in the background begin when no others wait and no batch runs; one
of them at a time is not made to wait.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from batching.errors import DeviceLost, ItemFailed, OutOfMemory
from batching.request_queue import WorkItem
from batching.tokens import Tokens
from worker.deltas import Delta
from worker.failures import failure_of
from worker.generation.output import SequenceOutput
from worker.generation.text_side import TextSide, collect
from worker.grammar.bitmask import Masks
from worker.model.cached_runner import Past, Stepwise
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.sampler import SampledToken, sample
from worker.protocol import StepOutcome, StepReport

log = logging.getLogger("onequeue.static")

# Rows a batch begins with, and prompt tokens, padding included, unless a single row has more.
ROWS = 16
PREFILL = {"cpu": 4096, "cuda": 32768}
# While so many batches run, no other begins: who comes later is not kept waiting by one long
# answer, and a step is not made of many small forwards.
SIDE_BY_SIDE = 2


@dataclass(slots=True, eq=False)
class Row:
    """One choice on its way."""

    choice: SequenceOutput
    tokens: Tokens
    scores: list[SampledToken]  # of the prompt's tokens but the first; shared by an item's choices
    admitted: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    rows: list[Row]
    past: Past | None = None  # what has been through all but the rows' last tokens; None: nothing


@dataclass(slots=True)
class _Counts:
    """What happened in one step."""

    prefill: int = 0
    decode: int = 0
    preempted: int = 0
    waits_s: list[float] = field(default_factory=list)
    said: list[tuple[SequenceOutput, Delta | None]] = field(default_factory=list)
    failed: dict[WorkItem, Exception] = field(default_factory=dict)


class StaticGenerator(TextSide):
    """`prepare`, `encode`, `decode` and `token` run in pool threads, the rest on the worker's."""

    compile_state: Literal["running", "done", "off"] = "off"

    def __init__(self, language: LanguageModel, options: GeneratorOptions, why: str) -> None:
        limit = min(options.max_model_len or language.context, language.context)
        super().__init__(language, limit, "static", why)
        self.stepwise = Stepwise(language)
        self._masks = Masks(language.vocab_size, self.prompts.eos_ids)
        self.live: dict[WorkItem, list[Row]] = {}  # all choices of those that are not done
        self.waiting: deque[Row] = deque()  # in order of arrival
        self.background: deque[Row] = deque()  # likewise, after all others
        self.favoured: Row | None = None  # the background one that counts as one of the others
        self.batches: list[Batch] = []
        self.most = self.room = options.max_running  # rows that may run; less when memory was short

    def add(self, item: WorkItem) -> None:
        scores: list[SampledToken] = []
        made = [Row(choice, Tokens(choice.prepared.ids), scores) for choice in item.prepared]
        self.live[item] = made
        line = self.background if item.payload.background else self.waiting
        line += made

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def clear(self) -> list[WorkItem]:
        items = list(self.live)
        self.live.clear()
        self.waiting.clear()
        self.background.clear()
        self.batches = []
        self.favoured, self.room = None, self.most
        return items

    def warm_up(self) -> None:
        """Two steps beside whatever runs."""
        _, past = self.stepwise.forward([[0, 0]], None)
        logits, _ = self.stepwise.forward([[0, 0, 0]], past)
        if not bool(logits.isfinite().all()):
            raise ItemFailed("the model's output is no number")

    def step(self) -> StepOutcome:
        counts = _Counts()
        try:
            return self._step(counts, time.monotonic())
        except BaseException:
            for item in counts.failed:  # it has not been told: for `clear` to find
                self.live.setdefault(item, [])
            raise

    def _step(self, counts: _Counts, started: float) -> StepOutcome:
        for item in [item for item in self.live if not item.open]:
            del self.live[item]
        self._sweep()
        self._admit(counts, started)
        for batch in list(self.batches):
            self._run(batch, counts)
        deltas, done = collect(self.live, counts.said, counts.failed)
        self._sweep()
        return StepOutcome(self._report(counts, started), deltas, done)

    # ── which rows run ──

    @property
    def running(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)

    def _alive(self, row: Row) -> bool:
        return row.choice.item in self.live and not row.choice.ended

    def _sweep(self) -> None:
        """Let go of rows that have ended or whose item has gone."""
        self.waiting = deque(row for row in self.waiting if self._alive(row))
        self.background = deque(row for row in self.background if self._alive(row))
        for batch in self.batches:
            self._shrink(batch)
        left = [batch for batch in self.batches if batch.rows]
        if len(left) < len(self.batches):
            self.room = min(self.most, 2 * self.room)
        self.batches = left

    def _shrink(self, batch: Batch) -> None:
        kept = [at for at, row in enumerate(batch.rows) if self._alive(row)]
        if 0 < len(kept) < len(batch.rows) and batch.past:
            batch.past = self.stepwise.keep(batch.past, kept)
        batch.rows = [batch.rows[at] for at in kept]

    def _admit(self, counts: _Counts, now: float) -> None:
        if self.background and not (self.favoured and self._alive(self.favoured)):
            self.favoured = self.background.popleft()
            self.waiting.appendleft(self.favoured)
        if len(self.batches) >= SIDE_BY_SIDE:
            return
        idle = not self.batches and all(row is self.favoured for row in self.waiting)
        rows: list[Row] = []
        room = min(ROWS, self.room - self.running)
        longest, most = 0, PREFILL[self.language.device.type]
        while len(rows) < room and (line := self.waiting or (idle and self.background)):
            longest = max(longest, len(line[0].tokens))
            if rows and longest * (len(rows) + 1) > most:
                break
            row = line.popleft()
            rows.append(row)
            if not row.admitted:
                row.admitted = True
                counts.waits_s.append(now - row.choice.item.accepted_at)
        self.batches += map(Batch, self._grouped(rows))

    def _grouped(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Rows that the model can run as one."""
        groups: dict[int, list[Row]] = {}
        for number, row in enumerate(rows):
            ways = {"padded": 0, "same length": len(row.tokens), "single": number}
            groups.setdefault(ways[self.stepwise.batching], []).append(row)
        yield from groups.values()

    # ── a batch's step ──

    def _run(self, batch: Batch, counts: _Counts) -> None:
        """A step; one that raises is halved until only the guilty rows fail. The parts begin anew,
        from their tokens."""
        self._shrink(batch)
        if not batch.rows:
            return
        try:
            self._advance(batch, counts)
            return
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            batch.past = None  # the parts begin anew
            failure = failure_of(error)
            if isinstance(failure, DeviceLost):
                raise
            if isinstance(failure, OutOfMemory) and self.running > 1:
                self._give_way(batch, counts)
                parts = [batch]
            elif len(batch.rows) > 1:
                middle = len(batch.rows) // 2
                parts = [batch, Batch(batch.rows[middle:])]
                batch.rows = batch.rows[:middle]
                self.batches.append(parts[1])
            else:
                self._fail(batch.rows[0], error, counts)
                return
        for part in parts:
            self._run(part, counts)

    def _give_way(self, batch: Batch, counts: _Counts) -> None:
        """Memory is short: half of the batch, or all of it if others run, waits until it is not."""
        self.room = self.running // 2
        kept = len(batch.rows) // 2 if len(self.batches) == 1 else 0
        counts.preempted += len(batch.rows) - kept
        for row in reversed(batch.rows[kept:]):
            behind = row.choice.item.payload.background and row is not self.favoured
            (self.background if behind else self.waiting).appendleft(row)
        batch.rows = batch.rows[:kept]
        if not kept:
            self.batches.remove(batch)

    def _advance(self, batch: Batch, counts: _Counts) -> None:
        if fresh := batch.past is None:
            self._score_prompts(batch, counts)
            self._shrink(batch)
            if not batch.rows:
                return
        guides = [(at, row.choice.guide) for at, row in enumerate(batch.rows) if row.choice.guide]
        masked = [(at, mask) for at, guide in guides if (mask := guide.mask()) is not None]
        allowed = self._masks.begin(masked)
        past, batch.past = batch.past, None  # in doubt until all went well
        logits, past = self.stepwise.forward([row.tokens for row in batch.rows], past)
        drawn = sample(
            logits, [row.choice.row() for row in batch.rows], allowed.result() if allowed else None
        )
        batch.past = past
        for row, sampled in zip(batch.rows, drawn, strict=True):
            if fresh and (self.stepwise.caches or not row.choice.begun):
                counts.prefill += len(row.tokens)
            self._accept(row, sampled, counts)

    def _score_prompts(self, batch: Batch, counts: _Counts) -> None:
        for row in batch.rows:
            prepared = row.choice.prepared
            if prepared.wants_prompt_logprobs and not row.scores and not row.choice.begun:
                row.scores += self.stepwise.scores(prepared.ids, prepared.params.logprobs or 0)
                counts.prefill += len(prepared.ids)
        for row in batch.rows:
            if not row.choice.prepared.max_tokens:
                self._accept(row, None, counts)

    def _accept(self, row: Row, sampled: SampledToken | None, counts: _Counts) -> None:
        """A token joins the row's output; None: only its prompt was asked for."""
        choice = row.choice
        if choice.item in counts.failed:
            return
        try:
            if (sampled and sampled.token < 0) or any(score.token < 0 for score in row.scores):
                raise ItemFailed("the model's output for this input is no number")
            if not choice.begun:
                choice.score_prompt(row.scores)
                choice.begin(0)
                row.scores = []
            if sampled is not None:
                row.tokens.output.append(sampled.token)
                choice.push(sampled)
                counts.decode += 1
            counts.said.append((choice, choice.take()))
        except BaseException as error:
            self._fail(row, error, counts)

    def _fail(self, row: Row, error: BaseException, counts: _Counts) -> None:
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("generation failed error=%r", error)
        error.with_traceback(None)
        counts.failed[row.choice.item] = failure
        self.live.pop(row.choice.item, None)

    def _report(self, counts: _Counts, started: float) -> StepReport:
        return StepReport(
            prefill_tokens=counts.prefill,
            decode_tokens=counts.decode,
            preempted=counts.preempted,
            admitted=len(counts.waits_s),
            running=self.running,
            waiting=len(self.waiting) + len(self.background),
            starved=bool(self.waiting),
            total_s=time.monotonic() - started,
            waits_s=tuple(counts.waits_s),
        )
