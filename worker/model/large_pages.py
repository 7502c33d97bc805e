"""Weights in pages of 2 MB in place of 4 kB, where Linux gives them: a step reads all weights, and
where each page lies has to be looked up, which takes long in a virtual machine above all.
"""

import ctypes
import mmap
import sys

PAGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), Linux 6.1: at once


def use_large_pages(start: int, size: int) -> None:
    """For what lies in whole pages of so many bytes there; what the system refuses stays as it
    is."""
    if sys.platform != "linux":
        return
    first, last = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
    if first < last:
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, COLLAPSE):
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
