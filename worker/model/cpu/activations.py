"""Activation functions whose result for a row does not depend on the other rows.

torch divides the elements of a tensor between threads. A thread computes the elements beyond its
last whole block of vectors with scalar functions, which may round differently. The number of rows
decides which elements those are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2CLS

from worker.model.cpu.torch_only import EagerForward

_kinds: Any = ACT2CLS.values()  # not annotated
KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in _kinds})
GRAIN = 32768  # at::internal::GRAIN_SIZE: fewer elements run in one thread
BLOCK_BYTES = 128  # of a loop's step: two vectors of AVX-512


def align_activations(model: nn.Module) -> None:
    """Let the model's eager activation functions run on whole blocks alone."""
    for module in model.modules():
        if isinstance(module, KINDS) and "forward" not in vars(module):
            module.forward = EagerForward(module, partial(in_blocks, module.forward))


def in_blocks(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activation of x [..., W]."""
    width, block = x.shape[-1], BLOCK_BYTES // x.dtype.itemsize
    threads = min(torch.get_num_threads(), -(-x.numel() // GRAIN))
    if width % block == 0 and x.numel() % (block * max(threads, 1)) == 0:
        # some functions round otherwise where x is not contiguous, as a slice of several rows
        return activation(x.contiguous())
    rows = pad(x.reshape(-1, width), (0, -width % block))
    parts: tuple[Tensor, ...] = torch.split(rows, max(1, GRAIN // rows.shape[1] - 1))
    return torch.cat([activation(part) for part in parts])[:, :width].reshape(x.shape)
