"""Functions that run at the same time, and the number of torch's compute threads."""

import threading
from collections.abc import Callable, Iterator
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


def run_together(*functions: Callable[[], object]) -> None:
    """Run each function in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
