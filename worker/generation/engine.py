"""The requests that a generation engine has in hand, and how they go unfinished.

Each is a work item with its sequences, which the scheduler has as long as they are not over. What
runs them, step by step, is engine.py. On the worker's thread.

The generation engine: continuous batching, one step ahead where the device runs by itself.

    drop who left → schedule → launch step N ──────▶ draw N
                                    └─ land N - 1: text, stops, ends, while N runs

A step's tokens are not read before the next one is launched, which takes them on the device: the
sequences were promised them. Who turns out to have ended with step N - 1 has no part in what N
gives. One that the next one's drafts wait for lands at once, as all do on a CPU.

Implements Generator of worker.messages.protocol. batching/scheduler.py decides which sequences run,
and a model runner how: on paged memory (model/paged_runner.py) or, where that does not fit, with
the model's cache (model/cached_runner.py). Requests are read in input_processor.py, text is made
in output.py.
"""

import logging
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from torch import Tensor

from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler, PrefillBudget
from batching.sequence import Batch, Chunk, Sequence
from worker.error_classification import failure_of, run_halves
from worker.generation.input_processor import InputProcessor
from worker.generation.output import SequenceOutput, sequence_of
from worker.generation.speculation import NgramDrafter, Speculation
from worker.grammar.bitmask import BitmaskComputer, MaskRequest, PendingMask
from worker.messages.deltas import Delta
from worker.messages.protocol import StepOutcome, StepReport
from worker.model.cached_runner import CachedRunner
from worker.model.paged_runner import PagedRunner
from worker.model.sampler import SampledToken, SamplerOutput, SamplingRow, sample
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.encoder_scheduler import EncoderScheduler
from worker.vision.image_preprocessor import ImagePreprocessor
from worker.vision.multimodal_prompt import MultimodalPrompt

log = logging.getLogger("onequeue.generation")


class Requests:
    """A part of the GenerationEngine. `new_scheduler` makes one with nothing in it."""

    def __init__(self, new_scheduler: Callable[[], ContinuousScheduler]) -> None:
        self.live: dict[WorkItem, list[Sequence]] = {}  # until their end is reported
        self.failed: dict[WorkItem, Exception] = {}  # of them
        self.scheduler = new_scheduler()
        self._new_scheduler = new_scheduler

    def drop(self, item: WorkItem) -> None:
        """Nobody waits for it any more."""
        self._unschedule(item)
        del self.live[item]

    def drop_all(self) -> list[WorkItem]:
        """What was scheduled, and how, may be what is wrong: nothing of it is kept."""
        items = list(self.live)
        for sequence in chain(*self.live.values()):
            sequence.table = None
        self.live.clear()
        self.failed.clear()
        self.scheduler = self._new_scheduler()
        return items

    def fail(self, item: WorkItem, error: BaseException) -> None:
        """It raised while working on this item alone, which is dropped."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("generation failed error=%r", failure.__cause__ or failure)
        error.with_traceback(None)
        self.failed[item] = failure
        self._unschedule(item, broken=True)

    def fail_chunks(self, chunks: abc.Sequence[Chunk], failure: OnequeueError) -> None:
        """They raised together: one alone is guilty, unless there is memory to be had."""
        if isinstance(failure, OutOfMemory) and self.scheduler.give_way():
            return
        if len(chunks) == 1 and chunks[0].runs:
            self.fail(chunks[0].sequence.output.item, failure)

    def fail_multimodal(self, prompt: MultimodalPrompt, error: BaseException) -> None:
        """A picture of the prompt failed, and what it belongs to."""
        for item, sequences in list(self.live.items()):
            if item not in self.failed and any(each.multimodal is prompt for each in sequences):
                self.fail(item, error)

    def _unschedule(self, item: WorkItem, broken: bool = False) -> None:
        """`broken`: nobody shall take its prefix from the cache."""
        for sequence in self.live[item]:
            if broken and sequence.table:
                self.scheduler.pool.forget(sequence.table)
            if sequence.number >= 0:
                self.scheduler.remove(sequence)


AHEAD = {"cpu": False, "cuda": True}  # whether a step is launched before the last has landed


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is launched: its draws are made, none of them is read. `sampled` is to be told to
    whoever still runs then."""

    batch: Batch
    scores: dict[Sequence, list[SampledToken]]  # of prompts
    sampled: SamplerOutput
    launched_at: float


