"""Linear layers that are called on one input are found in a forward and become one product."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny_decoders
from worker.backends.cpu.fused_linear import FusedLinear, FusedSlice, find_shared_inputs
from worker.backends.cpu.linear import pack_weights, quantize_weights, unpack_weights
from worker.backends.cpu.linear_layers import PackedLinear
from worker.device.self_check import compare
from worker.model.language_model import (
    GeneratorOptions,
    LanguageModel,
    fuse_weights,
    load_language_model,
)
from worker.model.paging import PagingCheck

torch.set_num_threads(1)

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj"]
SHARED_EXPERT = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]


class Fan(nn.Module):
    """Two layers on one input, a third on the output of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(48, 80), nn.Linear(48, 16, bias=False)
        self.last = nn.Linear(16, 4)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x).sum(-1, keepdim=True) + self.last(self.two(x))
        return out


class ChangedBetween(Fan):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        one = self.one(x).sum(-1, keepdim=True)
        out: Tensor = one + self.last(self.two(x.mul_(2)))
        return out


class OtherDtype(Fan):
    """The second layer has another dtype and fails on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.two.double()

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.two(x)
        except RuntimeError:
            return self.last(self.one(x)[..., :16])  # type: ignore[no-any-return]  # torch's
        return x


class AlternatingInput(Fan):
    """The second layer is called on another tensor every other time."""

    def forward(self, x: Tensor) -> Tensor:
        self.even = not getattr(self, "even", False)
        out: Tensor = self.one(x).sum() + self.last(self.two(x if self.even else x + 1))
        return out


class ReadsDtypes(Fan):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.two.weight.dtype))


class ReadsWeights(Fan):
    def forward(self, x: Tensor) -> Tensor:
        two = nn.functional.linear(x, self.two.weight.float())
        out: Tensor = self.one(x).sum(-1, keepdim=True) + self.last(two) + self.two(x).sum()
        return out


class NeedsLinear(Fan):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.one, nn.Linear):
            raise TypeError("one is no linear layer")
        return super().forward(x)


def packed(model: nn.Module) -> None:
    x = torch.randn(3, 48)
    pack_weights(model, 10**9, lambda: model(x))


def parts(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FusedSlice)]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", [MLP, QKV]),
        ("qwen2", [MLP, QKV]),
        ("gemma", [MLP, QKV]),
        ("qwen2-moe", [SHARED_EXPERT, QKV]),
        ("mixtral", [QKV]),
        ("gpt2", []),
        ("phi3", []),
        ("gpt-neox", []),
    ],
)
@pytest.mark.parametrize("quantization", ["fused only", "none", "int8", "int4"])
def test_an_architectures_layers_are_found_and_give_the_same_logits(
    architecture: str, expected: list[list[str]], quantization: str
) -> None:
    options = GeneratorOptions(
        str(tiny_decoders.folder(architecture)), dtype="float32", device="cpu"
    )
    language = load_language_model(options)
    check = PagingCheck(language)
    check.enable()
    groups = find_shared_inputs(language.model, check.compare)
    layers = [f"model.layers.{number}." for number in range(2)]
    assert groups == [[at + name for name in names] for at in layers for names in expected]
    if quantization == "fused only":  # as on a GPU
        fuse_weights(language.model, check.compare)
    else:
        language.pack_weights(quantization, check.compare)
    assert sorted(parts(language.model)) == sorted(name for names in groups for name in names)
    if quantization in ("fused only", "none"):
        check.compare()
    else:
        _compare_with_separate(language, options, quantization)


def _compare_with_separate(
    language: LanguageModel, options: GeneratorOptions, quantization: str
) -> None:
    other = load_language_model(options)
    other.pack_weights(quantization, lambda: None)
    assert not parts(other.model)
    language.model.set_attn_implementation("eager")
    other.model.set_attn_implementation("eager")
    ids = torch.arange(1, 31)[None]
    with torch.inference_mode():
        for width in (30, 2):
            ours, theirs = (
                model.model(ids[:, :width], use_cache=False).logits for model in (language, other)
            )
            compare(ours, theirs, language.tolerance)


@pytest.mark.parametrize("kind", [ChangedBetween, AlternatingInput, OtherDtype])
def test_layers_that_do_not_always_share_an_input_stay_separate(
    kind: Callable[[], nn.Module],
) -> None:
    model = kind()
    x = torch.randn(3, 48)
    assert find_shared_inputs(model, lambda: (model(x), model(x))) == []
    assert find_shared_inputs(Fan(), lambda: None) == []


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_only_a_layer_whose_weight_is_read_by_others_stays_plain(quantization: str) -> None:
    model, x = ReadsWeights(), torch.randn(3, 48)
    exact = model(x)
    if quantization == "none":
        packed(model)
        torch.testing.assert_close(model(x), exact)
    else:
        quantize_weights(model, 10**9, lambda: model(x))
        torch.testing.assert_close(model(x), exact, rtol=0.1, atol=0.1)
    assert isinstance(model.two, nn.Linear)
    assert not isinstance(model.one, nn.Linear)
    assert not isinstance(model.last, nn.Linear)


def test_layers_whose_weights_dtype_is_read_are_fused() -> None:
    model, x = ReadsDtypes(), torch.randn(3, 48)
    exact = model(x)
    packed(model)
    assert parts(model) == ["one", "two"]
    torch.testing.assert_close(model(x), exact)


@pytest.mark.parametrize("fuses_only", [False, True])
def test_a_model_that_fails_without_its_own_layers_stays_unchanged(fuses_only: bool) -> None:
    model, x = NeedsLinear(), torch.randn(3, 48)
    before = copy.deepcopy(model.state_dict())
    if fuses_only:
        with pytest.raises(TypeError, match="no linear layer"):
            fuse_weights(model, lambda: model(x))
    else:
        packed(model)
    assert type(model.one) is type(model.two) is nn.Linear
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


# packed where oneDNN has bfloat16 on this CPU
BFLOAT16 = ["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []


def emulated(monkeypatch: pytest.MonkeyPatch, dtype: str) -> torch.dtype:
    monkeypatch.setattr(
        "worker.backends.cpu.linear_layers.has_bfloat16", lambda: dtype != "emulated"
    )
    return torch.float32 if dtype == "float32" else torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", *BFLOAT16, "emulated"])
def test_slices_give_the_products_of_the_layers_and_can_be_undone(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Fan().to(emulated(monkeypatch, dtype))
    plain = copy.deepcopy(model)
    x = torch.randn(1, 5, 48).to(model.one.weight.dtype)
    pack_weights(model, 10**9, lambda: model(x))
    assert parts(model) == ["one", "two"]
    for ours, theirs in ((model.one, plain.one), (model.two, plain.two)):
        actual, exact = ours(x), theirs(x)
        assert actual.dtype == exact.dtype
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=2**-6)
    unpack_weights(model)
    assert type(model.one) is type(model.two) is nn.Linear
    assert model.two.bias is None
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name])


def test_originals_are_freed_before_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Fan()
    originals = [weakref.ref(layer.weight) for layer in (model.one, model.two, model.last)]
    alive: list[int] = []
    original: Any = PackedLinear.__init__

    def init(layer: Any, *arguments: Any) -> None:
        alive.append(sum(ref() is not None for ref in originals))
        original(layer, *arguments)

    monkeypatch.setattr(PackedLinear, "__init__", init)
    packed(model)
    assert alive == [1, 1]


# ── the product between the calls of its slices ──


class Counted(nn.Module):
    """A layer of 6 outputs that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.out: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = x.repeat_interleave(6, -1)
        self.out = weakref.ref(out)
        return out


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def three(counted: Counted) -> list[FusedSlice]:
    fused = FusedLinear(counted, [1, 2, 3])
    return [FusedSlice(fused, index, has_bias=False) for index in range(3)]


