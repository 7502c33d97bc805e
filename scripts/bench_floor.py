#!/usr/bin/env python3
"""The least time of a decode step: the time in which this machine reads all weights once.

The memory bandwidth is that of oneDNN's packed matrix-vector products, measured in a process of
its own, in float32 where the CPU would emulate bfloat16. A model that fits into the CPU's cache
may be faster.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

SIDE, WEIGHTS, PASSES = 4096, 32, 12  # a gigabyte in bfloat16


@dataclass(frozen=True, slots=True)
class Floor:
    weight_bytes: int  # read by a step
    bytes_per_s: float

    @property
    def step_s(self) -> float:
        return self.weight_bytes / self.bytes_per_s

    def share(self, tokens_per_s: float, clients: int) -> float:
        """Return tokens/s relative to steps that only read the weights and give each client one
        token. Prompts and the arithmetic of many rows cost time beyond that; accepted draft tokens
        may raise the share above 1."""
        return tokens_per_s * self.step_s / clients


def measure_floor(model: Path, dtype: str) -> Floor:
    command = [sys.executable, __file__, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    return Floor(count_weights(model) * measured["bytes_per_weight"], measured["bytes_per_s"])


def count_weights(model: Path) -> int:
    """Return how many weights a step of a dense model reads: all but an embedding that is not tied
    to the output head."""
    shapes = {
        name: tuple(entry["shape"])
        for file in sorted(model.glob("*.safetensors"))
        for name, entry in read_header(file).items()
        if name != "__metadata__"
    }
    output = shapes.get("lm_head.weight")
    return sum(
        prod(shape) for name, shape in shapes.items() if shape != output or name == "lm_head.weight"
    )


def read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: its length in 8 bytes, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header


def measure_bandwidth(dtype_name: str) -> dict[str, float]:
    """Return bytes per weight as stored and bytes per second as read."""
    import time

    import torch

    dtype = getattr(torch, dtype_name)
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        dtype = torch.float32
    plain, row = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(1, SIDE, dtype=dtype)
    packed = [torch.ops.mkldnn._reorder_linear_weight(plain, 1) for _ in range(WEIGHTS)]
    seconds = []
    for _ in range(PASSES):
        started = time.perf_counter()
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")
        seconds.append(time.perf_counter() - started)
    size = SIDE * SIDE * WEIGHTS * dtype.itemsize
    stored = getattr(torch, dtype_name).itemsize
    return {"bytes_per_weight": stored, "bytes_per_s": size / min(seconds)}


if __name__ == "__main__":
    print(json.dumps(measure_bandwidth(sys.argv[1])))
