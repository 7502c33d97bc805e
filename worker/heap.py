"""What the process has freed, handed back to the system.

glibc keeps freed memory for what comes next, and each thread's share apart: after a few large
pictures or sounds hundreds of megabytes would stay. Lower thresholds (M_TRIM_THRESHOLD,
M_MMAP_THRESHOLD) would have it hand back every tensor at once, and fetch it anew in every layer.
So nothing is set, and all is handed back when the worker has nothing to do.
"""

import ctypes
import sys

# For so long nothing has run.
IDLE_S = 5.0

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def hand_back() -> None:
    if _trim is not None:
        _trim(0)
