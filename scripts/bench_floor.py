"""The least time of a decode step: the time in which this machine reads all weights and all keys
and values once.

The memory bandwidth is measured in a process of its own: on a GPU that of a copy, on a CPU that of
oneDNN's packed matrix-vector products, in float32 where it would emulate bfloat16. A model that
fits into the CPU's cache may be faster.
"""

import json
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bench_servers import in_own_process

SIDE, WEIGHTS, PASSES = 4096, 32, 12  # a gigabyte in bfloat16
ITEM_SIZE = 2  # bytes of a bfloat16
COPIED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Floor:
    weight_bytes: int  # read by a step
    bytes_per_s: float
    token_bytes: int = 0  # keys and values of a token
    gpu: str = ""  # its name, if that is the device

    @property
    def step_s(self) -> float:
        return self.weight_bytes / self.bytes_per_s

    def share(self, tokens_per_s: float, clients: int, context: float = 0) -> float:
        """Return tokens/s relative to steps that only read the weights, and the keys and values of
        each client's `context` tokens, and give each client one token. Prompts and the arithmetic
        of many rows cost time beyond that; accepted draft tokens may raise the share above 1."""
        step_bytes = self.weight_bytes + clients * context * self.token_bytes
        return tokens_per_s * step_bytes / self.bytes_per_s / clients


def measure_floor(model: Path) -> Floor:
    bytes_per_s, gpu = in_own_process(measure_bandwidth)
    token_bytes = ITEM_SIZE * cached_values(json.loads((model / "config.json").read_text()))
    return Floor(ITEM_SIZE * count_weights(model), bytes_per_s, token_bytes, gpu)


def cached_values(config: dict[str, Any]) -> int:
    """Return how many numbers a dense model with full attention caches for a token; 0 if its
    configuration has other names."""
    if not (heads := config.get("num_attention_heads")):
        return 0
    size = config.get("head_dim") or config["hidden_size"] // heads
    key_heads = config.get("num_key_value_heads") or heads
    return 2 * int(config["num_hidden_layers"] * key_heads * size)


def count_weights(model: Path) -> int:
    """Return how many weights a step of a dense model reads: all but an embedding that is not tied
    to the output head."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.offset_keys()}
    output = shapes.get("lm_head.weight")
    return sum(
        prod(shape) for name, shape in shapes.items() if shape != output or name == "lm_head.weight"
    )


def measure_bandwidth() -> tuple[float, str]:
    """Return bytes per second as read, and the GPU's name."""
    import torch

    gpu = ""
    if torch.cuda.is_available():
        gpu, size = torch.cuda.get_device_name(), 2 * COPIED_BYTES  # read and written
        source, copied = torch.zeros(2, COPIED_BYTES, dtype=torch.uint8, device="cuda")

        def read() -> None:
            copied.copy_(source)
            torch.cuda.synchronize()

    else:
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
        dtype = torch.bfloat16 if has_bfloat16 else torch.float32
        plain, row = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(1, SIDE, dtype=dtype)
        packed = [torch.ops.mkldnn._reorder_linear_weight(plain, 1) for _ in range(WEIGHTS)]
        size = SIDE * SIDE * WEIGHTS * dtype.itemsize

        def read() -> None:
            for weight in packed:
                torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")

    seconds = []
    for _ in range(PASSES):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return size / min(seconds[1:]), gpu  # the first pass waits for earlier work
