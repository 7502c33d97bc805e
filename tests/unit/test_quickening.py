"""A vision tower that is made quicker says the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from worker.model.cpu.linear import ROUNDING, PackedLinear, pack_weights
from worker.vision.cpu_fusions import apply_cpu_fusions


class Layer(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.activation_fn = ACT2FN[activation]
        self.seen: list[bool] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.is_contiguous())
        made: Tensor = hidden + self.fc2(self.activation_fn(self.fc1(hidden)))
        return made


class Tower(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(activation) for _ in range(2))
        self.decoder = Layer(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu", "quick_gelu"])
@torch.inference_mode()
def test_quickened_tower_says_the_same(activation: str) -> None:
    torch.manual_seed(0)
    model: Any = Tower(activation).bfloat16()
    pack_weights(model, 1 << 30)
    features_first = torch.randn(1, 16, 40).bfloat16().transpose(1, 2)
    expected = model(features_first).float()
    language: Any = SimpleNamespace(device=torch.device("cpu"), model=model, decoder=model.decoder)
    apply_cpu_fusions(language)
    for layer in (*model.layers, model.decoder):
        layer.seen.clear()
    got = model(features_first).float()
    assert float((got - expected).abs().max()) <= 2 * ROUNDING[torch.bfloat16] * float(
        expected.abs().max()
    )
    assert [layer.seen for layer in model.layers] == [[True], [True]]
    known = activation != "quick_gelu"
    for layer in model.layers:
        assert isinstance(layer.fc1, PackedLinear)
        assert isinstance(layer.activation_fn, nn.Identity) == known
    assert type(model.decoder.activation_fn) is type(ACT2FN[activation])


@torch.inference_mode()
def test_product_whose_activation_is_another_stays_as_it_is() -> None:
    """A module of these names that does other things with them."""

    class Other(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            made: Tensor = self.fc2(self.fc1(self.activation_fn(hidden)))
            return made

    model: Any = nn.Module()
    model.other, model.decoder = Other("gelu").bfloat16(), nn.Module()
    pack_weights(model, 1 << 30)
    x = torch.randn(3, 16).bfloat16()
    expected = model.other(x)
    language: Any = SimpleNamespace(device=torch.device("cpu"), model=model, decoder=model.decoder)
    apply_cpu_fusions(language)
    assert torch.equal(model.other(x), expected)
