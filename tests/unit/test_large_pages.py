"""Packed weights lie in large pages where the system provides them, with their values unchanged."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from worker.backends.cpu.linear_layers import (
    LARGE_PAGE_BYTES,
    MADV_COLLAPSE,
    PackedLinear,
    use_large_pages,
)


def in_large_pages(address: int) -> int:
    """Return the bytes in large pages of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name == "AnonHugePages:":
            return int(words[0]) * 1024
    return 0


def has_large_pages() -> bool:
    """Return whether the system backs an anonymous mapping by large pages."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 4 * LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE) as memory:
        memory.write(b"\1" * len(memory))
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_COLLAPSE)
        except OSError:
            return False
        return True


def test_a_packed_weight_lies_in_large_pages() -> None:
    if not has_large_pages():
        pytest.skip("the system provides no large pages")
    weight = torch.randn(2048, 2048)
    layer = PackedLinear(weight, None)
    address = torch.ops.mkldnn.data_ptr(layer.packed)
    assert in_large_pages(address + LARGE_PAGE_BYTES) >= weight.nbytes - 2 * LARGE_PAGE_BYTES
    assert torch.equal(layer.unpacked()[0], weight)


def test_a_weight_smaller_than_a_page_stays_unchanged() -> None:
    layer = PackedLinear(torch.randn(64, 64), None)
    packed = layer.packed
    use_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    assert layer(torch.ones(1, 64)).isfinite().all()
