#!/usr/bin/env python3
"""What a decode step costs at least: all weights, read once, as fast as this machine reads them.

The bandwidth is that of large packed products of one row, in a process of its own: oneDNN's; in
float32 where the CPU would emulate bfloat16. A model that fits into the CPU's cache may be faster
than this.
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
    weight_bytes: int  # that a step reads
    bytes_per_s: float

    @property
    def step_s(self) -> float:
        return self.weight_bytes / self.bytes_per_s

    def share(self, tokens_per_s: float, clients: int) -> float:
        """Of the tokens/s there could be, if a step did no more than read the weights and gave
        each client one token. Prompts, and the products of many rows, are no part of it; drafted
        tokens are tokens beyond it."""
        return tokens_per_s * self.step_s / clients


def measure_floor(model: Path, dtype: str) -> Floor:
    command = [sys.executable, __file__, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    return Floor(weights(model) * measured["bytes_per_weight"], measured["bytes_per_s"])


def weights(model: Path) -> int:
    """How many numbers of a checkpoint a step of a dense model reads: all but the embedding of one
    whose output has weights of its own."""
    shapes = {
        name: tuple(each["shape"])
        for file in sorted(model.glob("*.safetensors"))
        for name, each in header(file).items()
        if name != "__metadata__"
    }
    output = shapes.get("lm_head.weight")
    return sum(
        prod(shape) for name, shape in shapes.items() if shape != output or name == "lm_head.weight"
    )


def header(file: Path) -> dict[str, Any]:
    """Of a safetensors file: its length in 8 bytes, then JSON."""
    with file.open("rb") as opened:
        found: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return found


def measure_bandwidth(dtype_name: str) -> dict[str, float]:
    import time

    import torch

    dtype = getattr(torch, dtype_name)
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        dtype = torch.float32
    plain, row = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(1, SIDE, dtype=dtype)
    packed = [torch.ops.mkldnn._reorder_linear_weight(plain, 1) for _ in range(WEIGHTS)]
    took = []
    for _ in range(PASSES):
        started = time.perf_counter()
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")
        took.append(time.perf_counter() - started)
    size = SIDE * SIDE * WEIGHTS * dtype.itemsize
    stored = getattr(torch, dtype_name).itemsize
    return {"bytes_per_weight": stored, "bytes_per_s": size / min(took)}


if __name__ == "__main__":
    print(json.dumps(measure_bandwidth(sys.argv[1])))