def called(three: list[FusedSlice], x: Tensor) -> list[float]:
    return [float(part(x).sum()) for part in three]


@pytest.mark.parametrize("inference", [True, False])
def test_slices_of_one_input_share_a_product_that_is_freed_with_the_last(
    counted: Counted, three: list[FusedSlice], inference: bool
) -> None:
    with torch.inference_mode(inference):
        for times in (1, 2):
            assert called(three, torch.ones(1, 1)) == [1, 2, 3]
            assert counted.calls == times
            assert counted.out is not None
            assert counted.out() is None


@pytest.mark.parametrize("inference", [True, False])
def test_slices_of_other_inputs_or_out_of_order_are_right(
    three: list[FusedSlice], inference: bool
) -> None:
    with torch.inference_mode(inference):
        one, other = torch.ones(1, 1), torch.full((1, 1), 10.0)
        assert [float(three[0](one)), float(three[1](other).sum())] == [1, 20]
        assert called(three, other) == [10, 20, 30]
        del one
        assert float(three[1](torch.ones(1, 1)).sum()) == 2, "perhaps at the same address"
        assert called(three, other.mul_(10)) == [100, 200, 300], "changed in place"
        x, order = torch.ones(1, 1), (2, 1, 0, 0, 1, 1, 2)
        assert [float(three[n](x).sum()) for n in order] == [n + 1 for n in order]
