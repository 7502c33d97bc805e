"""What an exception means: the fault of an item, too little memory, or a device that is lost; and
a batch that raises, run again in halves, until only the guilty items fail.

For both products. It goes by the names of torch's errors, as the server starts without torch.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory

T = TypeVar("T")

OUT_OF_MEMORY = (
    "can't allocate memory",  # what torch's CPU allocator says
    "not enough memory",
    "CUDA error: out of memory",  # an allocation outside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def failure_of(error: BaseException) -> OnequeueError:
    """The failure of an item whose work raised `error`, on the worker's thread.

    OutOfMemory: less at a time may fit. DeviceLost: a CUDA error other than out of memory poisons
    the context, nothing runs after it; the thread raises. Anything else, a panic in a library too,
    which is no Exception, is an ItemFailed.
    """
    if isinstance(error, OnequeueError):
        return error
    names = {each.__name__ for each in type(error).__mro__}
    message = str(error) if isinstance(error, RuntimeError) else ""
    too_much = any(words in message for words in OUT_OF_MEMORY)
    if too_much or names & {"MemoryError", "OutOfMemoryError"}:
        if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        failure: OnequeueError = OutOfMemory("this input does not fit into memory")
    elif "AcceleratorError" in names or "CUDA error" in message:
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
) -> None:
    """`run(items)`. If that raises, `failed` is given the failure, and each half runs again, as far
    as it is still wanted, down to one item. A lost device is raised."""
    try:
        run(items)
    except BaseException as error:
        run_halves(error, items, run, failed, wanted)


def run_halves(
    raised: BaseException,
    items: Sequence[T],
    run: Callable[[Sequence[T]], None],
    failed: Callable[[Sequence[T], OnequeueError], None],
    wanted: Callable[[T], bool],
) -> None:
    """As `run_in_halves`, after `run(items)` has raised."""
    # The frames hold the items and what the forward had allocated, and the halves need it.
    traceback.clear_frames(raised.__traceback__)
    if isinstance(failure := failure_of(raised), DeviceLost):
        raise raised
    raised.with_traceback(None)
    failed(items, failure)
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]) if middle else ():
        if part := [item for item in half if wanted(item)]:
            run_in_halves(part, run, failed, wanted)


def first_line(error: Exception) -> str:
    """Of its message, which a library may follow with a long trace; its repr if there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
