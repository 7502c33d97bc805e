"""Compile the Triton kernels for GPUs that are absent, with the arguments of their callers.

A process of its own: without a GPU, the tests' process uses Triton's interpreter in place of the
compiler. Prints one line of JSON per kernel, with its parameters and its resources.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from worker.backends.cuda import batch_invariant, triton_decode, triton_experts
from worker.model.attention.kv_cache import BLOCK

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEADS, ROWS = 2, 3


class AbsentGpu:
    """The part of a driver that Triton uses before a launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(dtype: torch.dtype, size: int, group: int, **options: Any) -> list[Any]:
    """Return the compiled kernels of a step, and of operations on rows of this size."""
    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(launch(self, *args, warmup=True, **kwargs))

    JITFunction.run = compile_only
    try:
        keys, values = torch.zeros(2, 4, BLOCK, HEADS, size, dtype=dtype)
        if latent := options.pop("latent", 0):  # its size: values are in the keys
            values = keys[..., :latent]
        query = torch.zeros(ROWS, HEADS * group, size, dtype=dtype)
        new = torch.zeros(2, ROWS, HEADS, size, dtype=dtype)
        slots, tails, positions, starts = torch.zeros(4, ROWS, dtype=torch.long)
        tables = torch.zeros(ROWS * 4, dtype=torch.int32)
        sinks = torch.zeros(HEADS * group, dtype=dtype) if options.pop("sinks", False) else None
        triton_decode.write(new[0], new[1], keys, values, slots, tails)
        triton_decode.attend(
            query,
            keys,
            values,
            tables,
            starts,
            positions,
            programs=400,
            scale=0.1,
            sinks=sinks,
            **options,
        )
        rows = query[:, 0]
        batch_invariant.mm(rows, rows.T)
        batch_invariant.mean_rows(rows, [-1])
        batch_invariant.cumsum(rows, -1, dtype=torch.float64)
        bounds, pairs = torch.zeros(HEADS + 1, dtype=torch.int32), torch.zeros(8, dtype=torch.long)
        for weight in (keys[0].transpose(0, 1), keys[0].permute(1, 2, 0)):
            triton_experts.multiply(weight[0], weight, bounds, pairs, 2, gathers=True)
    finally:
        JITFunction.run = launch
    return kernels


def resources(kernel: Any) -> dict[str, int]:
    """Return the bytes of shared memory, the registers of a thread and the bytes it spills."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    registers, spilled = map(int, match.groups())
    return {"shared": kernel.metadata.shared, "registers": registers, "spilled": spilled}


def main(capabilities: str, dtypes: str, sizes: str, groups: str, options: str) -> None:
    for capability in map(int, capabilities.split(",")):
        driver.set_active(AbsentGpu(capability))
        variants = itertools.product(dtypes.split(","), sizes.split(","), groups.split(","))
        for dtype, size, group in variants:
            for kernel in compiled(DTYPES[dtype], int(size), int(group), **json.loads(options)):
                line = {"kernel": kernel.src.fn.__name__, "dtype": dtype, "size": int(size)}
                print(json.dumps(line | resources(kernel)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
