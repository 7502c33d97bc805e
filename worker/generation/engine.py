"""The generation engine: continuous batching, one step at a time.

    drop who left → schedule → run → sample → emit (text, ends)

Implements worker.protocol.Generator. batching/scheduler.py decides which sequences run, and a model
runner how: on paged memory (model/paged_runner.py) or, where that does not fit, with the model's
cache (model/cached_runner.py). Requests are read in frontend.py, text is made in output.py.
"""

import logging
import time
from collections import Counter, abc
from collections.abc import Callable
from itertools import chain, islice, zip_longest
from typing import Literal

from torch import Tensor

from batching.draft_budget import DraftBudget
from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory
from batching.prefill_budget import PrefillBudget
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Batch, Chunk, Sequence
from worker.deltas import Delta
from worker.failures import failure_of, run_in_halves
from worker.generation.frontend import Frontend
from worker.generation.ngram_drafter import NgramDrafter
from worker.generation.output import SequenceOutput, sequence_of
from worker.grammar.bitmask import MaskRequest, Masks
from worker.model.cached_runner import CachedRunner
from worker.model.logits_processors import Draw
from worker.model.paged_runner import PagedRunner
from worker.model.sampler import SampledToken, sample
from worker.protocol import StepOutcome, StepReport
from worker.vision.album import Album
from worker.vision.prompt import PicturePrompt
from worker.vision.seeing import Sight
from worker.vision.tower import Tower
from worker.vision.viewing import Viewing

log = logging.getLogger("onequeue.generation")


