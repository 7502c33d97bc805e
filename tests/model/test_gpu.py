"""Tests that need a GPU: kernels, flash attention, CUDA graphs, the compiled model, determinism."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_decoders
from tests.generating import Served, Woken, assert_greedy, prompts, request, runner_of, serve
from tests.unit.test_paged_attention import CASES, Case, Memory, expected, memory, mixes, name
from worker.backends.cpu.fused_linear import FusedSlice
from worker.backends.cuda.cuda_graphs import RowsMetadata
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator
from worker.engines.pipeline.packed_attention import (
    AttentionConfig,
    attend_by_flash,
    check_attention,
)
from worker.messages.generation import Sampling
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import AttentionBackend, attend, forward_context
from worker.model.language_model import GeneratorOptions

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
GPU = torch.device("cuda")
MIXTURES = ("qwen3-moe", "gpt-oss", "llama4")
FEW_ROWS = [case for case in CASES if case.kind in ("decodes", "spread decodes", "drafts")]


SIZES_AND_GROUPS = [(64, 1), (80, 2), (96, 4), (128, 8), (256, 4)]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 20}, {"softcap": 1.5}, {"sinks": True}]


@pytest.mark.parametrize("case", FEW_ROWS, ids=name)
def test_kernels_attend_as_expected(case: Case) -> None:
    mix = mixes(random.Random(name(case)), case.kind)
    cached = memory(case, mix, random.Random(0))
    step = RowsMetadata(on_gpu(cached.cache), len(cached.batch.ids), 200)
    step.fill(cached.batch, len(cached.batch.ids), 0)
    check(case, mix, cached, step, 1e-5)


@pytest.mark.parametrize(("size", "group"), SIZES_AND_GROUPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_with_prompts_attend_as_expected(
    size: int, group: int, options: dict[str, Any]
) -> None:
    """In bfloat16, where prompts use flash attention unless there are sinks or a soft-cap."""
    from worker.backends.cuda.varlen import VarlenMetadata

    case = Case(
        "all", heads=2 * group, key_heads=2, key_size=size, value_size=size, scale=0.1, **options
    )
    mix = mixes(random.Random(0), case.kind)
    cached = memory(case, mix, random.Random(0), dtype=torch.bfloat16)
    # without flash attention scores are rounded too
    tolerance = 4e-2 if case.sinks or case.softcap else 2e-2
    check(case, mix, cached, VarlenMetadata(on_gpu(cached.cache), cached.batch), tolerance)


def on_gpu(cache: KVCache) -> KVCache:
    copied = KVCache(cache.layers, len(cache.keys[0]), cache.dtype, GPU)
    copied.keys[0].copy_(cache.keys[0])
    copied.values[0].copy_(cache.values[0])
    return copied


def check(
    case: Case, mix: list[tuple[int, int]], cached: Memory, step: AttentionBackend, tolerance: float
) -> None:
    torch.manual_seed(0)
    widths = [width for _, width in mix]
    dtype = cached.cache.dtype
    query = [torch.randn(width, case.heads, case.key_size, dtype=dtype) for width in widths]
    new = [
        torch.cat([whole[start:] for (start, _), whole in zip(mix, sequences, strict=True)])
        for sequences in (cached.keys, cached.values)
    ]
    sinks = torch.randn(case.heads, dtype=dtype)
    q, k, v = (x.transpose(0, 1)[None].to(GPU) for x in (torch.cat(query), *new))
    with forward_context(step):
        gpu_sinks = sinks.to(GPU) if case.sinks else None
        out = attend(q, k, v, gpu_sinks, 0, case.scale, case.window, case.softcap)
    rows: Any = out[0].double().cpu()  # split is not annotated
    for n, actual in enumerate(rows.split(widths)):
        keys, values = cached.keys[n], cached.values[n]
        right = expected(case, query[n], keys, values, mix[n][0], sinks)
        torch.testing.assert_close(actual, right, atol=tolerance, rtol=tolerance)


def generator_of(model: str, dtype: str = "float32", **options: Any) -> GenerationEngine:
    folder = str(tiny_decoders.folder(model))
    options = {"compile": "off", "kv_cache_gb": 0.05, **options}
    generator = load_generator(GeneratorOptions(folder, dtype=dtype, device="cuda", **options))
    assert generator.info.batching == "continuous", generator.info.why
    return generator


@pytest.mark.parametrize("model", [*tiny_decoders.ARCHITECTURES, *tiny_decoders.RECURRENT])
def test_greedy_output_equals_generate(model: str) -> None:
    generator = generator_of(model)
    prompt_ids = prompts(1, (1, 2, 7, 16, 17, 33, 48, 60))
    served, _ = serve(generator, [request(ids) for ids in prompt_ids], seed=1)
    assert_greedy(model, served, 12)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *((model, dtype) for model in MIXTURES for dtype in ("float32", "bfloat16")),
        *((model, "float32") for model in ("qwen3.5", "lfm2", "mamba2")),
    ],
)
def test_steps_of_mixtures_and_recurrent_layers_are_captured(model: str, dtype: str) -> None:
    assert runner_of(generator_of(model, dtype))._graphs is not None


def test_what_makes_steps_fast_is_used() -> None:
    from worker.backends.cuda.varlen import VarlenMetadata

    runner = runner_of(generator_of("llama", "bfloat16"))
    assert runner._graphs is not None
    assert runner.metadata is VarlenMetadata
    assert any(isinstance(module, FusedSlice) for module in runner.language.model.modules())


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_attend_by_flash_attention(
    heads: tuple[int, int], window: int, causal: bool
) -> None:
    config = AttentionConfig(*heads, 64, 0.125, window, causal)
    check_attention(attend_by_flash, config, torch.bfloat16, GPU)


@pytest.fixture
def restored_operations() -> Iterator[None]:
    from worker.backends.cuda import batch_invariant

    yield
    batch_invariant.replace_operations()._destroy()
    batch_invariant.replace_operations.cache_clear()


@pytest.mark.usefixtures("restored_operations")
@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3-moe"])
def test_deterministic_outputs_are_those_of_each_request_alone(model: str) -> None:
    generator = generator_of(model, "bfloat16", deterministic=True)

    def outputs(seed: int | None, together: bool) -> list[Any]:
        items = [
            request(ids, Sampling(temperature=float(n % 3 > 0), seed=n, logprobs=2))
            for n, ids in enumerate(prompts(1, (1, 7, 17, 48, 100), count=2))
        ]
        if together:
            served, _ = serve(generator, items, seed)
        else:
            served = [serve(generator, [item])[0][0] for item in items]
        return list(map(output_of, served))

    alone = outputs(None, together=False)
    assert outputs(None, together=True) == alone
    assert outputs(1, together=True) == alone


def output_of(served: Served) -> Any:
    """Return the tokens, and the log-probabilities in every bit."""
    return served.ids, [[token.logprob for token in delta.logprobs] for delta in served.choices]


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_steps_are_captured_again_once_the_model_is_compiled(model: str) -> None:
    generator = generator_of(model, compile="on")
    runner = runner_of(generator)
    assert runner._graphs is not None
    first = runner._graphs
    deadline = time.monotonic() + 1200
    while generator.compile_state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert generator.compile_state == "done"
    prompt_ids = prompts(1, (1, 7, 17, 48))
    deadline = time.monotonic() + 300
    while runner._graphs is first:  # a size is captured in some of the steps
        assert time.monotonic() < deadline
        served, _ = serve(generator, [request(ids) for ids in prompt_ids], seed=1)
        assert_greedy(model, served, 12)
    served, _ = serve(generator, [request(ids) for ids in prompt_ids], seed=1)
    assert_greedy(model, served, 12)
    assert runner._graphs is not None


def test_prefixes_on_disk_are_read_into_the_memory_of_the_gpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"deterministic": True, "kv_cache_dir": str(tmp_path / "kv")}
    [prompt] = prompts(3, (90,), count=1)
    first = generator_of("llama", **options)
    (served,), _ = serve(first, [request(prompt)])
    first.flush()
    following = [*prompt, *served.ids[0], *prompt[:20]]
    (expected,), _ = serve(generator_of("llama", deterministic=True), [request(following)])
    second = generator_of("llama", **options)
    second.others = Woken()
    (again,), driver = serve(second, [request(following)])
    assert again.ids == expected.ids
    assert driver.total("read_tokens") >= len(prompt) // 16 * 16
