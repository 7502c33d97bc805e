"""Latent attention: the cache holds latents, and outputs are those of the model."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from tests import generating, tiny_adapters
from tests.causal_families import build
from tests.generating import generate, prompts, reference_of, request, runner_of, serve
from tests.model.test_lora import load, outputs, with_adapter
from tests.threads import compute_threads
from tests.tiny import hf, saved
from worker.backends import latent
from worker.backends.cpu import linear, linear_layers
from worker.backends.cpu.head_linear import HeadLinear, PackedHeads
from worker.backends.cpu.linear import use_native_linear
from worker.backends.cpu.linear_layers import PackedLinear
from worker.backends.native_attention import NativeMetadata
from worker.device.self_check import set_attention
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.text_pipeline import copy_sharing_weights
from worker.model.attention.paged import LATENT
from worker.model.compiling import compile_model
from worker.model.paged_runner import PagedRunner

LAYERS, HEADS, RANK, ROTARY, NOPE, VALUE = 2, 4, 16, 8, 8, 8  # of the tiny models


@cache
def folder(kind: str) -> Path:
    return saved(f"latent-{kind}", build(kind))


def loaded(kind: str, dtype: str = "float32", **options: Any) -> GenerationEngine:
    return generating.load(folder(kind), dtype=dtype, **options)


def numbers(runner: PagedRunner) -> int:
    """Return how many numbers the cache has for each token."""
    tensors = (*runner.cache.keys, *runner.cache.values)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    tokens = runner.cache.keys[0].shape[:2].numel()
    return sum(sizes.values()) // tokens // runner.language.dtype.itemsize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_latents(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runner = runner_of(loaded("youtu", dtype))
    assert numbers(runner) == LAYERS * (RANK + ROTARY)
    assert f"token_bytes={numbers(runner) * runner.language.dtype.itemsize} " in caplog.text
    before = LAYERS * HEADS * (NOPE + ROTARY + VALUE)
    assert (
        f"latents are stored layers=2 numbers={numbers(runner)} instead of {before}" in caplog.text
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("native", [False, True])
def test_log_probabilities_in_bfloat16_are_those_of_the_model(native: bool) -> None:
    runner = runner_of(loaded("youtu", "bfloat16", compile="off"))
    if native:
        runner._use_native_ops()
        assert runner.metadata is NativeMetadata
    ids = prompts(5, [60], 1)[0]
    ends = (0, 33, 59, 60)  # two chunks of the prompt and a decode
    rows = [
        runner.forward(Batch([Span(range(4), a, b - a)], ids[a:b], range(b - a)))
        for a, b in itertools.pairwise(ends)
    ]
    actual = torch.cat([part.float() for part in rows]).log_softmax(-1)
    own, exact = (
        hf.AutoModelForCausalLM.from_pretrained(folder("youtu"), dtype=kind)(
            torch.tensor([ids]), use_cache=False
        ).logits[0].detach().float().log_softmax(-1)
        for kind in (torch.bfloat16, torch.float32)
    )  # fmt: skip
    rounding = (own - exact).abs()
    error = (actual - exact).abs()
    assert float(error.max()) < 2 * float(rounding.max())
    assert float(error.mean()) < 1.5 * float(rounding.mean())


@pytest.mark.matrix
@pytest.mark.usefixtures("native")
def test_a_float32_model_is_compiled() -> None:
    runner = runner_of(loaded("deepseek_v3", compile="off"))
    runner._use_native_ops()
    compile_model(runner.language.model, runner._check_compiled)


def test_a_model_that_differs_keeps_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = latent.LatentProjections.expand

    def wrong(self: latent.LatentProjections, out: Tensor) -> Tensor:
        return expand(self, out) * 1.01

    monkeypatch.setattr(latent.LatentProjections, "expand", wrong)
    generator = loaded("youtu")
    [fallback] = generator.fallbacks
    assert (fallback.refused, fallback.serves) == ("latents", "keys and values of all heads")
    assert "logits differ" in fallback.reason
    runner = runner_of(generator)
    assert numbers(runner) == LAYERS * HEADS * (NOPE + ROTARY + VALUE)
    assert not any(hasattr(module, LATENT) for module in runner.language.model.modules())
    check_greedy(generator)


def check_greedy(generator: GenerationEngine) -> None:
    rows = prompts(3, (3, 20, 41), 1)
    served, _ = serve(generator, [request(row, max_tokens=8) for row in rows], seed=1)
    model = reference_of(folder("youtu"))
    assert outputs(served) == [generate(model, [row], 8)[0] for row in rows]


def test_adapters_of_the_expanded_layer_need_all_heads(tmp_path: Path) -> None:
    generator = loaded("youtu", lora_dir=str(tmp_path))
    assert numbers(runner_of(generator)) == LAYERS * HEADS * (NOPE + ROTARY + VALUE)
    path = tiny_adapters.make(tmp_path / "a", folder("youtu"), 1, ["kv_b_proj"])
    adapter = load(generator, path)
    rows = prompts(3, (3, 20, 41), 1)
    items = [with_adapter(request(row, max_tokens=8), adapter) for row in rows]
    merged = tiny_adapters.merged(folder("youtu"), path)
    expected = [generate(merged, [row], 8)[0] for row in rows]
    assert outputs(serve(generator, items, seed=1)[0]) == expected


@pytest.mark.parametrize("kind", ["youtu", "longcat_flash"])
def test_a_copy_for_generate_expands_latents(kind: str) -> None:
    """One has two attention modules in a layer."""
    runner = runner_of(loaded(kind))
    attending = [shape for shape in runner.language.layers if shape.heads]
    assert all(shape.values_in_keys for shape in attending)
    ids = torch.arange(1, 30)[None]
    copied = copy_sharing_weights(runner.language.model)
    set_attention(copied, "sdpa")
    own = hf.AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float32)
    with torch.inference_mode():
        actual, expected = (model(ids, use_cache=False).logits for model in (copied, own))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


# ── products of each head ──


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("emulated", [False, True])
def test_packed_heads_give_each_row_its_own_bits(
    dtype: torch.dtype, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layers, "has_bfloat16", lambda: not emulated)
    torch.manual_seed(0)
    plain = HeadLinear(torch.randn(5, 48, 70, dtype=dtype))
    model = torch.nn.Sequential(plain)
    use_native_linear(model)
    [packed] = model
    layer = linear._use_native_product(PackedLinear(torch.randn(48, 70, dtype=dtype), None))
    if not layer.native_width:
        pytest.skip("no kernel for packed weights on this CPU")
    assert isinstance(packed, PackedHeads)
    assert (packed.products is None) == (emulated and dtype == torch.bfloat16)
    x = torch.randn(5, 600, 70, dtype=dtype)
    whole = packed(x)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, plain(x), atol=40 * rounding, rtol=rounding)
    with compute_threads(2):
        for rows in (1, 2, 17, 300):
            assert torch.equal(packed(x[:, :rows]), whole[:, :rows])
