"""Whether a step runs torch's operations alone: one of a sequence that began before the native ones
were built and checked. A model's layers have both then and share the weights; EagerForward chooses
between them.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# .torch_only: the layers of the model that runs on this thread leave out the native operations
running_step = threading.local()


def is_torch_only() -> bool:
    """Return what the running step needs. A graph is traced with native operations."""
    return not torch.compiler.is_dynamo_compiling() and getattr(running_step, "torch_only", False)


class EagerForward:
    """A module's forward in eager steps with native operations. Others, and the compiler, run the
    forward that the module has without it."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.own, self.run = module.forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_own = torch.compiler.is_dynamo_compiling() or is_torch_only()
        return (self.own if is_own else self.run)(*args, **kwargs)
