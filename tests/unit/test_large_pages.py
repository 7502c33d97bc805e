"""Packed weights lie in large pages where the system gives them, and are what they were."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from worker.model.cpu.linear import COLLAPSE, PAGE, PackedLinear, use_large_pages


def in_large_pages(address: int) -> int:
    """Bytes in large pages of the mapping that has this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name == "AnonHugePages:":
            return int(words[0]) * 1024
    return 0


def are_given() -> bool:
    """Whether the system makes some of a plain mapping of ours."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE) as memory:
        memory.write(b"\1" * len(memory))
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(COLLAPSE)
        except OSError:
            return False
        return True


def test_a_packed_weight_lies_in_large_pages() -> None:
    if not are_given():
        pytest.skip("the system gives none")
    weight = torch.randn(2048, 2048)
    layer = PackedLinear(weight, None)
    address = torch.ops.mkldnn.data_ptr(layer.packed)
    assert in_large_pages(address + PAGE) >= weight.nbytes - 2 * PAGE
    assert torch.equal(layer.plain()[0], weight)


def test_one_that_is_smaller_than_a_page_stays_as_it_is() -> None:
    layer = PackedLinear(torch.randn(64, 64), None)
    packed = layer.packed
    use_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    assert layer(torch.ones(1, 64)).isfinite().all()
