"""`POST /` with text-generation, on the generation engine: continuous batches, the compiled model.

    prepare → PreparedInput ┬▶ GenerationEngine: token ids ───────┬▶ finish
                            └▶ PipelineEngine: beams, stop strings ┘

The pipeline's own `preprocess`, defaults and `postprocess` hold for both. What the engine does not
have runs the model's own `generate`, on a copy of the model that shares its weights.
"""

import copy
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from batching.batcher import DynamicBatcher
from batching.request_queue import WorkItem
from batching.sequence import TokenIds
from worker.device.self_check import CannotRun, set_attention
from worker.generation.engine import GenerationEngine
from worker.generation.input_processor import default_sampling
from worker.generation.loading import paged_engine
from worker.generation.output import PreparedPrompt, create_outputs
from worker.load_context import on_worker
from worker.messages.deltas import Delta
from worker.messages.generation import GenerationInput
from worker.messages.protocol import (
    Fallback,
    ModelInfo,
    OtherModels,
    PipelineInput,
    StepOutcome,
)
from worker.model.cpu.experts import packed_experts
from worker.model.generation_config import check_generation_config, not_served
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.loading import LoadingFailed, Pipe
from worker.model.logits_processors import CheckpointProcessors
from worker.model.long_context import factors_change
from worker.model.paging import load_paged_runner
from worker.pipeline.engine import PipelineEngine
from worker.pipeline.limits import context_limit
from worker.pipeline.loading import PipelineOptions, load_checked_pipeline, new_runner
from worker.pipeline.runner import PipelineItem, PipelineRunner, PreparedInput

log = logging.getLogger("onequeue.generation")

TokenLists = list[list[int]]  # of each returned sequence, without the prompt
PipelineSteps = PipelineEngine[PipelineInput, PreparedInput, Any]


@dataclass(eq=False)
class GenerationRun:
    """What `prepare` makes of an input that the engine generates for."""

    prepared: PreparedInput
    item: WorkItem  # the engine's
    tokens: TokenLists
    pipeline_item: PipelineItem


class TextGenerationEngine:
    """Implements Engine of worker.messages.protocol by the two engines of one model, whose steps
    take turns."""

    text_model = None

    def __init__(
        self, runner: PipelineRunner, pipelines: PipelineSteps, generation: GenerationEngine
    ) -> None:
        self.runner, self.pipelines, self.generation = runner, pipelines, generation
        self.info: ModelInfo = replace(generation.info, model=runner.info.model)
        self._runs: dict[WorkItem, GenerationRun] = {}  # by the generation engine's item
        self._pipeline_next = False  # a batch of the pipeline is next, if both have work

    @property
    def others(self) -> OtherModels:
        return self.pipelines.others

    @others.setter
    def others(self, others: OtherModels) -> None:
        self.pipelines.others = self.generation.others = others

    @property
    def compile_state(self) -> Literal["running", "done", "off"]:
        return self.generation.compile_state

    @property
    def stage(self) -> str:
        return self.generation.stage

    @property
    def fallbacks(self) -> Sequence[Fallback]:
        return self.generation.fallbacks

    # ── in pool threads ──

    def prepare(self, item: PipelineItem) -> None:
        self.pipelines.prepare(item)
        prepared: Any = item.prepared
        if (config := engine_config(self.runner, prepared)) is not None:
            prompt = prepared.chunks[0]["input_ids"][0].tolist()
            if len(prompt) + prepared.forward["max_new_tokens"] <= self._max_model_len:
                prepared = self._generation_run(item, prompt, config)
        item.prepared = prepared

    @property
    def _max_model_len(self) -> int:
        return self.generation.input_processor.max_model_len

    def _generation_run(
        self, item: PipelineItem, prompt: list[int], config: GenerationConfig
    ) -> GenerationRun:
        engine, count = self.generation, item.prepared.sequences
        request = GenerationInput(tuple(prompt), n=count, token_ids=True)
        work: WorkItem = WorkItem(request, item.deadline, item.accepted_at, owner=item.owner)
        language = engine.runner.language
        prepared = prepare_prompt(prompt, config, language.vocab_size, language.device)
        vocabulary = engine.input_processor.vocabulary
        work.prepared = create_outputs(work, request, prepared, vocabulary)
        return GenerationRun(item.prepared, work, [[] for _ in range(count)], item)

    def finish(self, item: PipelineItem, raw: Any) -> object:
        if isinstance(run := item.prepared, GenerationRun):
            item.prepared, raw = run.prepared, [self._raw_output(run, raw)]
        return self.pipelines.finish(item, raw)

    def _raw_output(self, run: GenerationRun, sequences: TokenLists) -> dict[str, Any]:
        """Return what the pipeline's forward returns; as there, shorter sequences are padded."""
        [chunk], width = run.prepared.chunks, max(map(len, sequences))
        pad = self.runner.pipe.tokenizer.pad_token_id or 0
        prompt: list[int] = chunk["input_ids"][0].tolist()
        rows = [[*prompt, *ids, *[pad] * (width - len(ids))] for ids in sequences]
        return {
            "generated_sequence": torch.tensor(rows)[None],
            "input_ids": chunk["input_ids"],
            "prompt_text": chunk["prompt_text"],
        }

    # ── on the worker's thread ──

    def add(self, item: PipelineItem) -> None:
        if isinstance(run := item.prepared, GenerationRun):
            self._runs[run.item] = run
            self.generation.add(run.item)
        else:
            self.pipelines.add(item)

    @property
    def busy(self) -> bool:
        return self.generation.busy or self.pipelines.busy

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.generation.busy else self.pipelines.due_at(idle_since)

    def step(self, idle_since: float) -> StepOutcome[Any, Any] | None:
        if not self.generation.busy:
            return self.pipelines.step(idle_since)
        self._pipeline_next = not self._pipeline_next
        if self._pipeline_next and (outcome := self.pipelines.step(idle_since)):
            return outcome
        return self._generation_step(idle_since)

    def _generation_step(self, idle_since: float) -> StepOutcome[Delta, TokenLists]:
        for run in self._runs.values():
            run.item.open = run.pipeline_item.open
        step = self.generation.step(idle_since)
        outcome: StepOutcome[Delta, TokenLists] = StepOutcome(step.report)
        for work, delta in step.deltas:
            run = self._runs[work]
            run.tokens[delta.choice] += delta.token_ids
            outcome.deltas.append((run.pipeline_item, delta))
        running, now = len(self._runs), self.pipelines.clock()
        for work, error in step.done:
            run = self._runs[work]
            item = run.pipeline_item
            item.started_at, item.finished_at, item.batch_size = work.started_at, now, running
            if error is None:
                outcome.outputs.append((item, run.tokens))
            else:
                outcome.done.append((item, error))
        self._runs = {work: run for work, run in self._runs.items() if work in self.generation.live}
        return outcome

    def clear(self) -> list[WorkItem]:
        items = [run.pipeline_item for run in self._runs.values()]
        self._runs = {}
        self.generation.clear()
        return [*items, *self.pipelines.clear()]

    def warm_up(self) -> None:
        self.pipelines.warm_up()
        self.generation.warm_up()

    def close(self) -> None:
        self.generation.close()


