"""Exceptions are classified as an item's fault, a lack of memory or a lost device."""

import pytest
import torch

from batching.errors import DeadlineExceeded, DeviceLost, ItemFailed, OnequeueError, OutOfMemory
from worker.error_classification import failure_of


@pytest.mark.parametrize(
    ("error", "kind"),
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
        (RuntimeError("CUDA driver error: out of memory"), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost),
        (RuntimeError("CUDA driver error: device-side assert triggered"), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), DeviceLost),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("The size of tensor a must match the size of tensor b"), ItemFailed),
        (IndexError("index out of range in self"), ItemFailed),
    ],
)
def test_an_exception_is_classified_with_its_cause(
    error: Exception, kind: type[OnequeueError]
) -> None:
    failure = failure_of(error)
    assert type(failure) is kind
    assert failure.__cause__ is error


def test_an_error_of_ours_is_returned_as_it_is() -> None:
    late = DeadlineExceeded("too late")
    assert failure_of(late) is late
