"""A vision tower on a CPU, quicker by two things that change no more than rounding.

Many towers hand on their patches as a convolution makes them, features first, and so do all their
sums: each layer norm would copy them. And where oneDNN multiplies, it makes what is activated as it
writes the product. At load, once the model's weights are laid out.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from worker.model.cpu.linear import ROUNDING, PackedLinear
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.vision")

# Activations, and what oneDNN calls them.
KNOWN = {
    type(ACT2FN["gelu_pytorch_tanh"]): ("gelu", "tanh"),
    type(ACT2FN["gelu"]): ("gelu", "none"),
}
ROWS = 40  # that are compared


@torch.inference_mode()
def apply_cpu_fusions(language: LanguageModel) -> None:
    """What is outside the decoder, in place."""
    if language.device.type != "cpu":
        return
    decoder, model = set(language.decoder.modules()), language.model
    fused = 0
    for module in [each for each in model.modules() if each not in decoder]:
        if isinstance(module, nn.ModuleList) and len(module):
            module[0].register_forward_pre_hook(_contiguous, with_kwargs=True)
        fused += _fuse(module)
    log.info("vision tower: activations made with their products=%d", fused)


def _contiguous(module: Any, given: Iterable[Any], named: dict[str, Any]) -> Any:
    ordered = {name: _ordered(each) for name, each in named.items()}
    return tuple(map(_ordered, given)), ordered


def _ordered(each: Any) -> Any:
    return each.contiguous() if isinstance(each, Tensor) else each


def _fuse(module: Any) -> bool:
    """Whether it is a product and its activation, and says the same in one."""
    product, activation = getattr(module, "fc1", None), getattr(module, "activation_fn", None)
    if type(product) is not PackedLinear or type(activation) not in KNOWN:
        return False
    x = torch.randn(ROWS, product.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(product.dtype)
    expected = module(x).float()
    product.activation, module.activation_fn = KNOWN[type(activation)], nn.Identity()
    difference = (module(x).float() - expected).abs().max()
    if float(difference) <= ROUNDING[product.dtype] * float(expected.abs().max()):
        return True
    product.activation, module.activation_fn = None, activation
    return False
