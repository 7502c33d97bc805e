"""What an exception of a forward pass says about the input, the memory and the device."""

import pytest
import torch

from batching.errors import (
    DeadlineExceeded,
    DeviceLost,
    ItemFailed,
    OnequeueError,
    OutOfMemory,
)
from worker.error_classification import failure_of


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


def test_what_is_known_already_stays() -> None:
    late = DeadlineExceeded("too late")
    assert failure_of(late) is late
