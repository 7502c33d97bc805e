"""The device that models run on: its choice, its native number types and its free memory."""

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from worker.cgroups import cgroup_folders, lines_of

# Files of a control group, of version 2 and of version 1. Above memory.high the system does not
# kill, but slows a process until it stands still.
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
USAGES = ("memory.current", "memory.usage_in_bytes")
# Fields of memory.stat with the bytes of files that the system can drop. Version 1 has both: the
# second one leaves out the groups below.
RECLAIMABLE = ("total_inactive_file", "inactive_file")


def choose_device(name: str) -> torch.device:
    """Return the named device; `auto` is the GPU if there is one, else the CPU. For a GPU, switch
    cuDNN's attention off: it makes a plan for each new shape, which takes longer than the rest."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (device := torch.device(name)).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on `device`.

    On a CPU this is the smaller of the machine's available memory and what the limits of the
    process's control groups leave; where the system reports neither, it is `sys.maxsize`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    fields = [line.split() for line in lines_of("/proc/meminfo")]
    available = [int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:"]
    return min([*available, cgroup_free_bytes(Path("/proc/self"))])


_reservations: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # on the CPU


def record_reservation(owner: object, tensors: Iterable[Tensor]) -> "Reservation":
    """Record the bytes that `owner` will use, as long as it exists. Free memory still includes
    those of a CPU: the system provides a page at its first write."""
    tensors = list(tensors)
    _reservations[owner] = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return Reservation(weakref.ref(owner), sum(tensor.nbytes for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Implements Memory of worker/load_context.py: a cache, stripped of its tensors at the end."""

    owner: weakref.ref[object]
    size: int

    @property
    def nbytes(self) -> int:
        return self.size if self.owner() is not None else 0

    def release(self) -> None:
        if (owner := self.owner()) is not None:
            vars(owner).clear()
            _reservations.pop(owner, None)


def unreserved_bytes(device: torch.device) -> int:
    """Return how many free bytes no cache has reserved."""
    reserved = sum(_reservations.values()) if device.type == "cpu" else 0
    return max(0, free_bytes(device) - reserved)


def cgroup_free_bytes(process: Path) -> int:
    """Return the least that a control group of a process, or one above it, can still allocate.

    `process`: its folder in /proc. A group has its limit less its used bytes that cannot be
    reclaimed. Without a limit, in version 1 or 2, return `sys.maxsize`.
    """
    free = [sys.maxsize]
    for folder in cgroup_folders(process, "memory"):
        limits, usage = (
            [int(line) for name in names for line in lines_of(folder / name) if line.isdigit()]
            for names in (LIMITS, USAGES)
        )
        if limits and usage:
            stat = dict(line.split() for line in lines_of(folder / "memory.stat"))
            reclaimable = next((int(stat[name]) for name in RECLAIMABLE if name in stat), 0)
            free.append(min(limits) - usage[0] + reclaimable)
    return min(free)
