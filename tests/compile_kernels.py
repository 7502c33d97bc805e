"""Compiles the Triton kernels for GPUs that are not there, as their callers would launch them.

A process of its own: where there is no GPU, the tests' own has Triton's interpreter in the
compiler's place. Prints a line of JSON for each kernel: what it is for and what it takes.
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

from worker.model.attention import triton_decode
from worker.model.attention.kv_cache import BLOCK

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEADS, ROWS = 2, 3


class AbsentGpu:
    """What Triton asks of a driver before it launches anything."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(dtype: torch.dtype, size: int, group: int, **options: Any) -> list[Any]:
    """The kernels of a step: written keys and values, attention, its parts put together."""
    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(launch(self, *args, warmup=True, **kwargs))

    JITFunction.run = compile_only
    try:
        keys, values = torch.zeros(2, 4, BLOCK, HEADS, size, dtype=dtype)
        query = torch.zeros(ROWS, HEADS * group, size, dtype=dtype)
        new = torch.zeros(2, ROWS, HEADS, size, dtype=dtype)
        places = torch.zeros(3, ROWS, dtype=torch.long)
        tables = torch.zeros(ROWS, 4, dtype=torch.int32)
        sinks = torch.zeros(HEADS * group, dtype=dtype) if options.pop("sinks", False) else None
        triton_decode.write(new[0], new[1], keys, values, places[0], places[1])
        triton_decode.attend(
            query, keys, values, tables, places[2], programs=400, scale=0.1, sinks=sinks, **options
        )
    finally:
        JITFunction.run = launch
    return kernels


def taken(kernel: Any) -> dict[str, int]:
    """Bytes of shared memory; registers of a thread, and bytes of them that went to memory."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    registers, spilled = map(int, found.groups())
    return {"shared": kernel.metadata.shared, "registers": registers, "spilled": spilled}


def main(capabilities: str, dtypes: str, sizes: str, groups: str, options: str) -> None:
    for capability in map(int, capabilities.split(",")):
        driver.set_active(AbsentGpu(capability))
        every = itertools.product(dtypes.split(","), sizes.split(","), groups.split(","))
        for dtype, size, group in every:
            for kernel in compiled(DTYPES[dtype], int(size), int(group), **json.loads(options)):
                line = {"kernel": kernel.src.fn.__name__, "dtype": dtype, "size": int(size)}
                print(json.dumps(line | taken(kernel)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
