"""Linear layers that are called on one input: found by what they are called on, and one product."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny_decoders
from worker.model.cpu.fused_linear import FusedLinear, FusedSlice, find_shared_inputs
from worker.model.cpu.linear import (
    Int8Linear,
    PackedLinear,
    pack_weights,
    quantize_weights,
    unpack_weights,
)
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.paging import PagingCheck

torch.set_num_threads(1)

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj"]
SHARED_EXPERT = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]


class Fan(nn.Module):
    """Two layers on one input, a third on what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(48, 80), nn.Linear(48, 16, bias=False)
        self.last = nn.Linear(16, 4)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.one(x).sum(-1, keepdim=True) + self.last(self.two(x))
        return made


class ChangedBetween(Fan):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        one = self.one(x).sum(-1, keepdim=True)
        made: Tensor = one + self.last(self.two(x.mul_(2)))
        return made


class OtherDtype(Fan):
    """Which takes the input as it is, and makes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.two.double()

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.two(x)
        except RuntimeError:
            return self.last(self.one(x)[..., :16])  # type: ignore[no-any-return]  # torch's
        return x


class NowAndThen(Fan):
    """Its second layer is called on another tensor, every other time."""

    def forward(self, x: Tensor) -> Tensor:
        self.even = not getattr(self, "even", False)
        made: Tensor = self.one(x).sum() + self.last(self.two(x if self.even else x + 1))
        return made


class LooksAtWeights(Fan):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.two.weight.dtype))


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
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_an_architectures_layers_are_found_and_say_the_same(
    architecture: str, expected: list[list[str]], quantization: str
) -> None:
    options = GeneratorOptions(
        str(tiny_decoders.folder(architecture)), dtype="float32", device="cpu"
    )
    language = load_language_model(options)
    check = PagingCheck(language)
    check.page()
    found = find_shared_inputs(language.model, check.compare)
    layers = [f"model.layers.{number}." for number in range(2)]
    assert found == [[at + name for name in names] for at in layers for names in expected]
    language.pack_weights(quantization, check.compare)
    assert sorted(parts(language.model)) == sorted(name for names in found for name in names)
    if quantization == "none":
        check.compare()
    else:
        _compare_with_separate_int8(language, options)


def _compare_with_separate_int8(language: LanguageModel, options: GeneratorOptions) -> None:
    other = load_language_model(options)
    other.pack_weights("int8")
    assert not parts(other.model)
    language.model.set_attn_implementation("eager")
    other.model.set_attn_implementation("eager")
    ids = torch.arange(1, 31)[None]
    with torch.inference_mode():
        for width in (30, 2):
            ours, theirs = (
                each.model(ids[:, :width], use_cache=False).logits for each in (language, other)
            )
            language.compare(ours, theirs)


@pytest.mark.parametrize("kind", [ChangedBetween, NowAndThen, OtherDtype])
def test_what_is_not_always_called_on_one_input_stays_apart(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    x = torch.randn(3, 48)
    assert find_shared_inputs(model, lambda: (model(x), model(x))) == []
    assert find_shared_inputs(Fan(), lambda: None) == []


def test_a_model_that_uses_weights_without_calling_their_layer_stays_as_it_is() -> None:
    model = LooksAtWeights()
    before = copy.deepcopy(model.state_dict())
    packed(model)
    assert type(model.one) is type(model.two) is nn.Linear
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def emulated(monkeypatch: pytest.MonkeyPatch, dtype: str) -> torch.dtype:
    monkeypatch.setattr("worker.model.cpu.linear.has_bfloat16", lambda: dtype != "emulated")
    return torch.float32 if dtype == "float32" else torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "emulated"])
def test_parts_give_the_products_of_the_layers_and_can_be_undone(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Fan().to(emulated(monkeypatch, dtype))
    plain = copy.deepcopy(model)
    x = torch.randn(1, 5, 48).to(model.one.weight.dtype)
    pack_weights(model, 10**9, lambda: model(x))
    assert parts(model) == ["one", "two"]
    for ours, theirs in ((model.one, plain.one), (model.two, plain.two)):
        made, exact = ours(x), theirs(x)
        assert made.dtype == exact.dtype
        torch.testing.assert_close(made, exact, atol=1e-5, rtol=2**-6)
    unpack_weights(model)
    assert type(model.one) is type(model.two) is nn.Linear
    assert model.two.bias is None
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name])


def test_originals_go_before_their_product_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Fan()
    originals = [weakref.ref(each.weight) for each in (model.one, model.two, model.last)]
    alive: list[int] = []
    ordinary: Any = PackedLinear.__init__

    def init(made: Any, *arguments: Any) -> None:
        alive.append(sum(ref() is not None for ref in originals))
        ordinary(made, *arguments)

    monkeypatch.setattr(PackedLinear, "__init__", init)
    packed(model)
    assert alive == [1, 1]


# ── the product between the calls of its parts ──


class Counted(nn.Module):
    """As a layer of 6 outputs; counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.made: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = x.repeat_interleave(6, -1)
        self.made = weakref.ref(made)
        return made


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def three(counted: Counted) -> list[FusedSlice]:
    shared = FusedLinear(counted, [1, 2, 3])
    return [FusedSlice(shared, place, biased=False) for place in range(3)]


def called(three: list[FusedSlice], x: Tensor) -> list[float]:
    return [float(part(x).sum()) for part in three]


@pytest.mark.parametrize("inference", [True, False])
def test_parts_of_one_input_are_computed_once_and_the_product_goes_with_the_last(
    counted: Counted, three: list[FusedSlice], inference: bool
) -> None:
    with torch.inference_mode(inference):
        for times in (1, 2):
            assert called(three, torch.ones(1, 1)) == [1, 2, 3]
            assert counted.calls == times
            assert counted.made is not None
            assert counted.made() is None


def test_another_input_of_the_same_shape_is_computed_anew(
    counted: Counted, three: list[FusedSlice]
) -> None:
    one, other = torch.ones(1, 1), torch.full((1, 1), 10.0)
    assert [float(three[0](one)), float(three[1](other).sum())] == [1, 20]
    assert called(three, other) == [10, 20, 30]
    del one
    assert float(three[1](torch.ones(1, 1)).sum()) == 2, "perhaps at the same address"


@pytest.mark.parametrize("inference", [True, False])
def test_an_input_that_is_changed_in_place_is_computed_anew(
    counted: Counted, three: list[FusedSlice], inference: bool
) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(1, 1)
        assert called(three, x) == [1, 2, 3]
        assert called(three, x.mul_(10)) == [10, 20, 30]
        if not inference:  # there torch counts no changes; layers of such a model stay apart
            three[0](x)
            assert float(three[1](x.mul_(10)).sum()) == 200


def test_parts_out_of_turn_are_right_too(counted: Counted, three: list[FusedSlice]) -> None:
    x = torch.ones(1, 1)
    assert [float(three[place](x).sum()) for place in (2, 1, 0, 0, 1, 1, 2)] == [
        3,
        2,
        1,
        1,
        2,
        2,
        3,
    ]


def test_int8_parts_are_one_product_too() -> None:
    model: Any = Fan()
    x = torch.randn(3, 48)
    exact = model(x)
    quantize_weights(model, 10**9, lambda: model(x))
    assert parts(model) == ["one", "two"]
    assert isinstance(model.one.shared.layer, Int8Linear)
    assert float((model(x) - exact).norm() / exact.norm()) < 0.05
