"""`POST /` with text-generation, on the generation engine: continuous batches, the compiled model.

    prepare → PreparedInput ┬▶ GenerationEngine: token ids ───────┬▶ finish
                            └▶ PipelineEngine: beams, stop strings ┘

The pipeline's own `preprocess`, defaults and `postprocess` hold for both. What the engine does not
have runs the model's own `generate`, on a copy of the model that shares its weights.
"""

import copy
import logging
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from batching.batcher import DynamicBatcher
from batching.request_queue import WorkItem
from batching.sequence import TokenIds
from worker.backends.cpu.experts import packed_experts
from worker.device.self_check import CannotRun, set_attention
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import default_min_tokens, default_sampling
from worker.engines.generation.loading import paged_engine
from worker.engines.generation.output import PreparedPrompt, SequenceOutput, create_outputs
from worker.engines.pipeline.engine import PipelineEngine
from worker.engines.pipeline.limits import context_limit
from worker.engines.pipeline.loading import PipelineOptions, load_checked_pipeline, new_runner
from worker.engines.pipeline.runner import PipelineItem, PipelineRunner, PreparedInput
from worker.load_context import on_worker
from worker.messages.generation import GenerationInput
from worker.messages.protocol import PipelineInput
from worker.model.generation_config import not_served
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.loading import Pipe
from worker.model.logits_processors import CheckpointProcessors
from worker.model.long_context import factors_change
from worker.model.paged_runner import PagedRunner
from worker.model.paging import load_paged_runner

log = logging.getLogger("onequeue.generation")

TokenLists = list[list[int]]  # of each returned sequence, without the prompt
PipelineSteps = PipelineEngine[PipelineInput, PreparedInput, Any]


class GenerationRun(list[SequenceOutput]):
    """What `prepare` makes of an input that the engine generates for: an output for each returned
    sequence."""

    def __init__(self, outputs: Iterable[SequenceOutput], prepared: PreparedInput) -> None:
        super().__init__(outputs)
        self.prepared = prepared


class TextGenerationEngine(GenerationEngine):
    """A generation engine that takes the inputs of a pipeline. Steps of it and of the pipeline's
    engine, which `attach` sets, take turns."""

    runner: PagedRunner
    pipelines: PipelineSteps
    pipeline_runner: PipelineRunner

    def attach(self, pipeline_runner: PipelineRunner, pipelines: PipelineSteps) -> None:
        self.pipeline_runner, self.pipelines = pipeline_runner, pipelines
        self.info = replace(self.info, model=pipeline_runner.info.model)
        self._pipeline_next = False  # a batch of the pipeline is next, if both have work

    @property
    def text_model(self) -> Any:
        """None: requests do not call it by name."""

    # ── in pool threads ──

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        self.pipelines.prepare(item)
        prepared = item.prepared
        if (config := engine_config(self.pipeline_runner, prepared)) is not None:
            prompt = prepared.chunks[0]["input_ids"][0].tolist()
            max_model_len = self.input_processor.max_model_len
            if len(prompt) + prepared.forward["max_new_tokens"] <= max_model_len:
                item.prepared = self._generation_run(item, prompt, config)

    def _generation_run(
        self, item: PipelineItem, prompt: list[int], config: GenerationConfig
    ) -> GenerationRun:
        request = GenerationInput(tuple(prompt), n=item.prepared.sequences)
        language = self.runner.language
        prepared = prepare_prompt(prompt, config, language.vocab_size, language.device)
        outputs = create_outputs(item, request, prepared, self.input_processor.vocabulary)
        return GenerationRun(outputs, item.prepared)

    def finish(self, item: WorkItem[Any, Any], raw: Any) -> object:
        if isinstance(run := item.prepared, GenerationRun):
            item.prepared, raw = run.prepared, [self._pipeline_output(run.prepared, raw)]
        return self.pipelines.finish(item, raw)

    def _pipeline_output(self, prepared: PreparedInput, sequences: TokenLists) -> dict[str, Any]:
        """Return what the pipeline's forward returns; as there, shorter sequences are padded."""
        [chunk], width = prepared.chunks, max(map(len, sequences))
        pad = self.pipeline_runner.pipe.tokenizer.pad_token_id or 0
        prompt: list[int] = chunk["input_ids"][0].tolist()
        rows = [[*prompt, *ids, *[pad] * (width - len(ids))] for ids in sequences]
        return {
            "generated_sequence": torch.tensor(rows)[None],
            "input_ids": chunk["input_ids"],
            "prompt_text": chunk["prompt_text"],
        }

    # ── on the worker's thread ──

    def add(self, item: WorkItem[Any, Any]) -> None:
        if isinstance(item.prepared, GenerationRun):
            super().add(item)
        else:
            self.pipelines.add(item)

    @property
    def busy(self) -> bool:
        return super().busy or self.pipelines.busy

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.live else self.pipelines.due_at(idle_since)

    def step(self, idle_since: float = 0.0) -> Any:
        self.pipelines.others = self.others
        if not self.live:
            return self.pipelines.step(idle_since)
        self._pipeline_next = not self._pipeline_next
        if self._pipeline_next and (outcome := self.pipelines.step(idle_since)):
            return outcome
        return super().step(idle_since)

    def _raw_output(self, item: WorkItem) -> TokenLists:
        return [sequence.tokens[sequence.prompt_len :] for sequence in self.live[item]]

    def clear(self) -> list[WorkItem]:
        return [*super().clear(), *self.pipelines.clear()]

    def warm_up(self) -> None:
        self.pipelines.warm_up()
        super().warm_up()


