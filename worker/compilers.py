"""The processes that compile code, our own and those of torch.compile: they end with the server.

Compilers start others, so all descendants of this process are ended, which Linux lists.
"""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ending = threading.Event()  # no further compilation is to be started
_builds: set[threading.Thread] = set()  # threads that remove files when their compiler has ended
# How long processes are looked for, at most, and so often none must be left.
END_S, INTERVAL_S, MIN_TURNS = 1.0, 0.02, 3


@contextmanager
def build() -> Iterator[None]:
    """Have `end_compilers` wait until this thread leaves the context."""
    _builds.add(threading.current_thread())
    try:
        yield
    finally:
        _builds.discard(threading.current_thread())


def end_compilers() -> None:
    """Kill all descendants of this process, and those that threads start meanwhile."""
    ending.set()
    until, turns = time.monotonic() + END_S, 0
    while turns < MIN_TURNS and time.monotonic() < until:
        pids = descendants(os.getpid())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        turns = 0 if pids or _builds else turns + 1
        time.sleep(INTERVAL_S)


def descendants(pid: int) -> list[int]:
    """Return the running processes that a process has started, and those that they have."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                children[int(parent)].append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found[1:]
