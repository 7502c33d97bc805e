"""The number of torch's compute threads for a part of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
