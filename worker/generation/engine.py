"""The generation engine: continuous batching over paged memory, one packed step at a time.

    schedule → forward → sample → accept (text, ends) → report

Implements worker.protocol.Generator on transformers' modelling code. Which sequences run is
decided in batching/scheduler.py; where keys and values are kept, in model/paged_attention.py;
models that cannot run like this are served by static.py.
"""

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from batching.block_pool import BlockPool
from batching.errors import DeviceLost, ItemFailed
from batching.request_queue import WorkItem
from batching.scheduler import Chunk, ContinuousScheduler
from batching.scheduler import Sequence as Running
from worker.deltas import Delta
from worker.failures import failure_of
from worker.generation.ngram_drafter import NgramDrafter
from worker.generation.output import SequenceOutput
from worker.generation.prefill_budget import PrefillBudget
from worker.generation.text_side import TextSide, collect
from worker.grammar.bitmask import MaskRequest, Masks
from worker.model import cpu_linear, memory
from worker.model.attention_interface import CannotPage
from worker.model.cuda_graphs import SIZES, SPARE, DecodeGraphs, decode_graphs
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.loading import LoadingFailed
from worker.model.paged_attention import BLOCK, PagedCache, Step
from worker.model.sampler import Row, SampledToken, prompt_logprobs, sample
from worker.model.self_check import TOLERANCE
from worker.protocol import Generator, StepOutcome, StepReport

log = logging.getLogger("onequeue.generation")

# A decode step costs about the same for so many rows: drafts are free up to here.
FREE_ROWS = {"cpu": 8, "cuda": 64}
# COMPILE=auto leaves models with fewer parameters alone: a minute's work for little.
WORTH_COMPILING = 10_000_000


@dataclass(slots=True, eq=False)
class Generation:
    """One choice on its way: the scheduler's sequence and the text side of it."""

    choice: SequenceOutput
    lookup: NgramDrafter | None
    sequence: Running = field(init=False)
    scheduled: bool = False


@dataclass(slots=True)
class _Counts:
    """What happened in one step."""

    prefill: int = 0
    decode: int = 0
    drafted: int = 0
    accepted: int = 0
    said: list[tuple[SequenceOutput, Delta | None]] = field(default_factory=list)
    failed: dict[WorkItem, Exception] = field(default_factory=dict)


