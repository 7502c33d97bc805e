"""How much memory there is, and whether a model fits into it."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from worker.model.loading import LoadingFailed

GB = 1e9
# Bytes of a checkpoint's numbers that DTYPE changes.
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def free_bytes(device: torch.device) -> int:
    """What may still be allocated: on a GPU its own, else the container's or the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(min(_machine_free(), _cgroup_free()))


def _machine_free() -> float:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


def _cgroup_free() -> float:
    """The limit less what is used and could not be dropped, by cgroup version 2 or 1."""
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
    return math.inf


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def check_fits(path: str, dtype: str, device: torch.device) -> None:
    """LoadingFailed if a local checkpoint needs more than what is free. On a CPU its largest tensor
    counts twice: while a layer's weight is laid out it is there in both forms, and an output head
    that is the embedding too stays so."""
    sizes = list(_sizes(Path(path), dtype))
    largest = max(sizes, default=0) if device.type == "cpu" else 0
    needed, free = sum(sizes) + largest, free_bytes(device)
    if needed > free:
        raise LoadingFailed(
            f"its weights need {needed / GB:.1f} GB and {free / GB:.1f} GB are free on {device}"
        )


def _sizes(folder: Path, dtype: str) -> Iterator[int]:
    """Bytes of each tensor as it will be loaded; of files without a header, as they are."""
    files = list(folder.glob("model*.safetensors"))
    if not files:
        yield from (file.stat().st_size for file in folder.glob("*.bin"))
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118
                tensor = checkpoint.get_slice(name)
                stored = STORED.get(tensor.get_dtype(), 1)
                wanted = (
                    stored if stored == 1 or dtype == "auto" else getattr(torch, dtype).itemsize
                )
                yield math.prod(tensor.get_shape()) * wanted
