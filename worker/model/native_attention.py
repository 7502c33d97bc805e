"""Attention on a CPU as one native operation, from the C++ in native/: keys and values are written
to the paged cache and attended to where they lie. Linear layers (native_linear.py) come with it.

Built by the compiler that torch.compile uses and into the same folder (TORCHINDUCTOR_CACHE_DIR),
which processes may share; where that fails, paged_attention.py goes on. Loading it gives the
operation that layers call (attention_function.py) a kernel for CPUs.
"""

import platform
import threading
from pathlib import Path

import torch
from torch import Tensor

from batching.sequence import Batch
from worker.model.attention_function import Attends
from worker.model.kv_cache import BLOCK, KVCache

FOLDER = Path(__file__).parent / "native"
SOURCES = (
    "vectors", "panels", "products", "tile", "attention", "operations", "linear", "tile_linear",
)  # fmt: skip
FLAGS = ("-fno-fast-math", "-ffp-contract=fast", "-Wno-psabi")
DTYPES = (torch.float32, torch.bfloat16)
_loading = threading.Lock()


def load() -> None:
    """Build it, unless that is done, and load it: half a minute. Whatever the compiler raises."""
    from torch._inductor.codecache import CppCodeCache  # seconds to import

    source = "".join((FOLDER / f"{name}.cpp").read_text() for name in SOURCES)
    built_for = (
        f"// torch {torch.__version__}, {_cpu()}\n"  # the folder may be another machine's too
    )
    with _loading:
        CppCodeCache.load(source + built_for, extra_flags=FLAGS)


def _cpu() -> str:
    """What code for this CPU may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


class NativeMetadata(Attends):
    """A step's tokens for the native operation, which holds them while the step runs."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.positions = torch.tensor(batch.positions)
        spans: list[int] = []
        tables: list[int] = []
        for offset, (blocks, start, width) in zip(batch.offsets, batch.spans, strict=True):
            spans += (offset, width, start, len(tables))
            tables += blocks[: (start + width - 1) // BLOCK + 1]
        self._spans = torch.tensor(spans).view(-1, 4)
        self._tables = torch.tensor(tables, dtype=torch.int32)

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
