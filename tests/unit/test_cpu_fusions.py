"""CPU fusions of a vision encoder keep its output."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from worker.backends.cpu.linear import ROUNDING, pack_weights
from worker.backends.cpu.linear_layers import PackedLinear
from worker.vision.cpu_fusions import apply_cpu_fusions


class Layer(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.activation_fn = ACT2FN[activation]
        self.contiguous: list[bool] = []  # of the inputs

    def forward(self, hidden: Tensor) -> Tensor:
        self.contiguous.append(hidden.is_contiguous())
        output: Tensor = hidden + self.fc2(self.activation_fn(self.fc1(hidden)))
        return output


class Encoder(nn.Module):
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
def test_fused_encoder_gives_the_same_output(activation: str) -> None:
    torch.manual_seed(0)
    model: Any = Encoder(activation).bfloat16()
    pack_weights(model, 1 << 30)
    features_first = torch.randn(1, 16, 40).bfloat16().transpose(1, 2)
    expected = model(features_first).float()
    language: Any = SimpleNamespace(device=torch.device("cpu"), model=model, decoder=model.decoder)
    apply_cpu_fusions(language)
    for layer in (*model.layers, model.decoder):
        layer.contiguous.clear()
    got = model(features_first).float()
    assert float((got - expected).abs().max()) <= 2 * ROUNDING[torch.bfloat16] * float(
        expected.abs().max()
    )
    assert [layer.contiguous for layer in model.layers] == [[True], [True]]
    fusible = activation != "quick_gelu"
    for layer in model.layers:
        assert isinstance(layer.fc1, PackedLinear)
        assert isinstance(layer.activation_fn, nn.Identity) == fusible
    assert type(model.decoder.activation_fn) is type(ACT2FN[activation])


@torch.inference_mode()
def test_module_that_applies_its_activation_elsewhere_is_not_fused() -> None:
    """The module has the attributes of a fusible one, in another order."""

    class Other(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = self.fc2(self.fc1(self.activation_fn(hidden)))
            return output

    model: Any = nn.Module()
    model.other, model.decoder = Other("gelu").bfloat16(), nn.Module()
    pack_weights(model, 1 << 30)
    x = torch.randn(3, 16).bfloat16()
    expected = model.other(x)
    language: Any = SimpleNamespace(device=torch.device("cpu"), model=model, decoder=model.decoder)
    apply_cpu_fusions(language)
    assert torch.equal(model.other(x), expected)