class PagedGenerator(TextSide):
    """`prepare`, `encode`, `decode` and `token` run in pool threads, the rest on the worker's."""

    def __init__(
        self, language: LanguageModel, cache: PagedCache, blocks: int, options: GeneratorOptions,
        max_model_len: int,
    ) -> None:  # fmt: skip
        super().__init__(language, max_model_len, "continuous")
        self.cache = cache
        self.speculates = options.speculation == "auto"
        self.compile_state: Literal["running", "done", "off"] = "off"
        share = memory.prefix_share(language.device, options.kv_cache_gb)
        self.pool = BlockPool(blocks, BLOCK, share)
        self.scheduler = ContinuousScheduler(self.pool, options.max_running)
        self.live: dict[WorkItem, list[Generation]] = {}  # choices that have not ended
        self._pace = PrefillBudget(language.device.type)
        self._free_rows = FREE_ROWS[language.device.type]
        self._masks = Masks(language.vocab_size, self.prompts.eos_ids)
        self._graphs = self._capture()

    def compile(self) -> None:
        """Begin; `compile_state` tells when it is done."""
        from worker.model.compiling import compile_in_background  # seconds to import

        def done(compiled: bool) -> None:
            self.compile_state = "done" if compiled else "off"

        self.compile_state = "running"
        compile_in_background(self.language, done)

    def _capture(self) -> DecodeGraphs | None:
        longest = min(self.pool.count, -(-self.max_model_len // BLOCK))
        most = min(self.scheduler.max_running, SIZES[-1])
        return decode_graphs(self.language, self.cache, self.pool.count, longest, most)

    def add(self, item: WorkItem) -> None:
        made = [self._generation(choice) for choice in item.prepared]
        self.live[item] = made
        for generation in made:
            self.scheduler.add(generation.sequence)
            generation.scheduled = True

    def _generation(self, choice: SequenceOutput) -> Generation:
        made = Generation(choice, NgramDrafter() if self.speculates else None)
        prepared, background = choice.prepared, choice.item.payload.background
        reuse = not prepared.wants_prompt_logprobs
        made.sequence = Running(made, prepared.ids, reuse, background)
        return made

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def clear(self) -> list[WorkItem]:
        """What was scheduled, and how, may be what is wrong: nothing of it is kept."""
        items = list(self.live)
        self.live.clear()
        self.pool = BlockPool(self.pool.count, BLOCK)
        self.scheduler = ContinuousScheduler(self.pool, self.scheduler.max_running)
        return items

    def warm_up(self) -> None:
        """A step of two tokens through everything, in a block of its own if one is free."""
        table = self.pool.open([0, 0], [])
        if table is None:
            return  # everything is taken by sequences that are running well
        try:
            step = Step(self.cache, [(table.blocks, 0, 2)], self.language.dtype)
            logits = self.language.forward(step, [0, 0], [1])
            if not bool(logits.isfinite().all()):
                raise ItemFailed("the model's output is no number")
        finally:
            self.pool.close(table)

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
            self._drop(item)
        if self._graphs and self._graphs.call is not self.language.call:
            self._graphs = None  # their memory is needed
            self._graphs = self._capture()  # of the model that is compiled now
        streaming = any(s.computed + 1 >= len(s.tokens) for s in self.scheduler.running)
        draft = partial(self._draft, counts)
        chunks = self.scheduler.schedule(self._pace.prompt_tokens(streaming), draft)
        for item in counts.failed:
            self._drop(item)
        if chunks:
            self._run(chunks, counts)
            rows = sum(chunk.width for chunk in chunks)
            self._pace.learn(counts.prefill, rows - counts.prefill, time.monotonic() - started)
        deltas, done = collect(self.live, counts.said, counts.failed)
        return StepOutcome(self._report(counts, started), deltas, done)

    def _draft(self, counts: _Counts, sequence: Running) -> tuple[int, ...]:
        generation: Generation = sequence.owner
        share = self._free_rows // max(1, len(self.scheduler.running)) - 1
        if generation.lookup is None or share < 1:
            return ()
        choice = generation.choice
        most = min(share, choice.prepared.max_tokens - choice.count - 1)
        try:
            draft = generation.lookup.draft(sequence.tokens, most)
            return choice.guide.draft(draft, most) if choice.guide else draft
        except BaseException as error:
            self._blame(choice.item, error, counts)
            return ()

    def _run(self, chunks: list[Chunk], counts: _Counts) -> None:
        """A step; one that raises is halved until only the guilty sequences fail."""
        chunks = [c for c in chunks if c.sequence.owner.choice.item not in counts.failed]
        if not chunks:
            return
        try:
            scores, sampled = self._forward(chunks)
        except BaseException as error:
            if len(chunks) == 1:
                self._fail(chunks[0], error, counts)
                return
            traceback.clear_frames(error.__traceback__)
            if isinstance(failure_of(error), DeviceLost):
                raise
        else:
            self._accept(chunks, scores, sampled, counts)
            return
        middle = len(chunks) // 2
        self._run(chunks[:middle], counts)
        self._run(chunks[middle:], counts)

    def _forward(
        self, chunks: Sequence[Chunk]
    ) -> tuple[list[list[SampledToken]], list[SampledToken]]:
        """The prompt tokens that each chunk scores, and all draws; changes nothing but memory."""
        ids: list[int] = []
        wanted: list[int] = []  # rows whose logits are needed: prompts' first, then draws'
        scored = [self._unscored(chunk) for chunk in chunks]
        for chunk, positions in zip(chunks, scored, strict=True):
            wanted += [len(ids) + position - chunk.start for position in positions]
            ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
            ids += chunk.drafts
        scores_end = len(wanted)
        rows: list[Row] = []
        masked: list[tuple[int, MaskRequest]] = []
        row = 0
        for chunk in chunks:
            choice: SequenceOutput = chunk.sequence.owner.choice
            row += chunk.width
            if chunk.reaches_end and choice.prepared.max_tokens:
                drafts = len(chunk.drafts)
                wanted += range(row - 1 - drafts, row)
                if choice.guide and (mask := choice.guide.mask(chunk.drafts)):
                    masked.append((len(rows), mask))
                rows += [choice.row(chunk.drafts[:n]) for n in range(drafts + 1)]
        allowed = self._masks.begin(masked)
        tables = [
            (chunk.sequence.table.blocks if chunk.sequence.table else [], chunk.start, chunk.width)
            for chunk in chunks
        ]
        if self._graphs and self._graphs.takes(tables):
            logits = self._graphs.forward(tables, ids, wanted)
        else:
            step = Step(self.cache, tables, self.language.dtype)
            logits = self.language.forward(step, ids, wanted)
        scores = []
        row = 0
        for chunk, positions in zip(chunks, scored, strict=True):
            targets = [chunk.sequence.tokens[position + 1] for position in positions]
            top = chunk.sequence.owner.choice.prepared.params.logprobs or 0
            scores.append(prompt_logprobs(logits[row : row + len(targets)], targets, top))
            row += len(targets)
        return scores, sample(logits[scores_end:], rows, allowed.result() if allowed else None)

    def _unscored(self, chunk: Chunk) -> range:
        """Positions in the chunk whose output says how likely the prompt's next token was; not
        those that ran before the sequence was put back."""
        generation: Generation = chunk.sequence.owner
        if not generation.choice.prepared.wants_prompt_logprobs or generation.choice.begun:
            return range(0)
        known = generation.choice.scored
        last = chunk.sequence.prompt_len - 1
        return range(max(chunk.start, known), min(chunk.start + chunk.count, last))

    def _accept(
        self,
        chunks: Sequence[Chunk],
        scores: Sequence[Sequence[SampledToken]],
        sampled: Sequence[SampledToken],
        counts: _Counts,
    ) -> None:
        draws = iter(sampled)
        for chunk, scored in zip(chunks, scores, strict=True):
            generation: Generation = chunk.sequence.owner
            choice = generation.choice
            drawn = chunk.reaches_end and choice.prepared.max_tokens
            own = [next(draws) for _ in range(1 + len(chunk.drafts) if drawn else 0)]
            if choice.item in counts.failed:
                continue  # another of its choices is broken
            prompt = chunk.count > 1 or chunk.start < chunk.sequence.prompt_len
            counts.prefill += chunk.count if prompt else 0
            try:
                if (own and own[0].token < 0) or any(score.token < 0 for score in scored):
                    raise ItemFailed("the model's output for this input is no number")
                choice.score_prompt(scored)
                if chunk.reaches_end:
                    self._go_on(generation, chunk, own, counts)
                else:
                    self.scheduler.advance(chunk)
            except BaseException as error:
                self._fail(chunk, error, counts)

    def _go_on(
        self, generation: Generation, chunk: Chunk, own: Sequence[SampledToken], counts: _Counts
    ) -> None:
        """Drafts that the draws agree with, and one token after them, join the output."""
        choice, sequence = generation.choice, chunk.sequence
        if not choice.begun:
            choice.begin(sequence.cached or 0)
        taken: list[int] = []
        for position, drawn in enumerate(own):
            if choice.ended or drawn.token < 0:
                break
            choice.push(drawn)
            taken.append(drawn.token)
            if position < len(chunk.drafts) and drawn.token != chunk.drafts[position]:
                break
            if choice.guide and choice.guide.turned:
                break
        counts.decode += len(taken)
        if chunk.drafts and generation.lookup:
            agreed = max(0, len(taken) - 1)
            counts.drafted += len(chunk.drafts)
            counts.accepted += agreed
            generation.lookup.verified(len(chunk.drafts), agreed)
        self.scheduler.advance(chunk, taken)
        if choice.ended:
            self._unschedule(generation)
        counts.said.append((choice, choice.take()))

    def _fail(self, chunk: Chunk, error: BaseException, counts: _Counts) -> None:
        """The item is broken: nobody shall take its prefix from the cache."""
        item = chunk.sequence.owner.choice.item
        self._blame(item, error, counts)
        self._drop(item, broken=True)

    def _blame(self, item: WorkItem, error: BaseException, counts: _Counts) -> None:
        """Something raised while working on this item alone."""
        traceback.clear_frames(error.__traceback__)  # they hold what a forward had allocated
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        log.warning("generation failed error=%r", error)
        error.with_traceback(None)
        counts.failed[item] = failure

    def _drop(self, item: WorkItem, broken: bool = False) -> None:
        for generation in self.live.get(item, []):
            if broken and generation.sequence.table:
                self.pool.forget(generation.sequence.table)
            if generation.scheduled:
                self._unschedule(generation)
        self.live.pop(item, None)

    def _unschedule(self, generation: Generation) -> None:
        self.scheduler.remove(generation.sequence)
        generation.scheduled = False

    def _report(self, counts: _Counts, started: float) -> StepReport:
        scheduler = self.scheduler
        now = time.monotonic()
        new = scheduler.admitted
        return StepReport(
            prefill_tokens=counts.prefill,
            decode_tokens=counts.decode,
            cached_tokens=sum(sequence.cached or 0 for sequence in new),
            drafted=counts.drafted,
            accepted=counts.accepted,
            preempted=scheduler.preempted,
            admitted=len(new),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            starved=scheduler.starved,
            blocks_used=self.pool.used,
            blocks_total=self.pool.count,
            total_s=now - started,
            waits_s=tuple(started - s.owner.choice.item.accepted_at for s in new),
        )


def load_generator(options: GeneratorOptions) -> Generator:
    """The continuous engine, or static batches of the model's own code where it does not fit."""
    language = load_language_model(options)
    refused = None
    try:
        language.page()
    except CannotPage as error:
        refused = str(error)
        log.warning("static batches: %s", refused)
    _lay_out(language, options, paged=refused is None)
    language.reference = [], []  # as large as the vocabulary, and no longer needed
    if refused is not None:
        from worker.generation.static import StaticGenerator

        return StaticGenerator(language, options, refused)
    wanted = min(options.max_model_len or language.context, language.context)
    blocks = memory.cache_blocks(
        language.layers,
        language.dtype,
        language.device,
        options.kv_cache_gb,
        options.max_running * wanted,
    )
    max_model_len = min(wanted, blocks * BLOCK)
    if options.max_model_len and max_model_len < options.max_model_len:
        raise LoadingFailed(
            f"MAX_MODEL_LEN={options.max_model_len}: the model takes {language.context} tokens "
            f"and the memory for keys and values holds {blocks * BLOCK}"
        )
    cache = PagedCache(language.layers, blocks + SPARE, language.dtype, language.device)
    log.info("cache blocks=%d tokens=%d context=%d", blocks, blocks * BLOCK, max_model_len)
    generator = PagedGenerator(language, cache, blocks, options, max_model_len)
    big = language.parameters >= WORTH_COMPILING
    if options.compile == "on" or (options.compile == "auto" and big):
        generator.compile()
    return generator


def _lay_out(language: LanguageModel, options: GeneratorOptions, paged: bool) -> None:
    """Weights as this device's kernels want them; without a check only if that is asked for."""
    if options.quantization == "int8":
        if language.device.type != "cpu":
            raise LoadingFailed("QUANTIZATION=int8 is for models on a CPU")
        cpu_linear.quantise(language.model, memory.free_bytes(language.device))
        language.tolerance = TOLERANCE[torch.bfloat16]  # what int8 weights are multiplied by
    elif paged and language.device.type == "cpu" and cpu_linear.packs(language.dtype):
        cpu_linear.pack(language.model, memory.free_bytes(language.device))
        try:
            language.recheck()
        except Exception as error:  # a model that uses weights without calling their layer
            log.info("weights stay as they are: %s", error)
            cpu_linear.unpack(language.model)
    elif (
        language.device.type == "cpu" and cpu_linear.packed_dtype(language.dtype) != language.dtype
    ):
        log.warning("this CPU emulates bfloat16: DTYPE=float32 is faster here")
