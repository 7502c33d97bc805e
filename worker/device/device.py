"""The device that models run on: its choice, its native number types and its free memory."""

import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class CgroupFiles(NamedTuple):
    """Files of a control group's folder, and the field of its `memory.stat` with the bytes of files
    that the system can drop."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


CGROUP_FILES = {
    # above memory.high the system does not kill, but slows a process until it stands still
    "cgroup2": CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": CgroupFiles(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    ),
}
# A line of /proc/self/mountinfo: root, mount point, version and options.
CGROUP_MOUNT = re.compile(r"\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S+ (\S+)")


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
    fields = [line.split() for line in _lines("/proc/meminfo")]
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
    for folder, files in _cgroup_folders(process):
        lines = [line for name in files.limits for line in _lines(folder / name)]
        limits, usage = (
            [int(line) for line in lines if line.isdigit()],
            _lines(folder / files.usage),
        )
        if limits and usage:
            stat = [line.split() for line in _lines(folder / "memory.stat")]
            reclaimable = sum(int(value) for name, value in stat if name == files.reclaimable)
            free.append(min(limits) - int(usage[0]) + reclaimable)
    return min(free)


def _cgroup_folders(process: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """Yield the folders of the process's memory control groups up to the roots of their mounts.

    A container may see a host's path that its mount does not have: missing folders are included.
    """
    groups = [line.split(":", 2)[1:] for line in _lines(process / "cgroup")]
    for mount in filter(None, map(CGROUP_MOUNT.match, _lines(process / "mountinfo"))):
        root, mount_point = (_unescape(path) for path in mount.group(1, 2))
        version, options = mount.group(3, 4)
        controller = "memory" if version == "cgroup" else ""
        if controller and controller not in options.split(","):
            continue
        for controllers, path in groups:
            if controller in controllers.split(","):
                inside = Path(path).relative_to(root if Path(path).is_relative_to(root) else "/")
                group = Path(mount_point) / inside
                for folder in (group, *group.parents):
                    if folder.is_relative_to(mount_point):
                        yield folder, CGROUP_FILES[version]


def _unescape(path: str) -> str:
    """Return a path of mountinfo with its octal escapes replaced."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
