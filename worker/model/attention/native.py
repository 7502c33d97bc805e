"""Native operations for CPUs, from the C++ in cpu/native: their build, and paged attention by them.

The library is built by torch.compile's compiler into its folder (TORCHINDUCTOR_CACHE_DIR), which
processes may share. Loading it registers CPU kernels: of onequeue::paged_attention, which layers
call (paged.py), and of the linear operations (cpu/linear_layers.py, cpu/amx_linear.py). Without a
compiler the torch backend is used.
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

SOURCE_FOLDER = Path(__file__).parents[1] / "cpu" / "native"
SOURCES = (
    "vectors", "panels", "matmul", "attention_tile", "attention", "attention_ops",
    "packed_linear", "int8_linear", "int4_linear", "experts_linear", "amx_linear",
    "bf16_weight_linear", "segments", "short_conv", "gated_delta_rule", "state_space", "lora",
)  # fmt: skip
FLAGS = ("-fno-fast-math", "-ffp-contract=fast", "-Wno-psabi")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_lock = threading.Lock()


def load_native_ops() -> None:
    """Load the library; build it first, in half a minute, if it is not there.

    Raise what the compiler or the loader raises.
    """
    with _lock:
        _library()


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path(build=True)))


def try_load_native_ops(build: bool) -> bool:
    """Load the library if it is built already, or if `build`; return whether it is loaded."""
    try:
        if not build and not library_path(build=False).exists():
            return False
        load_native_ops()
    except Exception as error:  # no compiler, or a library that does not load
        log.warning("no native operations: %.300s", first_line(error))
        return False
    return True


def library_path(build: bool) -> Path:
    """Return the path of the library for this source, compiler and CPU. With `build`, build the
    library if it is not there; it appears complete, and an interrupted build leaves nothing."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions  # seconds to import
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    source = "".join((SOURCE_FOLDER / f"{name}.cpp").read_text() for name in SOURCES)
    options = CppTorchDeviceOptions(pick_vec_isa(), device_type="cpu", extra_flags=FLAGS)
    command = CppBuilder("native", "native.cpp", options).get_command_line()
    # other machines may share the folder
    key = "\n".join((source, command, torch.__version__, _cpu_features()))
    path = Path(cache_dir()) / f"onequeue-{sha256(key.encode()).hexdigest()}.so"
    if build and not path.exists():
        with TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder) / "native.cpp"
            file.write_text(source)
            builder = CppBuilder("native", str(file), options, folder)
            builder.build()
            os.replace(builder.get_target_file_path(), path)
    return path


def _cpu_features() -> str:
    """Return the instruction set extensions of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


class NativeMetadata(AttentionBackend):
    """Paged attention by the native operation, which holds the step's layout while it runs."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.positions = torch.tensor(batch.positions)
        spans: list[int] = []
        tables = array("i")
        for offset, (blocks, start, width) in zip(batch.offsets, batch.spans, strict=True):
            spans += (offset, width, start, len(tables))  # as begin_step in C++ reads them
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
        out: Tensor = torch.ops.onequeue.paged_attention(
            query, key, value, sinks, layer, scale, window, softcap
        )
        return out
