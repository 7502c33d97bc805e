"""On CPUs that lack what this one has, the native code is another: it is compiled as for them, and
the tests of it are run with that, and with as much less in oneDNN and torch."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

TESTS = [f"tests/test_{name}.py" for name in ("native_attention", "native_linear", "tile_linear")]
CODE = """
import sys
import pytest
from worker.model import native_attention
flags, *arguments = sys.argv[1:]
native_attention.FLAGS += tuple(flags.split())
sys.exit(pytest.main(arguments))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++") or platform.machine() != "x86_64", reason="these are flags for x86"
)
@pytest.mark.parametrize(
    ("flags", "onednn", "torchs"),
    [
        ("-mno-amx-tile", "AVX512_CORE_BF16", "avx512"),
        ("-mno-amx-tile -mno-avx512bf16", "AVX512_CORE", "avx512"),
        ("-mno-avx512f", "AVX2", "avx2"),
        ("-mno-avx", "SSE41", "default"),
    ],
    ids=["AVX-512 with bfloat16", "AVX-512", "AVX2", "SSE"],
)
def test_what_is_compiled_for_less_gives_the_same(flags: str, onednn: str, torchs: str) -> None:
    less = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torchs}
    command = [sys.executable, "-c", CODE, flags, "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, env=os.environ | less, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