class GenerationEngine(Requests, InputProcessor):
    """`prepare`, `encode`, `decode` and `token` run in pool threads, the rest on the worker's.
    `why`: why the model is not paged."""

    def __init__(
        self,
        runner: PagedRunner | CachedRunner,
        new_scheduler: Callable[[], ContinuousScheduler],
        speculates: bool = False,
        why: str = "",
        image_preprocessor: ImagePreprocessor | None = None,
    ) -> None:
        language, device = runner.language, runner.language.device.type
        Requests.__init__(self, new_scheduler)
        InputProcessor.__init__(self, language, runner.max_model_len, why, image_preprocessor)
        self.runner = runner
        self.speculates = speculates
        self._ahead = AHEAD[device]
        self._budget = PrefillBudget(device, self.scheduler.whole_prompts)
        self._drafts = Speculation(device)
        self._encoder_scheduler = self._new_encoder_scheduler()
        self._masks = BitmaskComputer(language.vocab_size, self.eos_ids)
        self._flight: InFlightStep | None = None
        self._started = self._landed_at = 0.0
        # of the call of `step` that is under way
        self._counts: Counter[str] = Counter()  # what StepReport counts
        self._deltas: list[tuple[WorkItem, Delta]] = []

    def _new_encoder_scheduler(self) -> EncoderScheduler | None:
        entrance, image_preprocessor = self.runner.decoder_hook, self.image_preprocessor
        if not entrance or not image_preprocessor:
            return None
        image_preprocessor.cache = EncoderCache()
        return EncoderScheduler(
            VisionEncoder(entrance, image_preprocessor.cache), self.fail_multimodal
        )

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
            if sequence.multimodal and not self._encoder_scheduler:
                sequence.multimodal.ready = True  # its pictures run with it
            self.scheduler.add(sequence)

    def clear(self) -> list[WorkItem]:
        self._flight = None
        self._encoder_scheduler = self._new_encoder_scheduler()
        return self.drop_all()

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
        self._started = time.monotonic()
        self._counts, self._deltas = Counter(), []
        for item in [item for item in self.live if not item.open]:
            self.drop(item)
        if chunks := self._schedule():
            self._launch(chunks)
        else:
            self._land()
        return self._outcome()

    def _schedule(self) -> list[Chunk]:
        left = [sequence.left for sequence in self.scheduler.running]
        streaming, budget = min(left, default=2) <= 1, 0
        if self._encoder_scheduler:
            self._encoder_scheduler.step(self.scheduler, streaming)
        if self.speculates:
            self._drafts.begin(len(self.scheduler.running))
        if self.scheduler.waiting or max(left, default=0) > 1:
            budget = self._budget.prompt_tokens(streaming, time.monotonic() - self._started)
        chunks = self.scheduler.schedule(budget, self._draft if self.speculates else None)
        return [chunk for chunk in chunks if chunk.runs]

    def _launch(self, chunks: abc.Sequence[Chunk]) -> None:
        try:
            self._run(chunks)
        except BaseException as error:
            self._land()  # or this raises: what was promised never comes, which is all that runs
            run_halves(error, chunks, self._run, self.fail_chunks, lambda chunk: chunk.runs)

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        try:
            return self._drafts.draft(sequence)
        except BaseException as error:
            self.fail(sequence.output.item, error)
            return ()

    def _run(self, chunks: abc.Sequence[Chunk]) -> None:
        """Through the model; raises before anything of theirs has changed. Draws may depend on what
        the step before gave: it lands first, while the model runs."""
        batch, last, launched_at = Batch.of(chunks), self._flight, time.monotonic()
        draws, masks = ([], None) if last else self._draws_of(chunks)
        if last and not self.runner.idempotent:
            last.sampled.resample()
        logits = self.runner.forward(batch, last.sampled.tokens if last else None)
        if last:
            if last.sampled.resample():  # other tokens than it was launched with
                logits = self.runner.forward(batch, last.sampled.tokens)
            self._land()
            draws, masks = self._draws_of(chunks)
        scores = scores_of(batch, logits) if batch.scored else {}
        sampled = sample(logits[batch.scored :], draws, masks.result() if masks else None)
        flies = self._ahead and not (self.speculates and any(map(self._drafts.waits_for, chunks)))
        self._flight = InFlightStep(batch, scores, sampled, launched_at)
        if flies:
            self.scheduler.promise(chunks)
        else:
            self._land()

    def _draws_of(
        self, chunks: abc.Sequence[Chunk]
    ) -> tuple[list[SamplingRow], PendingMask | None]:
        """What decides the tokens of the chunks' rows, by all that came before; masks are computed
        from here on. What a row that nobody waits for gives does not count."""
        draws: list[SamplingRow] = []
        requests: list[tuple[int, MaskRequest]] = []  # with the first row that each is for
        for chunk in chunks:
            if count := chunk.to_sample:
                output, drafts = chunk.sequence.output, chunk.drafts
                if output.guide and chunk.runs and (request := output.guide.mask(drafts)):
                    requests.append((len(draws), request))
                draws += [
                    SamplingRow(output.sampling, output.count + n, drafts[:n]) for n in range(count)
                ]
        return draws, self._masks.begin(requests) if requests else None

    def _land(self) -> None:
        """The last step's tokens are read, and become text."""
        if (flight := self._flight) is None:
            return
        remaining = iter(flight.sampled.read())
        self._flight = None
        counted, self._counts = self._counts, Counter()
        for chunk in flight.batch.chunks:
            drawn = list(islice(remaining, chunk.to_sample))
            if chunk.runs:  # it is not over, and no other sequence of its request has failed
                try:
                    self._advance(chunk, flight.scores.get(chunk.sequence, []), drawn)
                except BaseException as error:
                    self.fail(chunk.sequence.output.item, error)
        began, self._landed_at = max(flight.launched_at, self._landed_at), time.monotonic()
        seconds = self._landed_at - began
        rows = len(flight.batch.ids)
        prefill = sum(chunk.count for chunk in flight.batch.chunks if chunk.prefills)
        if prefill:
            self._budget.learn(prefill, rows - prefill, seconds)
        else:
            self._budget.decode_s = seconds
            if self.speculates:
                self._drafts.learn(rows, self._counts["decode_tokens"], seconds)
        self._counts += counted

    def _advance(self, chunk: Chunk, scores: list[SampledToken], drawn: list[SampledToken]) -> None:
        sequence, counts = chunk.sequence, self._counts
        output: SequenceOutput = sequence.output
        if (drawn and drawn[0].token < 0) or any(score.token < 0 for score in scores):
            raise ItemFailed("the model's output for this input is no number")
        if chunk.prefills:
            counts["prefill_tokens"] += chunk.count
        if scores:
            output.score_prompt(scores)
        if not chunk.reaches_end:
            self.scheduler.advance(chunk)
            return
        if not output.begun:
            output.begin(sequence.cached or 0)
        tokens = output.extend(chunk.drafts, drawn) if drawn else []
        counts["decode_tokens"] += len(tokens)
        if chunk.drafts:
            counts.update(self._drafts.verified(chunk, len(tokens)))
        self.scheduler.advance(chunk, tokens)
        if output.ended:
            self.scheduler.remove(sequence)
        self._deltas.append((output.item, output.take()))

    # ── what comes of it ──

    def _outcome(self) -> StepOutcome:
        if self._encoder_scheduler:
            self._encoder_scheduler.release_prefilled(self.scheduler)
        report = self._report()
        deltas = [(item, delta) for item, delta in self._deltas if item not in self.failed]
        ending = dict.fromkeys(item for item, delta in deltas if delta.finish_reason)
        ended = ((i, None) for i in ending if all(each.output.ended for each in self.live[i]))
        done = [*self.failed.items(), *ended]
        for item, _ in done:
            del self.live[item]
        self.failed.clear()
        if not self.live:
            self._flight = None  # nobody waits for what it gives
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


def scores_of(batch: Batch, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
    """How likely prompts' tokens are, or what may follow one, where that is asked: read at once."""
    scores, row = {}, 0
    for chunk in batch.chunks:
        if positions := chunk.to_score:
            end = row + len(positions)
            scores[chunk.sequence] = chunk.sequence.output.score(logits[row:end], positions)
            row = end
    return scores
