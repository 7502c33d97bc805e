"""`POST /` with text-generation on the generation engine: results equal the pipeline's."""

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import pipeline

from batching.batcher import DynamicBatcher
from batching.request_queue import WorkItem
from tests import tiny, tiny_decoders
from tests.fakes import BusyModels
from tests.matrix import matrix
from tests.parity import assert_same, item, oracle, plain, text
from worker.backends.cpu.experts import packed_experts
from worker.backends.cpu.linear_layers import packs_dtype
from worker.engines.generation.text_pipeline import (
    GenerationRun,
    TextGenerationEngine,
    copy_sharing_weights,
    load_text_generation,
)
from worker.engines.pipeline.engine import PipelineEngine
from worker.engines.pipeline.loading import PipelineOptions
from worker.engines.pipeline.runner import PipelineItem
from worker.model.language_model import GeneratorOptions
from worker.model.sampler import SamplingParams

torch.set_num_threads(1)

TASK = "text-generation"
GREEDY = {"max_new_tokens": 5, "do_sample": False}
TEXTS = [text(1), text(7), text(40, 3), text(3, 9), text(17, 5)]
ON_ENGINE: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "return_full_text": False},
    {**GREEDY, "repetition_penalty": 1.7},
    {**GREEDY, "no_repeat_ngram_size": 2},
    {**GREEDY, "min_new_tokens": 5},
    {**GREEDY, "num_beams": 1},
]
DEFAULTS = '{"temperature": 0.3, "top_p": 0.9, "top_k": -1}'
BY_GENERATE: list[dict[str, Any]] = [
    {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    {**GREEDY, "stop_sequence": ["e", "qu"]},
]


def load(model: str, **options: Any) -> Any:
    return load_folder(tiny.folder(model), **options)


def load_folder(folder: Path, sampling_defaults: str = "{}", **options: Any) -> Any:
    path = str(folder)
    pipeline = PipelineOptions(
        path, task=TASK, device="cpu", dtype="float32", sampling_defaults=sampling_defaults
    )
    generator = GeneratorOptions(
        path, device="cpu", dtype="float32", kv_cache_gb=0.01, compile="off", **options
    )
    return load_text_generation(pipeline, generator, DynamicBatcher(8, 1 << 16, 0.0), 8)


@cache
def loaded(model: str, sampling_defaults: str = "{}") -> TextGenerationEngine:
    engine = load(model, sampling_defaults=sampling_defaults)
    assert isinstance(engine, TextGenerationEngine)
    return engine


def serve(engine: Any, items: list[PipelineItem]) -> list[Any]:
    """Return the result of each item, or the exception that it failed with."""
    for one in items:
        engine.prepare(one)
        engine.add(one)
    results: dict[WorkItem, Any] = {}
    while engine.busy:
        outcome: Any = engine.step(0.0)
        if outcome:
            results |= {one: orjson.loads(engine.finish(one, raw)) for one, raw in outcome.outputs}
            results |= dict(outcome.done)
    return [results[one] for one in items]


@pytest.mark.parametrize("model", matrix(["llama-lm", "gpt2-lm"], "llama-lm"))
def test_results_equal_the_pipeline(model: str) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (value, each) for each in (*ON_ENGINE, *BY_GENERATE) for value in TEXTS
    ]
    chat = [{"role": "user", "content": "hello"}]
    prefill = [*chat, {"role": "assistant", "content": "good"}]
    if model == "llama-lm":
        calls += [(chat, GREEDY), (prefill, GREEDY), (chat, BY_GENERATE[0])]
    items = [item(inputs, **parameters) for inputs, parameters in calls]
    answers, call = serve(loaded(model), items), oracle(TASK, model)
    for answer, (inputs, parameters) in zip(answers, calls, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(answer, plain(call(inputs, **parameters)), str(parameters))


def sampling_params(one: PipelineItem) -> SamplingParams:
    run: Any = one.prepared
    params: SamplingParams = run[0].prepared.params
    return params


@pytest.mark.parametrize(
    ("defaults", "parameters", "expected"),
    [
        ("{}", {}, (0.7, 50, 1.0)),
        ("{}", {"top_k": 3}, (0.7, 3, 1.0)),
        ("{}", {"temperature": 1.5, "top_p": 0.5}, (1.5, 50, 0.5)),
        ("{}", {"do_sample": False}, (0.0, 50, 1.0)),
        (DEFAULTS, {}, (0.3, 0, 0.9)),
        (DEFAULTS, {"top_k": 3}, (0.3, 3, 0.9)),
        (DEFAULTS, {"do_sample": False}, (0.0, 0, 0.9)),
    ],
)
def test_sampling_has_the_defaults_of_the_setting_or_the_pipeline(
    defaults: str, parameters: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """The pipeline samples at a temperature of 0.7 from generate's 50 best."""
    one = item("hello", **parameters)
    loaded("llama-lm", defaults).prepare(one)
    params = sampling_params(one)
    assert (params.temperature, params.top_k, params.top_p) == expected


def test_a_default_temperature_of_0_is_greedy_with_and_without_the_engine() -> None:
    engine = load("llama-lm", sampling_defaults='{"temperature": 0}')
    for parameters in ({"max_new_tokens": 9}, {"max_new_tokens": 9, "stop_sequence": ["é"]}):
        omitted, greedy = serve(
            engine, [item("hello", **parameters), item("hello", do_sample=False, **parameters)]
        )
        assert omitted == greedy


def test_typical_p_is_sampled_by_the_pipelines_processor() -> None:
    engine = loaded("llama-lm")
    one = item("hello", typical_p=0.5)
    engine.prepare(one)
    params = sampling_params(one)
    names = [type(warper).__name__ for warper in params.warpers]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TypicalLogitsWarper"]


def test_several_sequences_are_returned() -> None:
    one = item("hello", num_return_sequences=3, temperature=5.0, max_new_tokens=8)
    [answer] = serve(loaded("llama-lm"), [one])
    texts = {entry["generated_text"] for entry in answer}
    assert len(answer) == 3
    assert len(texts) > 1
    assert all(each.startswith("hello") for each in texts)


def test_items_of_both_engines_take_turns() -> None:
    engine = loaded("llama-lm")
    items = [item(TEXTS[1], **{**GREEDY, "max_new_tokens": 40}), item(TEXTS[0], **BY_GENERATE[0])]
    for one in items:
        engine.prepare(one)
        engine.add(one)
    done: list[WorkItem] = []
    while engine.busy:
        if outcome := engine.step(0.0):
            done += [one for one, _ in outcome.outputs]
    assert done == items[::-1]  # the batch of the pipeline does not wait for the longer output


def test_clear_returns_the_items_of_both_engines() -> None:
    engine = loaded("llama-lm")
    items = [item(TEXTS[0], **GREEDY), item(TEXTS[1], **BY_GENERATE[0])]
    for one in items:
        engine.prepare(one)
        engine.add(one)
    assert engine.clear() == items
    assert not engine.busy


def test_output_that_exceeds_the_cache_is_generated_by_the_pipeline() -> None:
    engine = load("llama-lm", max_model_len=32)
    one, other = item(text(3), max_new_tokens=20), item(text(3), max_new_tokens=40)
    for each in (one, other):
        engine.prepare(each)
    assert isinstance(one.prepared, GenerationRun)
    assert not isinstance(other.prepared, GenerationRun)


@pytest.mark.parametrize("model", ["mamba", "falcon-h1"])
def test_recurrent_model_stays_with_generate(model: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = load_folder(tiny_decoders.folder(model))
    assert isinstance(engine, PipelineEngine)
    assert "POST / runs generate: it has recurrent layers" in caplog.text
    for _ in range(2):  # with its own forward
        engine.warm_up()


def test_generation_config_that_the_engine_does_not_serve_stays_with_generate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny.folder("llama-lm"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_beams": 2}))
    assert isinstance(load_folder(tmp_path), PipelineEngine)
    assert "POST / runs generate: its generation_config has num_beams=2" in caplog.text


def tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_copy_shares_tensors_and_nothing_else() -> None:
    model = loaded("llama-lm").runner.language.model
    own = copy_sharing_weights(model)
    assert {*map(id, tensors(model))} == {*map(id, tensors(own))}
    assert not {*map(id, model.modules())} & {*map(id, own.modules())}
    assert own.config is not model.config
    for module in own.modules():  # when the weights are released, both lose them
        assert any(module._parameters is other._parameters for other in model.modules())


@pytest.mark.skipif(not packs_dtype(torch.float32), reason="experts are not packed on this CPU")
def test_generate_runs_on_the_packed_experts_of_a_mixture() -> None:
    folder = tiny_decoders.folder("qwen3-moe")
    engine = load_folder(folder)
    own, model = engine.pipeline_runner.pipe.model, engine.runner.language.model
    assert packed_experts(model)
    assert packed_experts(own) == packed_experts(model)
    calls = [GREEDY, {**GREEDY, "num_beams": 2}]
    answers = serve(engine, [item(TEXTS[1], **parameters) for parameters in calls])
    call: Any = pipeline("text-generation", model=str(folder), device="cpu")
    for answer, parameters in zip(answers, calls, strict=True):
        assert_same(answer, plain(call(TEXTS[1], **parameters)), str(parameters))


def test_both_engines_yield_to_the_same_models() -> None:
    engine = loaded("llama-lm")
    before, engine.others = engine.others, BusyModels()
    engine.step(0.0)
    assert engine.pipelines.others is engine.others
    engine.others = before
