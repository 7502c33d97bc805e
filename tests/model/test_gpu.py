"""Tests that need a GPU: compiled kernels, CUDA graphs, the compiled model."""

import random
import time
from typing import Any

import pytest
import torch

from tests import tiny_decoders
from tests.generating import assert_greedy, prompts, request, runner_of, serve
from tests.unit.test_paged_attention import CASES, Case, expected, memory, mixes, name
from worker.generation.engine import GenerationEngine
from worker.generation.loading import load_generator
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import attend, forward_context
from worker.model.cuda_graphs import RowsMetadata
from worker.model.language_model import GeneratorOptions

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
GPU = torch.device("cuda")
FEW_ROWS = [case for case in CASES if case.kind in ("decodes", "spread decodes", "drafts")]


@pytest.mark.parametrize("case", FEW_ROWS, ids=name)
def test_kernels_attend_as_expected(case: Case) -> None:
    torch.manual_seed(0)
    mix = mixes(random.Random(name(case)), case.kind)
    cached = memory(case, mix, random.Random(0))
    cache = KVCache(cached.cache.layers, len(cached.cache.keys[0]), torch.float32, GPU)
    cache.keys[0].copy_(cached.cache.keys[0])
    cache.values[0].copy_(cached.cache.values[0])
    widths = [width for _, width in mix]
    step = RowsMetadata(cache, sum(widths), 200)
    step.fill(cached.batch, sum(widths), 0)
    query = [torch.randn(width, case.heads, case.key_size) for width in widths]
    new = [
        torch.cat([whole[start:] for (start, _), whole in zip(mix, sequences, strict=True)])
        for sequences in (cached.keys, cached.values)
    ]
    sinks = torch.randn(case.heads)
    q, k, v = (x.transpose(0, 1)[None].to(GPU) for x in (torch.cat(query), *new))
    with forward_context(step):
        gpu_sinks = sinks.to(GPU) if case.sinks else None
        out = attend(q, k, v, gpu_sinks, 0, case.scale, case.window, case.softcap)
    rows: Any = out[0].double().cpu()  # split is not annotated
    for n, actual in enumerate(rows.split(widths)):
        keys, values = cached.keys[n], cached.values[n]
        right = expected(case, query[n], keys, values, mix[n][0], sinks)
        torch.testing.assert_close(actual, right, atol=1e-5, rtol=1e-5)


def generator_of(model: str, compile: str = "off") -> GenerationEngine:
    folder = str(tiny_decoders.folder(model))
    options = GeneratorOptions(
        folder, dtype="float32", device="cuda", kv_cache_gb=0.05, compile=compile
    )
    generator = load_generator(options)
    assert generator.info.batching == "continuous", generator.info.why
    return generator


@pytest.mark.parametrize("model", tiny_decoders.ARCHITECTURES)
def test_greedy_output_equals_generate(model: str) -> None:
    generator = generator_of(model)
    prompt_ids = prompts(1, (1, 2, 7, 16, 17, 33, 48, 60))
    served, _ = serve(generator, [request(ids) for ids in prompt_ids], seed=1)
    assert_greedy(model, served, 12)


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
    for _ in range(2):  # a size is captured in each step
        served, _ = serve(generator, [request(ids) for ids in prompt_ids], seed=1)
        assert_greedy(model, served, 12)
    assert runner._graphs is not None
    assert runner._graphs is not first
