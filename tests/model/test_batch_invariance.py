"""Outputs of native operations are equal in every bit, alone and in any batch."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from batching import step_times
from batching.sequence import Batch
from tests import tiny_adapters, tiny_decoders
from tests.causal_families import build
from tests.generating import (
    ORDINARY,
    Driver,
    Served,
    engine,
    load_paged,
    request,
    runner_of,
    serve,
    shares_template,
)
from tests.matrix import matrix
from tests.threads import compute_threads
from tests.tiny import saved
from worker.backends.cpu.linear import native_quantized_matches
from worker.backends.cpu.linear_layers import PackedLinear
from worker.backends.native_attention import NativeMetadata
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem
from worker.engines.generation.loading import paged_engine
from worker.engines.generation.speculation import NgramDrafter, Speculation
from worker.messages.adapters import Adapter
from worker.messages.generation import Sampling
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.paged_runner import PagedRunner

pytestmark = pytest.mark.usefixtures("native")

NEW = 20
LENGTHS = (1, 17, 33, 48, 100)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


@cache
def folder(kind: str = "llama") -> Path:
    """Return a model with products so deep that oneDNN divides them; or one of another type."""
    if kind != "llama":
        return saved(f"deep-{kind}", build(kind))
    torch.manual_seed(0)
    sizes = {"intermediate_size": 1056, "max_position_embeddings": 1024}
    return saved("deep-llama", tiny_decoders.decoder("LlamaConfig", **sizes)())


def paged_runner(source: str, dtype: str, quantization: str = "none") -> PagedRunner:
    """Load a model of `folder`, or of the builders if there is one of that name."""
    is_built = source != "llama" and source in tiny_decoders.BUILDERS
    path = tiny_decoders.folder(source) if is_built else folder(source)
    # compiling builds the native operations
    return load_paged(path, dtype=dtype, kv_cache_gb=0.02, quantization=quantization, compile="on")


@cache
def language(source: str, dtype: str, quantization: str = "none") -> LanguageModel:
    runner = paged_runner(source, dtype, quantization)
    runner._use_native_ops()
    assert runner.metadata is NativeMetadata
    model = runner.language
    if quantization != "none" and not native_quantized_matches(quantization, model.dtype):
        pytest.skip(f"no kernel for {quantization} weights on this CPU")
    if source in STACKED and not runner._keeps_rows_apart():
        pytest.skip("torch's product of a row depends on the others on this CPU")
    assert all(module.native for module in model.recurrent)
    return model


@shares_template
def new_engine(model: LanguageModel, blocks: int, speculation: str) -> GenerationEngine:
    runner = PagedRunner(model, blocks, model.context, 64)
    runner.metadata = NativeMetadata
    return paged_engine(runner, GeneratorOptions("", speculation=speculation, max_running=64))


def requests(rounds: int = 2) -> list[GenerationItem]:
    """Return seeded and greedy requests; half of the prompts share a prefix with others."""
    chance = random.Random(0)
    trunk = chance.choices(ORDINARY, k=max(LENGTHS))
    items: list[GenerationItem] = []
    for number, length in enumerate(LENGTHS * rounds):
        shared = chance.randrange(length) if number % 2 else 0
        prompt = trunk[:shared] + chance.choices(ORDINARY, k=length - shared)
        sampling = Sampling(temperature=float(number % 3 > 0), seed=number, logprobs=2)
        items.append(request(prompt, sampling, max_tokens=NEW))
    return items


def outputs(served: Served) -> tuple[Any, ...]:
    """Return the tokens, and the log-probabilities in every bit."""
    return served.ids, [[token.logprob for token in delta.logprobs] for delta in served.choices]


def draft_from(alone: list[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft outputs up to a random position."""
    texts = [(*served.prompt, *served.ids[0]) for served in alone]
    chance = random.Random(1)

    def draft(drafter: NgramDrafter, tokens: Any, limit: int) -> tuple[int, ...]:
        text = next((text for text in texts if text[: len(tokens)] == tuple(tokens)), ())
        return (*text[len(tokens) :][: min(limit, chance.randrange(5))], 7)[:limit]

    monkeypatch.setattr(NgramDrafter, "draft", draft)
    monkeypatch.setattr(Speculation, "worthwhile", lambda budget, acceptance, limit: limit)


