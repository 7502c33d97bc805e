"""Large pages, of 2 MB, for memory that each step reads. With 4 kB pages the address translation
takes long, above all in a virtual machine."""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from itertools import count, groupby

LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # madvise(2), Linux 6.1: make large pages now


def use_large_pages(spans: Iterable[tuple[int, int]], collapse: bool) -> None:
    """Ask Linux to back memory by large pages. `spans`: addresses and sizes in bytes. `collapse`:
    pages that have been written become large too. A refusal by Linux is ignored.

    Pages are taken whole, with the memory beside a span: many weights are smaller than a page.
    """
    if sys.platform != "linux":
        return
    pages = sorted(
        {
            page
            for start, size in spans
            for page in range(start // LARGE_PAGE_BYTES, -(-(start + size) // LARGE_PAGE_BYTES))
        }
    )
    madvise = ctypes.CDLL(None).madvise
    distance = count()
    for _, group in groupby(pages, lambda page: page - next(distance)):
        run = list(group)
        first = ctypes.c_void_p(run[0] * LARGE_PAGE_BYTES)
        for advice in (mmap.MADV_HUGEPAGE, *([MADV_COLLAPSE] if collapse else [])):
            madvise(first, ctypes.c_size_t(len(run) * LARGE_PAGE_BYTES), advice)
