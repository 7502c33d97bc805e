"""The device that models run on: its choice, its native number types and its free memory."""

import sys
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    """Return the named device; `auto` is the GPU if there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on `device`.

    On a CPU this is the smaller of the machine's available memory and the container's rest; where
    the system reports neither, it is `sys.maxsize`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    fields = [line.split() for line in _lines("/proc/meminfo")]
    available = [int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:"]
    return min([*available, _cgroup_free_bytes()])


def _cgroup_free_bytes() -> int:
    """Return the cgroup's limit less its used bytes that cannot be reclaimed.

    Reads cgroup version 2, then version 1; without a limit, returns `sys.maxsize`.
    """
    v1 = "memory/memory."
    for limit_file, usage_file, stat_file, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (v1 + "limit_in_bytes", v1 + "usage_in_bytes", v1 + "stat", "total_inactive_file"),
    ):
        root = "/sys/fs/cgroup/"
        limit, usage = _lines(root + limit_file), _lines(root + usage_file)
        if limit and usage and limit[0].isdigit():
            stat = _lines(root + stat_file)
            reclaimable = [line.split()[1] for line in stat if line.startswith(inactive + " ")]
            return int(limit[0]) - int(usage[0]) + int(reclaimable[0] if reclaimable else 0)
    return sys.maxsize


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
