"""What an exception of a forward pass says about the input, the memory and the device."""

import pytest
import torch

from batching.errors import (
    DeadlineExceeded,
    DeviceLost,
    InvalidInput,
    ItemFailed,
    OnequeueError,
    OutOfMemory,
)
from worker.failures import failure_of


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            OutOfMemory,
        ),
        (RuntimeError("CUDA error: out of memory"), OutOfMemory),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            OutOfMemory,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("The size of tensor a must match the size of tensor b"), ItemFailed),
        (IndexError("index out of range in self"), ItemFailed),
    ],
)
def test_errors_mean_the_item_the_memory_or_the_device(
    error: Exception, meaning: type[OnequeueError]
) -> None:
    failure = failure_of(error)
    assert type(failure) is meaning
    assert failure.__cause__ is error


def test_what_is_known_already_stays_and_what_is_not_may_be_said_otherwise() -> None:
    late, unfit = DeadlineExceeded("too late"), InvalidInput("it does not fit")
    assert failure_of(late, unfit) is late
    assert failure_of(ValueError("?"), unfit) is unfit
    assert type(failure_of(MemoryError(), unfit)) is OutOfMemory
