"""Whether a step runs torch's operations alone: one of a sequence that began before the native ones
were built and checked. A model's layers have both then, and share the weights.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_step = threading.local()  # .torch_only: of the step that runs on this thread


@contextmanager
def torch_only(is_torch_only: bool) -> Iterator[None]:
    """Make the layers of a model that runs in the context, on this thread, leave out the native
    operations, or use those that they have."""
    _step.torch_only = is_torch_only
    try:
        yield
    finally:
        _step.torch_only = False


def is_torch_only() -> bool:
    """Return what the running step needs. A graph is traced with native operations."""
    return not torch.compiler.is_dynamo_compiling() and getattr(_step, "torch_only", False)
