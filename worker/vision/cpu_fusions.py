"""Two optimizations of the vision encoder on a CPU, which change results by rounding only.

The first layer's input is made contiguous: many encoders keep their patches features-first, as a
convolution returns them, and each layer norm would copy its input. fc1 and its activation become
one call, since oneDNN can apply an activation while it writes a product. loading.py
applies both after the weights have been packed.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from worker.backends.cpu.linear import ROUNDING
from worker.backends.cpu.linear_layers import PackedLinear
from worker.device.self_check import relative_error
from worker.model.language_model import LanguageModel

log = logging.getLogger("onequeue.vision")

# Activation modules, and oneDNN's names for them: algorithm, variant.
FUSIBLE_ACTIVATIONS = {
    type(ACT2FN["gelu_pytorch_tanh"]): ("gelu", "tanh"),
    type(ACT2FN["gelu"]): ("gelu", "none"),
}
PROBE_ROWS = 40  # of the input by which a fusion is checked


@torch.inference_mode()
def apply_cpu_fusions(language: LanguageModel) -> None:
    """Change the modules outside the decoder in place."""
    if language.device.type != "cpu":
        return
    decoder, model = set(language.decoder.modules()), language.model
    fused = 0
    for module in [module for module in model.modules() if module not in decoder]:
        if isinstance(module, nn.ModuleList) and len(module):
            module[0].register_forward_pre_hook(_make_contiguous, with_kwargs=True)
        fused += _fuse(module)
    log.info("vision encoder: activations fused into linear layers=%d", fused)


def _make_contiguous(module: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    return tuple(map(_contiguous, args)), {name: _contiguous(arg) for name, arg in kwargs.items()}


def _contiguous(arg: Any) -> Any:
    return arg.contiguous() if isinstance(arg, Tensor) else arg


def _fuse(module: Any) -> bool:
    """Fuse a module's `fc1` and `activation_fn`, and return whether its output stays the same; the
    module is left unchanged otherwise."""
    linear, activation = getattr(module, "fc1", None), getattr(module, "activation_fn", None)
    if type(linear) is not PackedLinear or type(activation) not in FUSIBLE_ACTIVATIONS:
        return False
    x = torch.randn(PROBE_ROWS, linear.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(linear.dtype)
    expected = module(x)
    linear.activation, module.activation_fn = FUSIBLE_ACTIVATIONS[type(activation)], nn.Identity()
    if relative_error(module(x), expected) <= ROUNDING[linear.dtype]:
        return True
    linear.activation, module.activation_fn = None, activation
    return False
