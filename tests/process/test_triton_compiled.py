"""The Triton kernels compile for GPUs that are not there, and fit on them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is made for Linux only")

# Bytes of shared memory that a program gets on the GPUs which give least of it (8.6 and 8.9).
LEAST_SHARED = 99 * 1024
EVERYTHING = {"window": 64, "chunk": 128, "softcap": 30.0, "sinks": True}


def kernels(
    tmp_path: Path, capabilities: str, dtypes: str, sizes: str, groups: str, options: Any
) -> list[dict[str, Any]]:
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_kernels"]
    done = subprocess.run(
        [*command, capabilities, dtypes, sizes, groups, json.dumps(options)],
        env=told | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = list(map(json.loads, done.stdout.splitlines()))
    assert {each["kernel"] for each in made} == {"_write", "_attend", "_merge"}
    for each in made:
        assert each["shared"] <= LEAST_SHARED, each
    return made


def test_they_compile_and_keep_what_they_sum_in_registers(tmp_path: Path) -> None:
    for each in kernels(tmp_path, "90", "bfloat16", "64,128", "4", {}):
        assert each["spilled"] == 0, each


@pytest.mark.matrix
def test_wide_heads_in_full_precision_fit(tmp_path: Path) -> None:
    assert kernels(tmp_path, "90", "float32", "256", "1", EVERYTHING)


@pytest.mark.slow
def test_all_sizes_of_heads_and_groups(tmp_path: Path) -> None:
    shape = "80,90", "bfloat16", "64,80,96,128,256", "1,2,4,8"
    for options in ({}, EVERYTHING):
        for each in kernels(tmp_path, *shape, options):
            assert each["spilled"] == 0, each