# ── a request's parameters ──


def engine_config(runner: PipelineRunner, prepared: PreparedInput) -> GenerationConfig | None:
    """Return the values by which `generate` would run an input; None if the engine lacks some."""
    pipe, parameters = runner.pipe, dict(prepared.forward)
    parameters.pop("tokenizer", None)
    parameters.pop("prefix_length", None)
    make: Any = GenerationConfig  # not annotated
    set_fields = {**pipe.model.generation_config.to_diff_dict(), **parameters}
    fields = {
        **GenerationConfig._get_default_generation_params(),
        **pipe._prepare_generate_kwargs(set_fields),
        "num_return_sequences": 1,  # the engine's choices
    }
    config: GenerationConfig = make(**{k: v for k, v in fields.items() if v is not None})
    return None if config.stop_strings or not_served(vars(config)) else config


def prepare_prompt(
    prompt: list[int], config: GenerationConfig, vocab_size: int, device: torch.device
) -> PreparedPrompt:
    """Return a prompt with the sampling parameters that `config` has for `generate`."""
    fields: Any = config  # not annotated
    eos = fields.eos_token_id
    eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    min_tokens = fields.min_new_tokens
    if min_tokens is None:
        min_tokens = max(0, (fields.min_length or 0) - len(prompt))
    params = replace(
        default_sampling(config),
        seed=secrets.randbits(64),
        min_tokens=min_tokens,
        stop_token_ids=eos if min_tokens else (),
    )
    processors = CheckpointProcessors(config, vocab_size, eos, device)
    params = processors.extend(params, prompt, fields.max_new_tokens, ignore_eos=False)
    return PreparedPrompt(TokenIds(prompt), params, fields.max_new_tokens, dict.fromkeys(eos))


# ── loading ──


def load_text_generation(
    options: PipelineOptions,
    generation: GeneratorOptions,
    batcher: DynamicBatcher[Any],
    max_rows: int,
) -> TextGenerationEngine | PipelineSteps:
    """Load the pipeline, with a generation engine where its model runs on paged memory."""
    pipe = load_checked_pipeline(options)
    engine: GenerationEngine | None = None
    try:
        engine = load_engine(pipe, generation)
    except CannotRun as error:
        log.warning("POST / runs generate: %s", error)
    runner = new_runner(pipe, options, max_rows)
    pipelines: PipelineSteps = PipelineEngine(runner, batcher)
    return TextGenerationEngine(runner, pipelines, engine) if engine else pipelines


def load_engine(pipe: Pipe, options: GeneratorOptions) -> GenerationEngine:
    """Return an engine of the pipeline's model, and leave the pipeline with a copy that shares its
    weights. Raise CannotRun, with the pipeline unchanged, if `generate` has to run alone."""
    model = pipe.model
    attention = model.config._attn_implementation
    if factors_change(model, context_limit(pipe)):
        raise CannotRun("its rotary factors depend on the length of the text")
    if missing := not_served(vars(model.generation_config)):
        raise CannotRun(f"its generation_config has {', '.join(missing)}")
    try:
        check_generation_config(vars(model.generation_config), model.config.vocab_size)
    except LoadingFailed as error:
        raise CannotRun(str(error)) from error
    language = LanguageModel(options.name, model, copy.deepcopy(pipe.tokenizer), options.model)

    def own_model() -> Any:
        own = copy_sharing_weights(model)
        set_attention(own, attention)
        return own

    def check_own() -> None:
        if language.recurrent:
            raise CannotRun("it has recurrent layers")
        check_model(on_worker(own_model))

    check_model = language.own_check()
    runner = load_paged_runner(language, options, check_own)
    pipe.model = own_model()
    return paged_engine(runner, options)


def copy_sharing_weights(model: Any) -> Any:
    """Copy the modules and the configuration of a model, but not its tensors and packed experts."""
    shared: list[Any] = [*packed_experts(model)]
    for module in model.modules():
        shared += [module._parameters, module._buffers]
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value for value in shared})
