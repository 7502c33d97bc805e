"""Classification of exceptions, and bisection of batches that raise.

An exception is the fault of an item, a lack of memory, or a lost device. `run_in_halves` runs a
failing batch again in halves until only the guilty items fail; all engines use it. torch's errors
are recognized by name, since the server starts without torch.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory

T = TypeVar("T")

# How messages of torch, of its compiled kernels and of Triton begin.
CUDA_ERRORS = "CUDA error", "CUDA driver error", "Triton Error [CUDA]"
OUT_OF_MEMORY = (
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    # allocations outside torch's allocator
    *(f"{cuda}: out of memory" for cuda in CUDA_ERRORS),
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def failure_of(error: BaseException) -> OnequeueError:
    """Return the failure of an item whose work on the worker's thread raised `error`.

    OutOfMemory: a smaller batch may fit. DeviceLost: a CUDA error other than out of memory corrupts
    the context and nothing runs after it; callers raise it. Anything else is an ItemFailed, panics
    of Rust libraries included, which are not Exceptions.
    """
    if isinstance(error, OnequeueError):
        return error
    names = {cls.__name__ for cls in type(error).__mro__}
    message = str(error) if isinstance(error, RuntimeError) else ""
    no_memory = any(text in message for text in OUT_OF_MEMORY)
    if no_memory or names & {"MemoryError", "OutOfMemoryError"}:
        if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        failure: OnequeueError = OutOfMemory("this input does not fit into memory")
    elif "AcceleratorError" in names or any(cuda in message for cuda in CUDA_ERRORS):
        failure = DeviceLost("the worker has died", 60)
    else:
        failure = ItemFailed("the model failed on this input")
    failure.__cause__ = error
    return failure


def run_in_halves(
    items: Sequence[T],
    run: Callable[[Sequence[T]], None],
    failed: Callable[[Sequence[T], OnequeueError], None],
    wanted: Callable[[T], bool],
    error: BaseException | None = None,
) -> None:
    """Call `run(items)`. If it raises, call `failed` with the failure and run each half again, down
    to one item. Items that are no longer `wanted` are left out. A lost device is raised. `error`:
    what `run(items)` has raised already."""
    if error is None:
        try:
            return run(items)
        except BaseException as raised:
            error = raised
    # The frames hold the items and the forward pass's memory, which the halves need.
    traceback.clear_frames(error.__traceback__)
    if isinstance(failure := failure_of(error), DeviceLost):
        raise error
    error.with_traceback(None)
    failed(items, failure)
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]) if middle else ():
        if part := [item for item in half if wanted(item)]:
            run_in_halves(part, run, failed, wanted)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which a library may follow with a long trace;
    its repr if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
