"""What an exception of a forward pass says about the input, the memory and the device."""

import pytest
import torch

from worker.model.failures import diagnose


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            "memory",
        ),
        (RuntimeError("CUDA error: out of memory"), "memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "memory",
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), "fatal"),
        (torch.AcceleratorError("an illegal memory access was encountered"), "fatal"),
        (RuntimeError("The size of tensor a must match the size of tensor b"), "item"),
        (IndexError("index out of range in self"), "item"),
    ],
)
def test_errors_mean_the_item_the_memory_or_the_device(error: Exception, meaning: str) -> None:
    assert diagnose(error) == meaning
