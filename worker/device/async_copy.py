"""Copies between host and device that do not block the host.

On a GPU the host launches steps ahead of the device. A copy from unpinned memory, or reading a
value at once, would wait for every launched step.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def to_device(values: ArrayLike, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, without waiting for the copy.

    An ndarray keeps its dtype; other sequences become int64.
    """
    array = np.ascontiguousarray(values)
    tensor = torch.from_numpy(array if isinstance(values, np.ndarray) else array.astype(np.int64))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncCopy:
    """Copy a tensor to the host, after all work launched before it on the same stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[Any]:
        """Wait for the copy, not for later work, and return the values as nested lists."""
        values: list[Any] = self.tensor().tolist()
        return values

    def tensor(self) -> Tensor:
        """Do the same, and return the tensor on the host."""
        if self._copied:
            self._copied.synchronize()
        return self._copy


def fill_placeholders(ids: Tensor, sampled: Tensor | None) -> Tensor:
    """Replace placeholder ids by the tokens that the previous step sampled.

    `ids`: int64 of any shape, with placeholders as in batching/sequence.py. `sampled`: int64 [R],
    or None if there are no placeholders. A row that sampled no token (-1) yields token 0: its
    sequence has failed and the step's output for it is dropped.
    """
    if sampled is None or not len(sampled):
        return ids
    return torch.where(ids < 0, sampled[(-1 - ids).clamp(min=0)].clamp(min=0), ids)
