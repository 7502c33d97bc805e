"""What an exception means: the fault of an item, too little memory, or a device that is lost.

Asked on the worker's thread, where a batch that raises is run again in halves, and in the pool. It
goes by the names of torch's errors, since the server's side imports this and starts without torch.
"""

import sys

from batching.errors import DeviceLost, ItemFailed, OnequeueError, OutOfMemory

OUT_OF_MEMORY = (
    "can't allocate memory",  # what torch's CPU allocator says
    "not enough memory",
    "CUDA error: out of memory",  # an allocation outside torch's own allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def failure_of(error: BaseException, otherwise: OnequeueError | None = None) -> OnequeueError:
    """The failure of an item whose work raised `error`.

    OutOfMemory: less at a time may fit. DeviceLost: a CUDA error other than out of memory poisons
    the context, nothing runs after it; the worker's thread raises. Anything else, a panic in a
    library too, which is no Exception, is `otherwise`, by default an ItemFailed.
    """
    if isinstance(error, OnequeueError):
        return error
    names = {each.__name__ for each in type(error).__mro__}
    message = str(error) if isinstance(error, RuntimeError) else ""
    if (
        names & {"MemoryError", "OutOfMemoryError"}
        or any(words in message for words in OUT_OF_MEMORY)
    ):  # fmt: skip
        if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        failure: OnequeueError = OutOfMemory("this input does not fit into memory")
    elif "AcceleratorError" in names or "CUDA error" in message:
        failure = DeviceLost("the worker has died", 60)
    else:
        failure = otherwise or ItemFailed("the model failed on this input")
    failure.__cause__ = error
    return failure
