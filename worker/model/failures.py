"""Which exceptions mean what: out of memory is retried smaller, a CUDA error is the end."""

from typing import Literal

import torch

OUT_OF_MEMORY = (
    "can't allocate memory",  # what torch's CPU allocator says
    "not enough memory",
    "CUDA error: out of memory",  # an allocation outside torch's own allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def diagnose(error: BaseException) -> Literal["item", "memory", "fatal"]:
    """A CUDA error other than out of memory poisons the context: nothing runs after it. Anything
    else is the fault of what was worked on, a panic in a library, which is no Exception, too."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        _free_cached_memory()
        return "memory"
    if isinstance(error, RuntimeError):
        if any(said in str(error) for said in OUT_OF_MEMORY):
            _free_cached_memory()
            return "memory"
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return "fatal"
    return "item"


def _free_cached_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
