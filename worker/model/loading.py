"""From settings to a model with its weights in place, on the worker thread: what all kinds of
models have in common.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from batching.errors import OnequeueError
from worker.architectures import is_path, reason
from worker.model import missing_weights
from worker.protocol import Batching, ModelInfo

log = logging.getLogger("onequeue.loading")

DEMO_FOLDERS = Path(__file__).parent.parent / "demo"
GB = 1e9
# Bytes of a checkpoint's numbers that DTYPE changes.
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# COMPILE=auto leaves models with fewer parameters alone: a minute's work for little.
WORTH_COMPILING = 10_000_000
# A transformers.Pipeline. Its annotations call everything optional, whatever the task.
Pipe: TypeAlias = Any


class LoadingFailed(OnequeueError):
    """The model cannot be served; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What loading any model goes by."""

    model: str
    device: str = "auto"  # auto, cpu, cuda, cuda:1, …
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    attention: str = "auto"  # auto, or a name transformers knows


def load_checkpoint(
    options: ModelOptions, path: str, choose: Callable[[Any], Any], subfolder: str = ""
) -> tuple[Any, Any, dict[str, str]]:
    """A model on its device, by one of transformers' auto classes, which `choose` knows from the
    configuration; its tokenizer; and the names of the weights that its checkpoint lacks."""
    device = choose_device(options.device)
    check_fits(str(Path(path) / subfolder), options.dtype, device)
    files: Any = {"subfolder": subfolder, "trust_remote_code": False}
    auto = choose(AutoConfig.from_pretrained(path, **files))
    model, info = auto.from_pretrained(
        path,
        dtype=choose_dtype(options.dtype, path, device, subfolder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **files,
        **attention_keywords(options.attention),
    )
    tokenizer = AutoTokenizer.from_pretrained(path, **files)
    return model.to(device).eval(), tokenizer, missing_weights.names_of(info)


def model_info(
    task: str, name: str, model: Any, parameters: int, batching: Batching, why: str = ""
) -> ModelInfo:
    """`model`: a PreTrainedModel. `parameters`: how many it had before they were laid out anew."""
    return ModelInfo(
        task=task,
        model=name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=parameters,
        batching=batching,
        why=why,
    )


def worth_compiling(setting: str, parameters: int) -> bool:
    """Whether to build what takes a minute, for a model of so many parameters."""
    return setting == "on" or (setting == "auto" and parameters >= WORTH_COMPILING)


@contextmanager
def loading(name: str, use: str) -> Iterator[None]:
    """LoadingFailed, with the model's name and what it is for, for whatever is raised inside; else
    the log has the time."""
    log.info("loading for=%s model=%s", use, name)
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        why = reason(error)
        raise LoadingFailed(f"the model {name!r} could not be loaded for {use}: {why}") from error
    log.info("loaded seconds=%.1f", time.monotonic() - started)


def first_line(error: Exception) -> str:
    """Of its message, which a library may follow with a long trace; its repr if there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def local_path(model: str, demo: str) -> str:
    """FileNotFoundError if what is named as a folder is none; what names a model on a hub is left
    as it is. `demo`: which of the embedded models is meant by that name."""
    if model == "demo":
        return str(DEMO_FOLDERS / demo)
    if not is_path(model):
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError("there is no such folder")
    return str(folder)


def attention_keywords(attention: str) -> dict[str, str]:
    return {} if attention == "auto" else {"attn_implementation": attention}


def choose_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_dtype(
    name: str, model: str, device: torch.device, subfolder: str = ""
) -> torch.dtype | str:
    """The checkpoint's dtype for `auto`, but bfloat16 where a CPU would run float16."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # checked by the settings
    files: Any = {"subfolder": subfolder, "trust_remote_code": False}
    stored = getattr(AutoConfig.from_pretrained(model, **files), "dtype", None)
    return torch.bfloat16 if stored == torch.float16 and device.type == "cpu" else "auto"


# ── memory: how much there is, and whether a model fits into it ──


def free_bytes(device: torch.device) -> int:
    """What may still be allocated: on a GPU its memory, else the container's or the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    known = [line.split() for line in _lines("/proc/meminfo")]
    machine = [int(words[1]) * 1024 for words in known if words[0] == "MemAvailable:"]
    return min([*machine, _cgroup_free()])


def _cgroup_free() -> int:
    """The limit less what is used and could not be dropped, by cgroup version 2 or 1; if there is
    none, more than any machine has."""
    one = "memory/memory."
    for limit, used, stat, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (one + "limit_in_bytes", one + "usage_in_bytes", one + "stat", "total_inactive_file"),
    ):
        root = "/sys/fs/cgroup/"
        most, now = _lines(root + limit), _lines(root + used)
        if most and now and most[0].isdigit():
            droppable = [x.split()[1] for x in _lines(root + stat) if x.startswith(idle + " ")]
            return int(most[0]) - int(now[0]) + int(droppable[0] if droppable else 0)
    return sys.maxsize


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def check_fits(path: str, dtype: str, device: torch.device) -> None:
    """LoadingFailed if a local checkpoint needs more than what is free. On a CPU its largest tensor
    counts twice: while a layer's weight is laid out it is there in both forms, and an output head
    that is the embedding too stays so."""
    sizes = list(_sizes(Path(path), dtype))
    largest = max(sizes, default=0) if device.type == "cpu" else 0
    needed, free = sum(sizes) + largest, free_bytes(device)
    if needed > free:
        raise LoadingFailed(
            f"its weights need {needed / GB:.1f} GB and {free / GB:.1f} GB are free on {device}"
        )


def _sizes(folder: Path, dtype: str) -> Iterator[int]:
    """Bytes of each tensor as it will be loaded; of files without a header, as they are."""
    for file in _weights(folder):
        if file.suffix != ".safetensors":
            yield file.stat().st_size
            continue
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118
                tensor = checkpoint.get_slice(name)
                size = STORED.get(tensor.get_dtype(), 1)
                if size > 1 and dtype != "auto":
                    size = getattr(torch, dtype).itemsize
                yield math.prod(tensor.get_shape()) * size


def _weights(folder: Path) -> list[Path]:
    """The files that are loaded, of all that may lie there."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            parts = json.loads(index.read_text())["weight_map"].values()
            return [folder / part for part in set(parts)]
    return []
