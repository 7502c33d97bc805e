"""From settings to a model with its weights in place, on the worker thread: what all kinds of
models have in common.

Weights on their way into memory: a line of the log every few seconds.

transformers draws bars and prints tables of weights; what a checkpoint lacks is looked at in
loading.py and said there.

Weights that a checkpoint lacks: transformers draws them at random and goes on.

That is fine for a pooler that nobody asks for, and nonsense for the head of a task. Which it is
shows when the warm-up input is run again with other values in them: no list of names is kept.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_log

from batching.errors import OnequeueError
from worker.device.device import choose_device, free_bytes
from worker.messages.protocol import Batching, ModelInfo
from worker.task_detection import is_path, reason

log = logging.getLogger("onequeue.loading")

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
GB = 1e9
# Bytes of a checkpoint's numbers that DTYPE changes.
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# COMPILE=auto leaves models with fewer parameters alone: a minute's work for little.
MIN_COMPILED_PARAMETERS = 10_000_000
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
    return model.to(device).eval(), tokenizer, missing_weight_names(info)


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


def is_worth_compiling(setting: str, parameters: int) -> bool:
    """Whether to build what takes a minute, for a model of so many parameters."""
    return setting == "on" or (setting == "auto" and parameters >= MIN_COMPILED_PARAMETERS)


@contextmanager
def load_errors(name: str, use: str) -> Iterator[None]:
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


def local_path(model: str, demo: str) -> str:
    """FileNotFoundError if what is named as a folder is none; what names a model on a hub is left
    as it is. `demo`: which of the embedded models is meant by that name."""
    if model == "demo":
        return str(DEMO_FOLDER / demo)
    if not is_path(model):
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError("there is no such folder")
    return str(folder)


def attention_keywords(attention: str) -> dict[str, str]:
    return {} if attention == "auto" else {"attn_implementation": attention}


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


log = logging.getLogger("onequeue.loading")

EVERY_S = 3.0


def log_progress(over: Iterable[Any] = (), *_: Any, **bar: Any) -> Iterator[Any]:
    """What a tqdm bar iterates over; the log has how far it is."""
    what = str(bar.get("desc") or "loading").lower()
    total: int | None = bar.get("total") or getattr(over, "__len__", lambda: None)()
    began = said = time.monotonic()
    for done, each in enumerate(over):
        if total and (now := time.monotonic()) - said >= EVERY_S:
            said, share = now, 100 * done / total
            log.info("%s percent=%.0f seconds=%.0f", what, share, now - began)
        yield each


def is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def install_progress_log() -> None:
    """For what transformers says from now on."""
    no_bar: Any = transformers_log.EmptyTqdm  # not annotated
    transformers_log.set_tqdm_hook(lambda _, args, bar: no_bar(log_progress(*args, **bar)))
    logging.getLogger("transformers.modeling_utils").addFilter(is_no_report)
    if ours := logging.getLogger("onequeue").handlers:
        transformers_log.disable_default_handler()
        for handler in ours:
            transformers_log.add_handler(handler)


SHOWN = 3


@contextmanager
def record_missing_weights() -> Iterator[dict[int, dict[str, str]]]:
    """While inside, every `from_pretrained` notes what it did not find, by the model's id.
    `pipeline` chooses classes and loads them, but does not hand on what they report."""
    found: dict[int, dict[str, str]] = {}
    with _recording:
        original = vars(PreTrainedModel)["from_pretrained"]

        def from_pretrained(cls: Any, *args: Any, **keywords: Any) -> Any:
            asked = keywords.pop("output_loading_info", False)
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = original.__get__(None, cls)(*args, **{**keywords, **options})
            found[id(model)] = missing_weight_names(info)
            return (model, info) if asked else model

        setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
        try:
            yield found
        finally:
            setattr(PreTrainedModel, "from_pretrained", original)  # noqa: B010


_recording = threading.Lock()


def missing_weight_names(info: dict[str, Any]) -> dict[str, str]:
    """What was not found in a checkpoint, each as a message names it."""
    names = {name: name for name in info["missing_keys"]}
    for name, there, wanted in info["mismatched_keys"]:
        names[name] = f"{name} (it has {tuple(there)} where config.json says {tuple(wanted)})"
    return dict(sorted(names.items()))


@torch.no_grad()
def missing_weights_matter(
    model: PreTrainedModel, names: dict[str, str], answer: Callable[[], bytes]
) -> bool:
    """Whether what the model answers depends on these weights."""
    state = model.state_dict()
    found = {value.data_ptr() for name, value in state.items() if name not in names}
    drawn = [
        state[name]
        for name in names
        if name in state
        and state[name].is_floating_point()
        and state[name].data_ptr() not in found  # tied to one that was found
    ]
    if not drawn:
        return False
    before = [value.clone() for value in drawn]
    try:
        first = _seeded(answer)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for value in drawn:
                value.copy_(torch.randn(value.shape, generator=generator))
            if _seeded(answer) != first:
                return True
    finally:
        for value, loaded in zip(drawn, before, strict=True):
            value.copy_(loaded)
    return False


def _seeded(answer: Callable[[], bytes]) -> bytes:
    """Some models draw noise. One that raises answers too: other than it did before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return answer()
        except Exception as error:  # of any model, of any value
            return repr(error).encode()


def describe_missing_weights(names: dict[str, str]) -> str:
    """What a message says of them."""
    first = list(names.values())[:SHOWN]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"its checkpoint has no weights for {', '.join(first)}{more}"
