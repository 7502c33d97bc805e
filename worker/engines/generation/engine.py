"""The generation engine: continuous batching, on a GPU one step ahead of the results.

    drop cancelled requests → schedule → launch step N → sample step N's tokens
                                            └▶ process the results of step N - 1 while N runs

On a GPU a step's tokens are not read before the next one is launched, which takes them on the
device: the sequences have placeholders for them. Sequences that finished in step N - 1 are dropped
from step N's results. A step is read at once on a CPU, and where the next drafts of most sequences
need its tokens. Masks of grammars are computed while a step runs, from the tokens before it.

Implements Generator of worker/messages/protocol.py. batching/scheduler.py decides which sequences
run, and a model runner how: on paged memory (model/paged_runner.py) or, where that does not fit,
with the model's own cache (cached_runner.py). input_processor.py prepares requests, output.py
turns tokens into text, most of it on the event loop, when it is read.
"""

import logging
import time
from collections import Counter, abc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory
from batching.fair_share import WorkOwner, in_turn
from batching.request_queue import WorkItem
from batching.scheduler import ContinuousScheduler
from batching.sequence import Batch, Chunk, Form, Sequence
from batching.step_times import PrefillBudget, StepTimes
from worker.engines.generation.input_processor import GenerationItem, InputProcessor, Output
from worker.engines.generation.output import SequenceOutput
from worker.engines.generation.speculation import Speculation
from worker.engines.pipeline.yield_points import YieldPoints
from worker.error_classification import failure_of, run_in_halves
from worker.messages.adapters import Adapter, InvalidAdapter
from worker.messages.deltas import MAX_UNREAD, DeltaSource
from worker.messages.generation import SamplingDefaults
from worker.messages.protocol import (
    ALONE,
    Fallback,
    OtherModels,
    StepOutcome,
    StepReport,
    TextModel,
)
from worker.model.paged_runner import PagedRunner
from worker.model.sampler import SampledToken, SamplerOutput, SamplingInputs, SamplingRow, sample

if TYPE_CHECKING:
    from worker.backends.cached_runner import CachedRunner
    from worker.grammar.bitmask import PendingMask
    from worker.grammar.compiler import Grammar
    from worker.grammar.constraints import ConstraintState
    from worker.model.sampler import TokenMask
    from worker.vision.encoder_scheduler import EncoderScheduler
    from worker.vision.multimodal_prompt import MultimodalPrompt

log = logging.getLogger("onequeue.generation")

