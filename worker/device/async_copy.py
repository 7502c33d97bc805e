"""Numbers on their way between the host and the device, for which the host does not wait.

On a GPU steps are launched ahead of those that run: a copy from memory that is not pinned, or a
value that is read, would wait for all that was launched.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def to_device(numbers: ArrayLike, device: torch.device) -> Tensor:
    """A tensor of the numbers: of an array's type, or int64."""
    made = np.ascontiguousarray(numbers)
    tensor = torch.from_numpy(made if isinstance(numbers, np.ndarray) else made.astype(np.int64))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncCopy:
    """A tensor's values, which are copied once what was launched before has run."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # on a GPU that is into pinned memory
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as torch leaves it
            self._copied.record()

    def read(self) -> list[Any]:
        """Waits for the copy, not for what was launched since."""
        if self._copied:
            self._copied.synchronize()
        values: list[Any] = self._copy.tolist()
        return values


def fill_placeholders(ids: Tensor, drawn: Tensor | None) -> Tensor:
    """Ids of any shape, with the tokens in place of the promised ones (-1 - row of `drawn` [R]). A
    row without usable numbers (-1) has any token: nobody gets what comes of it."""
    if drawn is None or not len(drawn):
        return ids
    return torch.where(ids < 0, drawn[(-1 - ids).clamp(min=0)].clamp(min=0), ids)
