"""The Triton kernels compile for absent GPUs, and fit into their shared memory and registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton exists for Linux only")

# Bytes of shared memory of a program on GPUs with the least (compute capability 8.6 and 8.9).
MAX_SHARED_BYTES = 99 * 1024
ALL_OPTIONS = {"window": 64, "chunk": 128, "softcap": 30.0, "sinks": True}


def kernels(
    tmp_path: Path, capabilities: str, dtypes: str, sizes: str, groups: str, options: Any
) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_kernels"]
    done = subprocess.run(
        [*command, capabilities, dtypes, sizes, groups, json.dumps(options)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = list(map(json.loads, done.stdout.splitlines()))
    names = {"_write", "_attend", "_merge", "_product", "_row_sum", "_row_cumsum", "_grouped"}
    assert {kernel["kernel"] for kernel in compiled} == names
    for kernel in compiled:
        assert kernel["shared"] <= MAX_SHARED_BYTES, kernel
    return compiled


def test_kernels_compile_without_spilling_registers(tmp_path: Path) -> None:
    for kernel in kernels(tmp_path, "90", "bfloat16", "64,128", "4", {}):
        assert kernel["spilled"] == 0, kernel


@pytest.mark.matrix
def test_wide_float32_heads_fit(tmp_path: Path) -> None:
    assert kernels(tmp_path, "90", "float32", "256", "1", ALL_OPTIONS)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_that_hold_their_values_fit(dtype: str, tmp_path: Path) -> None:
    for kernel in kernels(tmp_path, "80,90", dtype, "576", "16", {"latent": 512}):
        assert kernel["spilled"] == 0 or kernel["kernel"] != "_attend", kernel


@pytest.mark.slow
def test_all_sizes_of_heads_and_groups_compile(tmp_path: Path) -> None:
    shape = "80,90", "bfloat16", "64,80,96,128,256", "1,2,4,8"
    for options in ({}, ALL_OPTIONS):
        for kernel in kernels(tmp_path, *shape, options):
            assert kernel["spilled"] == 0, kernel