def serve_alone(model: LanguageModel, items: Sequence[GenerationItem]) -> list[Served]:
    return [serve(new_engine(model, 64, "off"), [item])[0][0] for item in items]


def serve_together(
    model: LanguageModel, blocks: int, items: Sequence[GenerationItem], alone: list[Served]
) -> Driver:
    """Serve items in small steps on several threads. Compare with `alone`, by turns."""
    torch.set_num_threads(3)
    served, driver = serve(new_engine(model, blocks, "auto"), items, seed=1)
    assert driver.partial > 0
    assert 0 < driver.total("accepted") < driver.total("drafted")
    assert list(map(outputs, served)) == list(map(outputs, alone)) * (len(items) // len(alone))
    return driver


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 70})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", 70)


DTYPES = ("float32", "bfloat16")
HYBRIDS = ("qwen3.5", "lfm2", "bamba", "granite4", "qwen3-next", "kimi-linear")
# with a router that has a bias, scores of groups, and a shared expert with a gate
MIXTURES = ("gpt-oss", "deepseek-v3", "qwen2-moe", "mixtral")
# with transposed weights, soft-capped attention, and positions that are looked up
DENSE = ("gpt2", "gemma2", "opt")
# with a router that is a linear layer, gates by softplus, an activation of some columns, and steps
# in time that are limited in prompts
FAMILIES = ("phimoe", "laguna", "modernbert-decoder", "nemotron_h")
# with experts that torch multiplies by, one after another and all at once
STACKED = ("longcat_flash", "jetmoe", "llama4_text")


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("source", "dtype", "quantization"),
    matrix(
        [
            *(("llama", d, q) for d in DTYPES for q in ("none", "int8", "int4")),
            ("youtu", "bfloat16", "none"),  # latent attention
            ("youtu", "float32", "int8"),
            *((name, dtype, "none") for dtype in DTYPES for name in HYBRIDS),
        ],
        ("llama", "bfloat16", "none"),
        ("llama", "bfloat16", "int4"),
        ("llama", "float32", "int8"),
        ("youtu", "bfloat16", "none"),
        ("qwen3.5", "float32", "none"),
        ("granite4", "bfloat16", "none"),
    ),
)
def test_outputs_are_those_of_each_request_alone(
    source: str, dtype: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language(source, dtype, quantization)
    rounds = 2 if model.recurrent else 3
    alone = serve_alone(model, requests(rounds))
    draft_from(alone, monkeypatch)
    driver = serve_together(model, 9, requests(rounds), alone)
    assert driver.total("preempted") > 0
    if model.recurrent:  # a state is cached where a prompt has ended
        driver = serve_together(model, 200, [*requests(), *requests()], alone)
    assert driver.total("cached_tokens") > 0


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    matrix(
        [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
        ("bfloat16", "none"),
        ("float32", "none"),
    ),
)
def test_outputs_with_adapters_are_those_of_each_request_alone(
    dtype: str, quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = language("llama", dtype, quantization)
    adapters: list[Adapter | None] = [None]
    for seed, rank in ((1, 4), (2, 9)):
        tiny_adapters.make(tmp_path / str(seed), folder(), seed, r=rank)
        adapters.append(adapter := Adapter("", str(seed), str(tmp_path)))
        new_engine(model, 64, "off").load_adapter(adapter)
    assert model.lora.is_native

    def items() -> list[GenerationItem]:
        made = requests()
        for number, item in enumerate(made):
            item.payload = replace(item.payload, adapter=adapters[number % 3])
        return made

    alone = serve_alone(model, items())
    draft_from(alone, monkeypatch)
    serve_together(model, 12, items(), alone)


@pytest.mark.parametrize(
    ("source", "dtype"),
    matrix(
        [
            *((name, dtype) for dtype in DTYPES for name in (*MIXTURES, *DENSE)),
            *((kind, "float32") for kind in (*FAMILIES, *STACKED)),
            *((kind, "bfloat16") for kind in ("phimoe", "nemotron_h", "llama4_text")),
        ],
        ("deepseek-v3", "float32"),
        ("gpt2", "float32"),
        *((kind, "float32") for kind in (*FAMILIES, "longcat_flash")),
    ),
)
def test_outputs_of_other_models_are_those_of_each_request_alone(source: str, dtype: str) -> None:
    model = language(source, dtype)
    alone = serve_alone(model, requests())
    torch.set_num_threads(3)
    served, driver = serve(new_engine(model, 9, "off"), requests(), seed=1)
    assert driver.total("preempted") > 0
    assert list(map(outputs, served)) == list(map(outputs, alone))


@pytest.mark.parametrize(("kind", "dtype"), [("dbrx", "float32"), ("mamba", "bfloat16")])
def test_rows_that_torch_computes_are_reported(
    kind: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    paged_runner(kind, dtype)._use_native_ops()
    assert "outputs depend on the batch" in caplog.text
    assert "weights stay as they are" not in caplog.text


def test_rows_that_depend_on_the_start_of_their_chunk_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tiny Llama 4 scales queries by their row and then by their position."""
    runner = paged_runner("llama4", "bfloat16")
    runner._use_native_ops()
    assert runner.metadata is NativeMetadata
    assert "outputs depend on the batch" in caplog.text


# ── the compiled model takes over ──


class Compiled:
    """The model with reversed logits, in place of a compiled one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> tuple[Tensor]:
        logits: Tensor = self.model(**inputs)[0]
        return (logits.flip(-1),)


def test_a_sequence_keeps_the_model_that_it_began_with() -> None:
    prompts = [list(range(start, 42)) for start in (10, 11)]

    def new_request(prompt: list[int]) -> GenerationItem:
        return request(prompt, max_tokens=40)

    eager, compiled = engine("llama", speculation="off"), engine("llama", speculation="off")
    runner_of(compiled)._compiled = Compiled(runner_of(compiled).model)
    runner_of(compiled).compile_state = "done"
    of_eager, of_compiled = (
        [served.ids for served in serve(run, map(new_request, prompts))[0]]
        for run in (eager, compiled)
    )

    generator = engine("llama", blocks=8, speculation="off")
    runner, driver = runner_of(generator), Driver(generator)
    runner.compile_state = "running"
    early = [driver.add(new_request(prompt)) for prompt in prompts]
    driver.step()
    runner._compiled, runner.compile_state = Compiled(runner.model), "done"
    late = driver.add(new_request(prompts[0]))
    driver.finish()
    assert driver.total("preempted") > 0
    assert [served.ids for served in early] == of_eager
    assert late.ids == of_compiled[0] != of_eager[0]
    assert late.sequences[0].cached == 0, "it reads keys of the eager model"


class Step(NamedTuple):
    logits: Tensor
    products: int  # of oneDNN


def steps_by_form(
    native: Literal["never", "later", "first"], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Step]]:
    """Serve a request, with native operations from the first or a later step on, and then an equal
    one beside it. Return the steps of each form."""
    runner = load_paged(folder(), speculation="off")
    runner.compile_state = "running"
    options = GeneratorOptions("", speculation="off")
    driver, steps = Driver(paged_engine(runner, options)), defaultdict[str, list[Step]](list)
    forward, multiply, products = runner.forward, PackedLinear.onednn_product, list[None]()

    def counted(layer: PackedLinear, x: Tensor) -> Tensor:
        products.append(None)
        return multiply(layer, x)

    def recorded(batch: Batch, sampled: Tensor | None = None) -> Tensor:
        products.clear()
        logits = forward(batch, sampled).clone()
        steps[batch.chunks[0].sequence.form].append(Step(logits, len(products)))
        return logits

    monkeypatch.setattr(PackedLinear, "onednn_product", counted)
    runner.forward = recorded  # type: ignore[method-assign]
    prompt = list(range(10, 42))
    if native == "first":
        runner._use_native_ops()
    driver.add(request(prompt, max_tokens=8))
    driver.step()
    if native == "later":
        runner._use_native_ops()
        late = driver.add(request(prompt, max_tokens=8))
    driver.finish()
    assert native != "later" or late.sequences[0].cached == 0, "it reads keys of the torch form"
    monkeypatch.undo()
    return steps


def test_a_sequence_ends_on_torchs_operations_if_it_began_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, later, first = (steps_by_form(n, monkeypatch) for n in ("never", "later", "first"))
    assert [*never] == ["torch"]
    assert [*first] == ["eager"]
    for form, expected in (never | first).items():
        assert len(later[form]) == len(expected) == 8
        assert [step.products for step in later[form]] == [step.products for step in expected]
        for actual, step in zip(later[form], expected, strict=True):
            assert torch.equal(actual.logits, step.logits)
    assert all(step.products for step in later["torch"])
    assert not any(step.products for step in later["eager"])
