"""Packed experts give the output of transformers' eager ones, and only those that are hit run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests import tiny_decoders
from tests.matrix import matrix
from worker.backends.cpu.experts import NAME, packed_experts
from worker.backends.cpu.linear import (
    native_quantized_matches,
    pack_weights,
    quantize_weights,
    unpack_weights,
)
from worker.backends.cpu.linear_layers import Int4Linear, Int8Linear, PackedLinear
from worker.backends.native_attention import load_native_ops

# a plain one; with biases, transposed and interleaved; with a shared expert
MODELS = ("qwen3-moe", "gpt-oss", "deepseek-v3", "mixtral", "qwen2-moe", "granite4")
FREE = 10**10


def loaded(name: str) -> Any:
    auto: Any = AutoModelForCausalLM
    folder = tiny_decoders.folder(name)
    return auto.from_pretrained(folder, experts_implementation="eager").eval()


@torch.inference_mode()
def logits(model: Any, rows: int = 40) -> Tensor:
    ids = torch.arange(7, 7 + rows)[None]
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def packed(name: str) -> Any:
    model = loaded(name)
    pack_weights(model, FREE)
    return model


@pytest.mark.parametrize("name", matrix(MODELS, "qwen3-moe", "gpt-oss"))
@pytest.mark.parametrize("rows", [1, 40])
def test_packed_experts_equal_eager_ones(name: str, rows: int) -> None:
    model = packed(name)
    assert packed_experts(model)
    assert model.config._experts_implementation == NAME
    torch.testing.assert_close(
        logits(model, rows), logits(loaded(name), rows), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_unpacked_experts_are_the_original_ones(name: str) -> None:
    model, original = packed(name), loaded(name)
    unpack_weights(model)
    weights = dict(model.named_parameters())
    for key, weight in original.named_parameters():
        assert torch.equal(weights[key], weight), key
    assert model.config._experts_implementation == "eager"
    assert torch.equal(logits(model), logits(original))


def test_a_model_whose_packed_experts_differ_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, checks = loaded("qwen3-moe"), []

    def check() -> None:
        checks.append(model.config._experts_implementation)
        if checks[-1] == NAME:
            raise ValueError("they differ")

    pack_weights(model, FREE, check)
    assert "experts stay as they are" in caplog.text
    assert not packed_experts(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    torch.testing.assert_close(logits(model), logits(loaded("qwen3-moe")), rtol=1e-4, atol=1e-4)


def test_only_the_experts_that_are_hit_run() -> None:
    model = packed("qwen3-moe")
    (experts, *_) = packed_experts(model)
    calls: list[int] = []

    def counted(number: int, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            calls.append(number)
            out: Tensor = layer(x)
            return out

        return run

    experts.up = [counted(n, layer) for n, layer in enumerate(experts.up)]
    hidden = torch.randn(3, 32)
    index, weights = torch.tensor([[2, 0], [0, 2], [2, 0]]), torch.full((3, 2), 0.5)
    with torch.inference_mode():
        experts.run(hidden, index, weights)
    assert calls == [0, 2]


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Int8Linear), ("int4", Int4Linear)])
@torch.inference_mode()
def test_quantized_experts_equal_eager_ones_of_the_same_values(
    quantization: str, kind: Callable[[Tensor, Tensor | None], nn.Module]
) -> None:
    def values(layer: Any) -> Tensor:
        rows: Tensor = layer(torch.eye(layer.in_features))
        return rows.T

    model, eager = loaded("qwen3-moe"), loaded("qwen3-moe")
    quantize_weights(model, 0, quantization=quantization)
    for experts, plain in zip(
        packed_experts(model),
        (m for m in eager.modules() if hasattr(m, "is_transposed")),
        strict=True,
    ):
        for name, layers in (("gate_up_proj", experts.up), ("down_proj", experts.down)):
            for number, layer in enumerate(layers):
                assert type(layer) is type(kind(torch.zeros(1, 1), None))
                getattr(plain, name)[number] = values(layer)
    for name, layer in eager.named_modules():
        if type(layer) is nn.Linear:
            of_layer = Int8Linear if name == "lm_head" else kind
            layer.weight.copy_(values(of_layer(layer.weight, None)))
    expected = logits(eager)
    differences = (logits(model) - expected)[0].abs().amax(-1) / expected.abs().max()
    close = int((differences < 0.05).sum())
    assert close >= len(differences) - 2, "rounding may change the expert of a near tie"


@torch.inference_mode()
def test_the_compiler_keeps_the_experts_in_its_graph() -> None:
    model = packed("qwen3-moe")
    compiled: Any = torch.compile(model.model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 9):
        ids = torch.arange(7, 7 + rows)[None]
        expected = model.model(input_ids=ids, use_cache=False)[0]
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False)[0], expected)


@torch.inference_mode()
def test_int8_experts_at_once_give_the_products_of_each() -> None:
    load_native_ops()
    if not native_quantized_matches("int8", torch.bfloat16):
        pytest.skip("no kernel for int8 weights on this CPU")
    model = loaded("qwen3-moe").bfloat16()
    quantize_weights(model, 0, native=True)
    (experts, *_) = packed_experts(model)
    assert experts.products
    rows, counts = torch.randn(30, 32).bfloat16(), torch.tensor([3, 0, 20, 7])
    for products, layers in zip(experts.products, (experts.up, experts.down), strict=True):
        parts = zip(layers, torch.split(rows, counts.tolist()), strict=True)
        expected = torch.cat([layer(part) for layer, part in parts if len(part)])
        assert torch.equal(products(rows, counts), expected)
        with pytest.raises(RuntimeError, match="experts_linear of"):
            products(rows, counts + 1)