class GenerationEngine(Frontend):
    """`prepare`, `encode`, `decode` and `token` run in pool threads, the rest on the worker's.
    `new_scheduler` makes one with nothing in it; `why`: why the model is not paged."""

    def __init__(
        self,
        runner: PagedRunner | CachedRunner,
        new_scheduler: Callable[[], ContinuousScheduler],
        speculates: bool = False,
        why: str = "",
        sight: Sight | None = None,
    ) -> None:
        language, device = runner.language, runner.language.device.type
        super().__init__(language, runner.max_model_len, why, sight)
        self.runner = runner
        self.speculates = speculates
        self.live: dict[WorkItem, list[Sequence]] = {}  # until their end is reported
        self._failed: dict[WorkItem, Exception] = {}  # of them
        self._new_scheduler = new_scheduler
        self.scheduler = new_scheduler()
        self._budget = PrefillBudget(device, self.scheduler.whole_prompts)
        self._drafts = DraftBudget(device)
        self._viewing = self._new_viewing()
        self._masks = Masks(language.vocab_size, self.eos_ids)
        # of the step that is under way
        self._started, self._rows_run, self._viewed_s = 0.0, 0, 0.0
        self._counts: Counter[str] = Counter()  # what StepReport counts
        self._deltas: list[tuple[WorkItem, Delta]] = []

    def _new_viewing(self) -> Viewing | None:
        entrance, sight = self.runner.entrance, self.sight
        if not entrance or not sight:
            return None
        sight.album = Album()
        return Viewing(Tower(entrance, sight.album), self._not_viewed)

    @property
    def compile_state(self) -> Literal["running", "done", "off"]:
        return self.runner.compile_state

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def add(self, item: WorkItem) -> None:
        self.live[item] = [sequence_of(output) for output in item.prepared]
        for sequence in self.live[item]:
            if self.speculates and sequence.max_tokens:
                sequence.drafter = NgramDrafter()
            if sequence.scene and not self._viewing:
                sequence.scene.ready = True  # its pictures run with it
            self.scheduler.add(sequence)

    def clear(self) -> list[WorkItem]:
        """What was scheduled, and how, may be what is wrong: nothing of it is kept."""
        items = list(self.live)
        for sequence in chain(*self.live.values()):
            sequence.table = None
        self.live.clear()
        self._failed.clear()
        self.scheduler = self._new_scheduler()
        self._viewing = self._new_viewing()
        return items

    def warm_up(self) -> None:
        """Two steps of a sequence, in a free block if there is one."""
        sequence, pool = Sequence([0, 0]), self.scheduler.pool
        sequence.table = pool.open(sequence.tokens, [])
        if sequence.table is None:
            return  # everything is taken by sequences that are running well
        try:
            for start, count in ((0, 2), (2, 1)):
                logits = self.runner.forward(Batch.of([Chunk(sequence, start, count)]))
                if not bool(logits.isfinite().all()):
                    raise ItemFailed("the model's output is no number")
                sequence.tokens.append(0)
        finally:
            pool.close(sequence.table)

    # ── a step ──

    def step(self) -> StepOutcome:
        self._started, self._rows_run, self._viewed_s = time.monotonic(), 0, 0.0
        self._counts, self._deltas = Counter(), []
        self._drop_closed()
        streaming = any(sequence.left <= 1 for sequence in self.scheduler.running)
        if self._viewing:
            self._viewing.turn(self.scheduler, streaming)
            self._viewed_s = time.monotonic() - self._started
        self._drafts.begin(len(self.scheduler.running))
        budget = self._budget.prompt_tokens(streaming, self._viewed_s)
        chunks = self.scheduler.schedule(budget, self._draft if self.speculates else None)
        if chunks := list(filter(self._is_running, chunks)):
            run_in_halves(chunks, self._run, self._forward_failed, self._is_running)
        return self._outcome()

    def _drop_closed(self) -> None:
        for item in [item for item in self.live if not item.open]:
            self._unschedule(item)
            del self.live[item]

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        if sequence.drafter is None:
            return ()
        output: SequenceOutput = sequence.output
        most = min(self._drafts.room(), sequence.max_tokens - output.count - 1)
        worth = self._drafts.worth(sequence.drafter.acceptance, most)
        try:
            drafts: tuple[int, ...] = sequence.drafter.draft(sequence.tokens, worth)
            drafts = output.guide.draft(drafts, most) if output.guide else drafts
            self._drafts.take(len(drafts))
            return drafts
        except BaseException as error:
            self._fail(output.item, error)
            return ()

    def _run(self, chunks: abc.Sequence[Chunk]) -> None:
        """Through the model, and on with what it gives; raises before anything has changed."""
        batch = Batch.of(chunks)
        draws: list[Draw] = []
        masks: list[tuple[int, MaskRequest]] = []  # with the first row that each is for
        for chunk in chunks:
            if count := chunk.to_sample:
                output, drafts = chunk.sequence.output, chunk.drafts
                if output.guide and (mask := output.guide.mask(drafts)):
                    masks.append((len(draws), mask))
                draws += [Draw(output.sampling, output.count + n, drafts[:n]) for n in range(count)]
        allowed = self._masks.begin(masks) if masks else None  # computed while the model runs
        logits = self.runner.forward(batch)
        scores = self._scores(batch, logits) if batch.scored else {}
        sampled = sample(logits[batch.scored :], draws, allowed.result() if allowed else None)
        self._rows_run += len(batch.ids)
        remaining = iter(sampled)
        for chunk in chunks:
            drawn = list(islice(remaining, chunk.to_sample))
            if self._is_running(chunk):  # no other sequence of its request has failed meanwhile
                try:
                    self._advance(chunk, scores.get(chunk.sequence, []), drawn)
                except BaseException as error:
                    self._fail(chunk.sequence.output.item, error)

    def _scores(self, batch: Batch, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
        """How likely prompts' tokens are, or what may follow one, where that is asked."""
        scores, row = {}, 0
        for chunk in batch.chunks:
            if positions := chunk.to_score:
                end = row + len(positions)
                scores[chunk.sequence] = chunk.sequence.output.score(logits[row:end], positions)
                row = end
        return scores

    def _advance(self, chunk: Chunk, scores: list[SampledToken], drawn: list[SampledToken]) -> None:
        sequence, counts = chunk.sequence, self._counts
        output: SequenceOutput = sequence.output
        if (drawn and drawn[0].token < 0) or any(score.token < 0 for score in scores):
            raise ItemFailed("the model's output for this input is no number")
        if chunk.start < sequence.prompt_len or chunk.count > 1:
            counts["prefill_tokens"] += chunk.count
        if scores:
            output.score_prompt(scores)
        if not chunk.reaches_end:
            self.scheduler.advance(chunk)
            return
        if not output.begun:
            output.begin(sequence.cached or 0)
        tokens = self._push(chunk, drawn)
        counts["decode_tokens"] += len(tokens)
        if chunk.drafts:
            accepted = max(0, len(tokens) - 1)
            counts["drafted"] += len(chunk.drafts)
            counts["accepted"] += accepted
            sequence.drafter.verified(len(chunk.drafts), accepted)
        self.scheduler.advance(chunk, tokens)
        if output.ended:
            self.scheduler.remove(sequence)
        self._deltas.append((output.item, output.take()))

    def _push(self, chunk: Chunk, drawn: list[SampledToken]) -> list[int]:
        """Drafts that the model agrees with, and one token after them, join the output."""
        output: SequenceOutput = chunk.sequence.output
        tokens: list[int] = []
        for draft, sampled in zip_longest(chunk.drafts, drawn):
            if output.ended or sampled.token < 0:
                break
            output.push(sampled)
            tokens.append(sampled.token)
            if sampled.token != draft or (output.guide and output.guide.turned):
                break
        return tokens

    # ── failures ──

    def _not_viewed(self, prompt: PicturePrompt, error: BaseException) -> None:
        """A picture of the prompt failed, and what it belongs to."""
        for item, sequences in list(self.live.items()):
            if item not in self._failed and any(each.scene is prompt for each in sequences):
                self._fail(item, error)

    def _is_running(self, chunk: Chunk) -> bool:
        return chunk.sequence.table is not None

    def _forward_failed(self, chunks: abc.Sequence[Chunk], failure: OnequeueError) -> None:
        if isinstance(failure, OutOfMemory) and self.scheduler.give_way():
            return
        if len(chunks) == 1:
            self._fail(chunks[0].sequence.output.item, failure)

    def _fail(self, item: WorkItem, error: BaseException) -> None:
        """It raised while working on this item alone, which is dropped."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("generation failed error=%r", failure.__cause__ or failure)
        error.with_traceback(None)
        self._failed[item] = failure
        self._unschedule(item, broken=True)

    def _unschedule(self, item: WorkItem, broken: bool = False) -> None:
        """`broken`: nobody shall take its prefix from the cache."""
        for sequence in self.live[item]:
            if broken and sequence.table:
                self.scheduler.pool.forget(sequence.table)
            if sequence.number >= 0:
                self.scheduler.remove(sequence)

    # ── what comes of it ──

    def _outcome(self) -> StepOutcome:
        if self._viewing:
            self._viewing.close_those_that_ran(self.scheduler)
        report = self._report()
        if self._rows_run:
            prefill, seconds = report.prefill_tokens, report.total_s - self._viewed_s
            self._budget.learn(prefill, self._rows_run - prefill, seconds)
            self._drafts.learn(prefill, self._rows_run, report.decode_tokens, seconds)
        deltas = [(item, delta) for item, delta in self._deltas if item not in self._failed]
        ending = dict.fromkeys(item for item, delta in deltas if delta.finish_reason)
        ended = [i for i in ending if all(each.output.ended for each in self.live[i])]
        done = [*self._failed.items(), *((item, None) for item in ended)]
        for item, _ in done:
            del self.live[item]
        self._failed.clear()
        return StepOutcome(report, deltas, done)

    def _report(self) -> StepReport:
        scheduler, admitted = self.scheduler, self.scheduler.admitted
        paged = not scheduler.whole_prompts
        return StepReport(
            **self._counts,
            cached_tokens=sum(sequence.cached or 0 for sequence in admitted),
            preempted=scheduler.preempted,
            admitted=len(admitted),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            starved=scheduler.starved,
            blocks_used=scheduler.pool.used if paged else 0,
            blocks_total=scheduler.pool.count if paged else 0,
            total_s=time.monotonic() - self._started,
            waits_s=tuple(self._started - s.output.item.accepted_at for s in admitted),
        )