# ── a request's parameters ──


def engine_config(runner: PipelineRunner, prepared: PreparedInput) -> GenerationConfig | None:
    """Return the values by which `generate` would run an input; None if the engine lacks some."""
    pipe, parameters = runner.pipe, dict(prepared.forward)
    parameters.pop("tokenizer", None)
    parameters.pop("prefix_length", None)
    set_fields = {**pipe.model.generation_config.to_diff_dict(), **parameters}
    fields = {
        **GenerationConfig._get_default_generation_params(),
        **pipe._prepare_generate_kwargs(set_fields),
        "num_return_sequences": 1,  # the engine's choices
    }
    config = GenerationConfig(**{k: v for k, v in fields.items() if v is not None})
    return None if config.stop_strings or not_served(vars(config)) else config


def prepare_prompt(
    prompt: list[int], config: GenerationConfig, vocab_size: int, device: torch.device
) -> PreparedPrompt:
    """Return a prompt with the sampling parameters that `config` has for `generate`."""
    fields: Any = config  # not annotated
    eos = fields.eos_token_id
    eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    min_tokens = default_min_tokens(fields, len(prompt))
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
    engine: TextGenerationEngine | None = None
    try:
        engine = load_engine(pipe, generation)
    except CannotRun as error:
        log.warning("POST / runs generate: %s", error)
    runner = new_runner(pipe, options, max_rows)
    pipelines: PipelineSteps = PipelineEngine(runner, batcher)
    if engine is None:
        return pipelines
    engine.attach(runner, pipelines)
    return engine


def load_engine(pipe: Pipe, options: GeneratorOptions) -> TextGenerationEngine:
    """Return an engine of the pipeline's model, and leave the pipeline with a copy that shares its
    weights. Raise CannotRun, with the pipeline unchanged, if `generate` has to run alone."""
    model = pipe.model
    attention = model.config._attn_implementation
    if factors_change(model, context_limit(pipe)):
        raise CannotRun("its rotary factors depend on the length of the text")
    if missing := not_served(vars(model.generation_config)):
        raise CannotRun(f"its generation_config has {', '.join(missing)}")
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
    engine = paged_engine(runner, options, kind=TextGenerationEngine)
    assert isinstance(engine, TextGenerationEngine)
    return engine


def copy_sharing_weights(model: Any) -> Any:
    """Copy the modules and the configuration of a model, but not its tensors and packed experts."""
    shared: list[Any] = [*packed_experts(model)]
    for module in model.modules():
        shared += [module._parameters, module._buffers]
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value for value in shared})
