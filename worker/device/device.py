"""Properties of the device that models run on: which one, its number types, its free memory."""

import sys
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def free_bytes(device: torch.device) -> int:
    """What may still be allocated: on a GPU its memory, else the container's or the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    known = [line.split() for line in _lines("/proc/meminfo")]
    machine = [int(words[1]) * 1024 for words in known if words[0] == "MemAvailable:"]
    return min([*machine, _cgroup_free()])


def _cgroup_free() -> int:
    """The limit less what is used and could not be dropped, by cgroup version 2 or 1; if there is
    none, more than any machine has."""
    one = "memory/memory."
    for limit, used, stat, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (one + "limit_in_bytes", one + "usage_in_bytes", one + "stat", "total_inactive_file"),
    ):
        root = "/sys/fs/cgroup/"
        most, now = _lines(root + limit), _lines(root + used)
        if most and now and most[0].isdigit():
            droppable = [x.split()[1] for x in _lines(root + stat) if x.startswith(idle + " ")]
            return int(most[0]) - int(now[0]) + int(droppable[0] if droppable else 0)
    return sys.maxsize


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
