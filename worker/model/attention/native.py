"""Attention on a CPU as one native operation, from the C++ in native/: keys and values are written
to the paged cache and attended to where they lie. Linear layers (cpu/linear.py) come with it.

Built by the compiler that torch.compile uses and into the same folder (TORCHINDUCTOR_CACHE_DIR),
which processes may share; where that fails, attention/paged.py goes on. Loading it gives the
operation that layers call (attention/paged.py) a kernel for CPUs.
"""

import ctypes
import logging
import os
import platform
import threading
from array import array
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from batching.sequence import Batch
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionBackend

log = logging.getLogger("onequeue.native_attention")

FOLDER = Path(__file__).parents[1] / "cpu" / "native"
SOURCES = (
    "vectors", "panels", "matmul", "attention_tile", "attention", "attention_ops", "packed_linear",
    "amx_linear", "bf16_weight_linear",
)  # fmt: skip
FLAGS = ("-fno-fast-math", "-ffp-contract=fast", "-Wno-psabi")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_loading = threading.Lock()


def load_native_ops() -> None:
    """Build it, unless that is done, and load it: half a minute. Whatever the compiler raises."""
    with _loading:
        _library()


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_native_ops()))


def native_ops_loaded(build: bool) -> bool:
    """Whether it could be loaded; only if it is there, unless it is to be built."""
    try:
        if not build and not build_native_ops(needed=False).exists():
            return False
        load_native_ops()
    except Exception as error:  # there is no compiler, or what it made cannot be loaded
        log.warning("no native operations: %.300s", first_line(error))
        return False
    return True


def build_native_ops(needed: bool = True) -> Path:
    """Where it is, as a whole: a build that is cut off leaves nothing there. Unless it is `needed`,
    where it would be."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions  # seconds to import
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    source = "".join((FOLDER / f"{name}.cpp").read_text() for name in SOURCES)
    options = CppTorchDeviceOptions(pick_vec_isa(), device_type="cpu", extra_flags=FLAGS)
    command = CppBuilder("native", "native.cpp", options).get_command_line()
    # the folder may be another machine's too
    built_for = "\n".join((source, command, torch.__version__, _cpu()))
    place = Path(cache_dir()) / f"onequeue-{sha256(built_for.encode()).hexdigest()}.so"
    if needed and not place.exists():
        with TemporaryDirectory(dir=place.parent) as folder:
            written = Path(folder) / "native.cpp"
            written.write_text(source)
            builder = CppBuilder("native", str(written), options, folder)
            builder.build()
            os.replace(builder.get_target_file_path(), place)
    return place


def _cpu() -> str:
    """What code for this CPU may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


class NativeMetadata(AttentionBackend):
    """A step's tokens for the native operation, which holds them while the step runs."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.positions = torch.tensor(batch.positions)
        spans: list[int] = []
        tables = array("i")
        for offset, (blocks, start, width) in zip(batch.offsets, batch.spans, strict=True):
            spans += (offset, width, start, len(tables))
            tables.extend(blocks[: (start + width - 1) // BLOCK + 1])
        self._spans = torch.tensor(spans).view(-1, 4)
        self._tables = torch.frombuffer(tables, dtype=torch.int32)

    def begin(self) -> None:
        cache = self.cache
        torch.ops.onequeue.begin_step(
            cache.keys, cache.values, cache.limits, self._spans, self._tables
        )

    def end(self) -> None:
        torch.ops.onequeue.end_step()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        made: Tensor = torch.ops.onequeue.paged_attention(
            query, key, value, sinks, layer, scale, window, softcap
        )
        return made