RUNS_AHEAD = {"cpu": False, "cuda": True}  # a step is launched before the last one is read
# Choices with MAX_UNREAD tokens whose text the event loop writes after a step: those that started
# together have so many together.
MAX_WRITTEN = 16


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step: its tokens are sampled but not read. They are appended to the sequences that
    still run when they are read."""

    batch: Batch
    prompt_scores: dict[Sequence, list[SampledToken]]
    sampled: SamplerOutput
    launched_at: float


class GenerationEngine:
    """Runs a language model step by step, on the worker's thread; `prepare` and `call_id` run in
    other threads. `new_scheduler` creates an empty one. `speculates`: tokens are drafted."""

    others: OtherModels = ALONE

    def __init__(
        self,
        runner: "PagedRunner | CachedRunner",
        input_processor: InputProcessor,
        new_scheduler: Callable[[], ContinuousScheduler],
        speculates: bool = False,
    ) -> None:
        from worker.grammar.bitmask import BitmaskComputer

        device = runner.language.device.type
        self.runner = runner
        self.input_processor = input_processor
        self.scheduler = new_scheduler()
        self.info = input_processor.info
        if not self.scheduler.whole_prompts:
            pool = self.scheduler.pool
            self.info = replace(self.info, cache_blocks=pool.num_blocks, block_size=pool.block_size)
        self.live: dict[WorkItem, list[Sequence]] = {}  # until their end is reported
        self._outputs: dict[Sequence, Output] = {}  # of their sequences
        self._failed: dict[WorkItem, Exception] = {}  # of them, until the step ends
        self._new_scheduler = new_scheduler
        self._may_draft = True  # in the next step: the last one is read before it
        self._budget = PrefillBudget(device, self.scheduler.whole_prompts)
        self.times: StepTimes = self._budget.times
        # prompts that run whole may take long
        self._runs_ahead = RUNS_AHEAD[device] or runner.runs_ahead
        is_paged = isinstance(runner, PagedRunner)
        self._yield_points = None if is_paged else YieldPoints(runner.language.model)
        self._speculation = Speculation(device, self.times) if speculates else None
        self._encoder_scheduler = self._new_encoder_scheduler()
        self._masks = BitmaskComputer(runner.language.vocab_size, input_processor.eos_token_ids)
        self._pending_masks: dict[Sequence, PendingMask] = {}  # until a token is sampled with them
        self._in_flight: InFlightStep | None = None
        # of the last step, unless it has failed: its batch, and its rows with grammars
        self._batch: Batch | None = None
        self._inputs: SamplingInputs
        self._constrained: list[tuple[int, Chunk, ConstraintState]]
        self._results_at = 0.0  # when the last step's results were processed
        self._ran = 0  # sequences in that step
        # of the current call of `step`
        self._step_started = 0.0
        self._counts: Counter[str] = Counter()  # fields of StepReport
        self._deltas: dict[DeltaSource, WorkItem] = {}  # choices with news, each once
        self._full = 0  # choices with MAX_UNREAD tokens or more

    def _new_encoder_scheduler(self) -> "EncoderScheduler | None":
        runner, preprocessor = self.runner, self.input_processor.media_preprocessor
        if not runner.decoder_hook or not preprocessor:
            return None
        return preprocessor.new_scheduler(runner, self._fail_multimodal)

    @property
    def text_model(self) -> TextModel:
        return self.input_processor

    @property
    def defaults(self) -> SamplingDefaults:
        return self.input_processor.defaults

    @property
    def compile_state(self) -> Literal["running", "done", "off"]:
        return self.runner.compile_state

    @property
    def stage(self) -> str:
        return self.runner.stage

    @property
    def fallbacks(self) -> abc.Sequence[Fallback]:
        return self.runner.language.fallbacks

    def flush(self) -> None:
        """Nothing outlives the engine."""

    def prepare(self, item: GenerationItem) -> None:
        self.input_processor.prepare(item)

    def load_adapter(self, adapter: Adapter) -> None:
        """Fill in the weights of an adapter, on the loader thread. Raises InvalidAdapter."""
        from worker.adapter_folder import adapter_folder

        if not isinstance(self.runner, PagedRunner):
            raise InvalidAdapter(f"this model takes no adapters: {self.info.why}")
        adapter.weights = self.runner.load_adapter(adapter_folder(adapter.root, adapter.path))

    def call_id(self, name: str, index: int) -> str:
        return self.input_processor.template.call_id(name, index)

    def close(self) -> None:
        self.input_processor.close()

    # ── requests ──

    def add(self, item: GenerationItem) -> None:
        self.live[item] = [self._new_sequence(output) for output in item.prepared]
        for sequence in self.live[item]:
            self.scheduler.add(sequence)

    def _new_sequence(self, output: Output) -> Sequence:
        prepared, request = output.prepared, output.request
        adapter, namespace = request.adapter, request.cache_namespace
        if adapter:
            namespace += b"adapter%d" % adapter.number
        # The keys of forms differ by rounding too, so none reads the prefixes of another.
        form: Form = ""
        if isinstance(self.runner, PagedRunner) and not self._runs_ahead:
            form = self.runner.form(adapter is not None)
        sequence = Sequence(
            prepared.ids,
            max_tokens=prepared.max_tokens,
            scores_prompt=prepared.prompt_logprobs is not None,
            reads=output.reads,
            priority=output.priority,
            owner=output.item.owner,
            cache_namespace=namespace + form.encode(),
            multimodal=prepared.multimodal,
            form=form,
            adapter=adapter.weights if adapter else None,
            history_len=prepared.history_len,
        )
        self._outputs[sequence] = output
        if self._speculation and sequence.max_tokens:
            self._speculation.add(sequence)
        if sequence.multimodal and not self._encoder_scheduler:
            sequence.multimodal.ready = True  # its images are encoded in its first step
        return sequence

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.live else None

    def clear(self) -> list[WorkItem]:
        """Drop all requests and the scheduler's state, which may be inconsistent."""
        items = list(self.live)
        for sequence in chain(*self.live.values()):
            sequence.table = None
        for item in items:
            self._release(item)
        self._outputs.clear()
        self._failed.clear()
        self._pending_masks.clear()
        self._in_flight = self._batch = None
        self.scheduler = self._new_scheduler()
        self._encoder_scheduler = self._new_encoder_scheduler()
        return items

    def finish(self, item: WorkItem, raw: Any) -> object:
        raise NotImplementedError("a step has deltas, no outputs")

    def _raw_output(self, item: WorkItem) -> object:
        """Return what `finish` gets of an item that has ended; None: its stream has it all."""

    def warm_up(self) -> None:
        """Run two steps of a sequence, in a free block if there is one."""
        tokens, pool = [0, 0], self.scheduler.pool
        sequence = Sequence(tokens)
        sequence.table = pool.open(tokens, [])
        if sequence.table is None:
            return  # running sequences use all blocks
        try:
            for start, count in ((0, 2), (2, 1)):
                chunk = Chunk(sequence, start, count)
                chunk.states = pool.plan_states(sequence.table, chunk.end)
                logits = self.runner.forward(Batch.from_chunks([chunk]))
                pool.commit_states(sequence.table, chunk.end)
                if not bool(logits.isfinite().all()):
                    raise ItemFailed("the model's output is not a number")
                tokens.append(0)
        finally:
            pool.close(sequence.table)

    # ── a step ──

    def step(self, idle_since: float = 0.0) -> StepOutcome[DeltaSource]:
        self._step_started = time.monotonic()
        self._drop_cancelled()
        if self._encoder_scheduler:  # while it runs, this engine may, too
            self._encoder_scheduler.step(self.scheduler, self.others)
        self._counts, self._deltas, self._full = Counter(), {}, 0
        if chunks := self._schedule():
            forms = dict.fromkeys(chunk.sequence.form for chunk in chunks)
            for form in forms if len(forms) > 1 else ():  # of the model, apart
                self._launch([c for c in chunks if c.sequence.form == form and c.is_active])
            if len(forms) == 1:
                self._launch(chunks)
        elif self._in_flight:
            self._process_results()
        else:
            self._masks.wait_for_one(self._pending_masks.values())
        return self._collect()

    def _drop_cancelled(self) -> None:
        for item in [item for item in self.live if not item.open]:
            self._unschedule(item)
            self._release(item)

    def _schedule(self) -> list[Chunk]:
        steady, running = self.scheduler.is_steady, self.scheduler.running
        uncomputed = [1] if steady else [sequence.uncomputed for sequence in running]
        streaming, budget = min(uncomputed, default=2) <= 1 or self.others.busy, 0
        if self._speculation:
            self._speculation.begin_step(len(running))
        if self.scheduler.num_waiting or max(uncomputed, default=0) > 1:
            spent_s = time.monotonic() - self._step_started
            budget = self._budget.prompt_tokens(streaming, spent_s, self.others.max_turn_s)
        draft = self._draft if self._speculation and self._may_draft else None
        spare_rows, resting = self.times.spare_rows, self._requests_without_mask()
        doubling = self._budget.doubling_tokens
        return self.scheduler.schedule(budget, draft, spare_rows, resting, doubling)

    def _requests_without_mask(self) -> set[WorkOwner]:
        """Return the requests of grammars that have late masks. Fail those of grammars that are too
        slow."""
        for sequence, mask in self._pending_masks.items():
            if mask.is_too_slow and (item := self._outputs[sequence].item) not in self._failed:
                too_slow = "the grammar of this response takes too long to compute a token mask"
                self._fail(item, ItemFailed(too_slow))
        self._start_masks()
        late = self._late_grammars()
        return {s.owner for s, mask in self._pending_masks.items() if mask.grammar in late}

    def _late_grammars(self) -> "set[Grammar | None]":
        masks = self._pending_masks.values()
        return {mask.grammar for mask in masks if not mask.outcome.done()}

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        output = self._outputs[sequence]
        if not (self._speculation and isinstance(output, SequenceOutput)):
            return ()
        if isinstance(self.runner, PagedRunner) and not self.runner.verifies_drafts:
            return ()  # native operations are not built yet
        if mask := self._pending_masks.get(sequence):
            return mask.drafts
        try:
            return self._speculation.draft(sequence, output)
        except BaseException as error:
            self._fail(output.item, error)
            return ()

    def _launch(self, chunks: abc.Sequence[Chunk]) -> None:
        if not chunks:
            return
        try:
            self._run(chunks)
        except BaseException as error:
            # The tokens of the step in flight are lost if this raises: that fails all requests.
            self._process_results()
            run_in_halves(chunks, self._run, self._fail_chunks, lambda c: c.is_active, error)

    def _run(self, chunks: abc.Sequence[Chunk]) -> None:
        """Run the model and sample. Raise before any state of the chunks' sequences changes."""
        last, self._batch, launched_at = self._batch, None, self._own_time()
        batch = last.move() if last and last.chunks is chunks else Batch.from_chunks(chunks)
        if self._in_flight:
            logits = self._forward_ahead(batch, self._in_flight.sampled)
            self._process_results()  # sampling may depend on them
            constrained = self._prepare_sampling(batch, last)
        else:
            constrained = self._prepare_sampling(batch, last)
            logits = self._forward(batch)
        prompt_scores = self._prompt_scores(batch, logits) if batch.scored else {}
        mask = self._token_mask(constrained) if constrained else None
        sampled = sample(logits[batch.scored :], self._inputs, mask)
        for _, chunk in constrained:
            if not chunk.deferred:
                del self._pending_masks[chunk.sequence]
        self._batch = batch
        self._in_flight = InFlightStep(batch, prompt_scores, sampled, launched_at)
        self._may_draft = not self._runs_ahead or self._next_drafts_wait(chunks)
        if not self._may_draft and not any(chunk.drafts for chunk in chunks):
            self.scheduler.append_placeholders(chunks)
        else:
            self._process_results()

    def _forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        """Run the model; on its own cache, other models run at its yield points."""
        with self._yield_points.active(self.others) if self._yield_points else nullcontext():
            return self.runner.forward(batch, sampled)

    def _forward_ahead(self, batch: Batch, sampled: SamplerOutput) -> Tensor:
        """Launch the model on tokens that are not read yet; once more if some are resampled."""
        if not self.runner.idempotent:
            sampled.resample()
        logits = self._forward(batch, sampled.tokens)
        if sampled.resample():
            logits = self._forward(batch, sampled.tokens)
        return logits

    def _prepare_sampling(self, batch: Batch, last: Batch | None) -> list[tuple[int, Chunk]]:
        """Prepare the inputs of sampling; `last`: the batch of the last step. Return the chunks
        with token masks, each with the first row of its mask: the computation of new masks starts
        here. Rows of chunks that no longer run are dropped with the results."""
        sampling = [chunk for chunk in batch.chunks if chunk.to_sample]
        if last and sampling == [chunk for chunk in last.chunks if chunk.to_sample]:
            self._inputs = self._inputs.following()
        else:
            rows, self._constrained = list[SamplingRow](), []
            for chunk in sampling:
                output, drafts = self._outputs[chunk.sequence], chunk.drafts
                assert isinstance(output, SequenceOutput)
                if output.constraints:
                    self._constrained.append((len(rows), chunk, output.constraints))
                state, at = output.sampling, output.tokens
                rows += [SamplingRow(state, at + n, drafts[:n]) for n in range(chunk.to_sample)]
            self._inputs = SamplingInputs(rows, self._inputs if last else None)
        masks, masked = self._pending_masks, list[tuple[int, Chunk]]()
        for row, chunk, constraints in self._constrained:
            if chunk.is_active:
                if chunk.sequence not in masks and (mask := constraints.mask(chunk.drafts)):
                    masks[chunk.sequence] = mask
                if chunk.sequence in masks:
                    masked.append((row, chunk))
        self._start_masks()
        return masked

    def _start_masks(self) -> None:
        """Have the masks that no thread has begun computed: those of requests in turn, of a request
        those that have generated least first."""
        masks = {s: mask for s, mask in self._pending_masks.items() if mask.thread is None}
        if masks:
            ordered = in_turn(sorted(masks, key=lambda s: len(s.tokens) - s.prompt_len))
            self._masks.start([masks[sequence] for sequence in ordered])

    def _token_mask(self, constrained: list[tuple[int, Chunk]]) -> "TokenMask | None":
        """Return the masks of the grammars that are ready in time. The other chunks sample no
        token."""
        masks = self._pending_masks
        self._masks.wait([masks[chunk.sequence] for _, chunk in constrained])
        late = self._late_grammars()
        ready: list[tuple[int, int, PendingMask]] = []
        for row, chunk in constrained:
            mask = masks[chunk.sequence]
            chunk.deferred = mask.grammar in late
            if not chunk.deferred:
                ready.append((row, chunk.to_sample, mask))
        return self._masks.token_mask(ready) if ready else None

    def _prompt_scores(self, batch: Batch, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
        """Return the scores of prompts' tokens, read at once, and apply the heads of prompts."""
        scores, row = {}, 0
        for chunk in batch.chunks:
            if positions := chunk.to_score:
                end = row + len(positions)
                output = self._outputs[chunk.sequence]
                scores[chunk.sequence] = output.score(logits[row:end], chunk)
                row = end
        return scores

    def _next_drafts_wait(self, chunks: abc.Sequence[Chunk]) -> bool:
        """Return whether the next drafts of most sequences need the tokens of this step. Fewer
        ones go without drafts: the others do not wait for them."""
        if (speculation := self._speculation) is None:
            return False
        sampling = [(chunk, self._outputs[chunk.sequence]) for chunk in chunks if chunk.to_sample]
        waits = (isinstance(o, SequenceOutput) and speculation.waits_for(c, o) for c, o in sampling)
        return 2 * sum(waits) > len(sampling)

    # ── results ──

    def _process_results(self) -> None:
        """Read the tokens of the step in flight, if there is one, and turn them into text."""
        if (step := self._in_flight) is None:
            return
        sampled, row = step.sampled.read(), 0
        self._in_flight, self._ran = None, len(step.batch.chunks)
        earlier_counts, self._counts = self._counts, Counter()
        for chunk in step.batch.chunks:
            tokens, row = sampled[row : row + chunk.to_sample], row + chunk.to_sample
            if chunk.is_active:  # else it has finished, or another choice of its request has failed
                try:
                    self._process_chunk(chunk, step.prompt_scores.get(chunk.sequence, ()), tokens)
                except BaseException as error:
                    self._fail(self._outputs[chunk.sequence].item, error)
        self._learn_times(step)
        self._counts += earlier_counts

    def _process_chunk(
        self, chunk: Chunk, scores: abc.Sequence[SampledToken], sampled: list[SampledToken]
    ) -> None:
        sequence, output = chunk.sequence, self._outputs[chunk.sequence]
        item = output.item
        if (sampled and sampled[0].token < 0) or (scores and any(s.token < 0 for s in scores)):
            raise ItemFailed("the model's output for this input is not a number")
        item.progress_at = time.monotonic()
        if chunk.is_prefill:
            self._counts["prefill_tokens"] += chunk.count
            item.computed += chunk.count
        if scores:
            output.add_prompt_scores(scores)
        if chunk.deferred or not chunk.reaches_end:
            self.scheduler.advance(chunk)
            return
        if not output.started:
            output.start(sequence.cached or 0)
        tokens = output.extend(chunk.drafts, sampled) if isinstance(output, SequenceOutput) else []
        self._counts["decode_tokens"] += len(tokens)
        item.generated += len(tokens)
        if chunk.drafts and self._speculation:
            self._counts.update(self._speculation.record_verified(chunk, len(tokens)))
        self.scheduler.advance(chunk, tokens)
        if output.finished:
            self.scheduler.remove(sequence)
        unread = output.unread  # the event loop takes them meanwhile
        is_first, is_full = unread <= len(tokens), unread >= MAX_UNREAD
        self._full += is_full
        if output.finished or is_first or (is_full and self._full <= MAX_WRITTEN):
            self._deltas[output] = item

    def _learn_times(self, step: InFlightStep) -> None:
        """Record the step's time, counted from when the device could start it."""
        started = max(step.launched_at, self._results_at)
        self._results_at = self._own_time()
        seconds, rows = self._results_at - started, len(step.batch.ids)
        prompts = [chunk for chunk in step.batch.chunks if chunk.is_prefill]
        prefill = sum(chunk.count for chunk in prompts)
        keys = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in prompts)
        self.times.learn(prefill, rows - prefill, seconds, keys)
        if self._speculation and not prefill:
            self._speculation.learn(self._counts["decode_tokens"], seconds)

    def _own_time(self) -> float:
        """Return the time without that of other models at yield points."""
        return time.monotonic() - self.others.total_s

    def _collect(self) -> StepOutcome[DeltaSource]:
        if self._encoder_scheduler:
            self._encoder_scheduler.release_prefilled(self.scheduler)
        report = self._report()
        news = self._deltas.items()
        deltas = [(item, output) for output, item in news if item not in self._failed]
        ending = dict.fromkeys(item for item, output in deltas if output.finished)
        finished = [
            item for item in ending if all(self._outputs[s].finished for s in self.live[item])
        ]
        done: list[tuple[WorkItem, Exception | None]] = [*self._failed.items()]
        outputs: list[tuple[WorkItem, object]] = []
        for item in finished:
            if (raw := self._raw_output(item)) is None:
                done.append((item, None))
            else:
                item.finished_at, item.batch_size = time.monotonic(), self._ran
                outputs.append((item, raw))
        for item in (*self._failed, *finished):
            self._release(item)
        self._failed.clear()
        if not self.live:  # no request waits for its tokens
            self._in_flight, self._batch, self._constrained = None, None, []
        return StepOutcome(report, deltas, outputs, done, unfinished=report.decode_tokens > 0)

    def _report(self) -> StepReport:
        scheduler, admitted = self.scheduler, self.scheduler.admitted
        paged, states = not scheduler.whole_prompts, scheduler.pool.states
        items = [self._outputs[sequence].item for sequence in admitted]
        for item in items:
            item.started_at = item.started_at or self._step_started
        return StepReport(
            **self._counts,
            cached_tokens=sum(sequence.cached or 0 for sequence in admitted),
            preempted=scheduler.preempted,
            admitted=len(admitted),
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            blocks_used=scheduler.pool.used if paged else 0,
            blocks_total=scheduler.pool.num_blocks if paged else 0,
            states_used=states.used if states else 0,
            states_total=states.num_slots if states else 0,
            total_s=time.monotonic() - self._step_started,
            waits_s=tuple(self._step_started - item.accepted_at for item in items),
        )

    # ── failures ──

    def _fail(self, item: WorkItem, error: BaseException) -> None:
        """Fail a request: `error` was raised by work on it alone. A lost device is raised."""
        if isinstance(failure := failure_of(error), DeviceLost):
            raise error
        id, cause = item.owner.request_id, failure.__cause__ or failure
        log.warning("generation failed id=%s error=%.200r", id, cause)
        error.with_traceback(None)
        self._failed[item] = failure
        self._unschedule(item, failed=True)

    def _fail_chunks(self, chunks: abc.Sequence[Chunk], failure: OnequeueError) -> None:
        """Fail the request of a single chunk, unless there is memory to gain. Several chunks that
        failed together run again in halves."""
        if isinstance(failure, OutOfMemory) and self.scheduler.shrink_running():
            return
        if len(chunks) == 1 and chunks[0].is_active:
            self._fail(self._outputs[chunks[0].sequence].item, failure)

    def _fail_multimodal(self, prompt: "MultimodalPrompt", error: BaseException) -> None:
        """Fail the requests of a prompt, one of whose images could not be encoded."""
        for item, sequences in list(self.live.items()):
            if item not in self._failed and any(s.multimodal is prompt for s in sequences):
                self._fail(item, error)

    def _unschedule(self, item: WorkItem, failed: bool = False) -> None:
        """Remove a request's sequences. Blocks of a failed one leave the prefix cache."""
        for sequence in self.live[item]:
            if failed and sequence.table:
                self.scheduler.pool.unregister(sequence.table)
            if sequence.number >= 0:
                self.scheduler.remove(sequence)

    def _release(self, item: WorkItem) -> None:
        for sequence in self.live.pop(item):
            del self._outputs.pop(sequence).item  # which refers to the output
            self._pending_masks.pop(sequence, None)
            if self._speculation:
                self._speculation.remove(sequence)
