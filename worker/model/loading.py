"""Loading any kind of model, on the worker thread: from settings to weights in memory.

Covers the path and dtype of a checkpoint, the check that it fits into memory, its progress in the
log, and the weights that it lacks. How a model runs is decided by the package of its task.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_log

from batching.errors import OnequeueError
from worker.checkpoint_files import folder_problem
from worker.device.device import choose_device, free_bytes
from worker.load_context import add_memory, on_worker, remaining_bytes, report
from worker.messages.protocol import Batching, ModelInfo
from worker.task_detection import is_custom_code, is_path, load_error, split_revision

log = logging.getLogger("onequeue.loading")

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
GB = 1e9
# COMPILE=auto skips smaller models: compiling takes a minute and gains little.
MIN_COMPILED_PARAMETERS = 10_000_000
# Bytes of an element, for the safetensors dtypes that DTYPE converts.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LOADED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
PROGRESS_INTERVAL_S = 3.0
MAX_NAMED_WEIGHTS = 3
MIN_VOCABULARY = 10  # entries that are no special tokens
ADD_TOKENIZER = "add its files (tokenizer.json and tokenizer_config.json)"
# A transformers.Pipeline. Its attributes are annotated as optional, whatever the task.
Pipe: TypeAlias = Any


class LoadingFailed(OnequeueError):
    """The model cannot be served; the message names the model and the reason."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Settings that every kind of model has."""

    model: str
    device: str = "auto"  # auto, cpu, cuda, cuda:1, …
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    attention: str = "auto"  # auto, or a name that transformers accepts
    served_name: str = ""  # that clients see; empty: `model`

    @property
    def name(self) -> str:
        return self.served_name or self.model


def load_checkpoint(
    options: ModelOptions, path: str, auto_class: Callable[[Any], Any], subfolder: str = ""
) -> tuple[Any, Any, dict[str, str]]:
    """Load a model onto its device.

    `auto_class` returns transformers' auto class for a configuration. Return the model, its
    tokenizer and the descriptions of the weights that the checkpoint lacks, by name. Raise
    LoadingFailed if the weights do not fit into memory.
    """
    device = choose_device(options.device)
    check_fits(str(Path(path) / subfolder), options.dtype, device)
    report("config")
    files: Any = {"subfolder": subfolder, "trust_remote_code": False}
    auto = auto_class(AutoConfig.from_pretrained(path, **files))
    tokenizer = load_tokenizer(path, **files)
    model, info = auto.from_pretrained(
        path,
        use_safetensors=True,
        dtype=choose_dtype(options.dtype, path, device, subfolder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **files,
        **attention_keywords(options.attention),
    )
    model = model.to(device).eval()
    add_memory(Weights(model))
    return model, tokenizer, missing_weight_names(info)


def load_tokenizer(path: str, **files: Any) -> Any:
    """Load a checkpoint's tokenizer. Raises LoadingFailed if it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **files)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if is_custom_code(error):
            raise
        raise LoadingFailed(f"its tokenizer does not load: {ADD_TOKENIZER}") from error
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """Raise LoadingFailed for a tokenizer without a vocabulary: transformers makes one where a
    checkpoint has no files for it."""
    words = len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys())
    if words < MIN_VOCABULARY:
        raise LoadingFailed(f"it has no tokenizer: {ADD_TOKENIZER}")


def model_info(
    task: str, name: str, model: Any, parameters: int, batching: Batching, why: str = ""
) -> ModelInfo:
    """Describe a loaded PreTrainedModel for /v1/models and the log.

    `parameters`: their number before weights were packed. `why`: the reason for `batching`.
    """
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
    """Return whether COMPILE=`setting` compiles a model with so many parameters."""
    return setting == "on" or (setting == "auto" and parameters >= MIN_COMPILED_PARAMETERS)


@contextmanager
def load_errors(name: str, use: str) -> Iterator[None]:
    """Turn any error into LoadingFailed with the model's name and use; log the loading time."""
    log.info("loading for=%s model=%s", use, name)
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        why = load_error(error)
        raise LoadingFailed(f"the model {name!r} could not be loaded for {use}: {why}") from error
    log.info("loaded seconds=%.1f", time.monotonic() - started)


def local_path(model: str, demo: str) -> str:
    """Return the checkpoint's folder, or the name of a model on a hub unchanged.

    `demo`: the folder of the embedded model that `demo` stands for. Raise FileNotFoundError if
    `model` is a path without a folder.
    """
    if model == "demo":
        return str(DEMO_FOLDER / demo)
    if not is_path(model):
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError("there is no such folder")
    return str(folder)


def checkpoint_path(model: str, demo: str) -> str:
    """Return `local_path`. Raises LoadingFailed for a folder that cannot be served."""
    path = local_path(model, demo)
    if not is_path(path) and split_revision(path)[1]:
        path = snapshot_folder(path)
    if is_path(path) and (problem := folder_problem(Path(path))):
        raise LoadingFailed(problem)
    return path


def snapshot_folder(model: str) -> str:
    """Return the folder with the files of a revision, ID@REVISION, downloaded if they are not in
    the cache."""
    id, revision = split_revision(model)
    return snapshot_download(id, revision=revision, allow_patterns=LOADED_FILES)


def attention_keywords(attention: str) -> dict[str, str]:
    """Return the arguments of `from_pretrained` for the ATTENTION setting."""
    return {} if attention == "auto" else {"attn_implementation": attention}


def choose_dtype(
    name: str, model: str, device: torch.device, subfolder: str = ""
) -> torch.dtype | str:
    """Return the dtype to load with: the named one, or for `auto` the checkpoint's.

    A float16 checkpoint becomes bfloat16 on a CPU.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # checked by the settings
    files: Any = {"subfolder": subfolder, "trust_remote_code": False}
    stored = getattr(AutoConfig.from_pretrained(model, **files), "dtype", None)
    return torch.bfloat16 if stored == torch.float16 and device.type == "cpu" else "auto"


# ── memory ──


def check_fits(path: str, dtype: str, device: torch.device) -> None:
    """Raise LoadingFailed if a local checkpoint needs more bytes than are free.

    On a CPU the largest tensor counts twice: a weight exists in both layouts while it is packed,
    and an output head that is tied to the embedding keeps both.
    """
    needed, limit = _needed_bytes(Path(path), dtype, device), remaining_bytes()
    if needed > limit:
        raise LoadingFailed(
            f"its weights need {needed / GB:.1f} GB but MODELS_GB leaves {limit / GB:.1f} GB"
        )
    if needed > (free := free_bytes(device)):
        raise LoadingFailed(
            f"its weights need {needed / GB:.1f} GB but {free / GB:.1f} GB are free on {device}"
        )


def needed_bytes(model: str, demo: str, dtype: str, device: torch.device) -> int:
    """Return the bytes that loading a checkpoint takes, as `check_fits` counts them; 0 if its files
    are not on this machine."""
    path = local_path(model, demo)
    if not is_path(path):
        id, revision = split_revision(path)
        config = try_to_load_from_cache(id, "config.json", revision=revision)
        path = str(Path(config).parent) if isinstance(config, str) else ""
    return _needed_bytes(Path(path), dtype, device) if path else 0


def _needed_bytes(folder: Path, dtype: str, device: torch.device) -> int:
    sizes = list(_tensor_bytes(folder, dtype))
    return sum(sizes) + (max(sizes, default=0) if device.type == "cpu" else 0)


def _tensor_bytes(folder: Path, dtype: str) -> Iterator[int]:
    """Yield the bytes of each tensor after loading."""
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118
                tensor = checkpoint.get_slice(name)
                itemsize = FLOAT_BYTES.get(tensor.get_dtype(), 1)
                if itemsize > 1 and dtype != "auto":
                    itemsize = getattr(torch, dtype).itemsize
                yield math.prod(tensor.get_shape()) * itemsize


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if (index := folder / "model.safetensors.index.json").is_file():
        return [folder / shard for shard in {*json.loads(index.read_text())["weight_map"].values()}]
    return []


@dataclass(frozen=True, slots=True)
class Weights:
    """Implements Memory for a model's parameters and buffers. It is stripped of them at the end:
    references to its modules may outlive it."""

    model: torch.nn.Module

    @property
    def nbytes(self) -> int:
        parts = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor_bytes(tensor) for tensor in {id(t): t for t in parts}.values())

    def release(self) -> None:
        for module in self.model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))


def tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn._nbytes(tensor))
    return 0 if tensor.is_meta else tensor.nbytes


# ── progress in the log ──


def install_progress_log() -> None:
    """Replace transformers' progress bars by log lines, and drop its table of missing weights."""
    no_bar: Any = transformers_log.EmptyTqdm  # not annotated
    transformers_log.set_tqdm_hook(lambda _, args, bar: no_bar(log_progress(*args, **bar)))
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_load_report)
    if handlers := logging.getLogger("onequeue").handlers:
        transformers_log.disable_default_handler()
        for handler in handlers:
            transformers_log.add_handler(handler)


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def log_progress(items: Iterable[Any] = (), *_: Any, **bar: Any) -> Iterator[Any]:
    """Yield the items of a tqdm bar and log the progress every few seconds."""
    description = str(bar.get("desc") or "loading").lower()
    total: int | None = bar.get("total") or getattr(items, "__len__", lambda: None)()
    started = logged = time.monotonic()
    for done, item in enumerate(items):
        if total:
            report("weights", done + 1, total)
        if total and (now := time.monotonic()) - logged >= PROGRESS_INTERVAL_S:
            logged, percent = now, 100 * done / total
            log.info("%s percent=%.0f seconds=%.0f", description, percent, now - started)
        yield item


# ── weights that a checkpoint lacks ──

# transformers initializes them at random and continues. That is harmless for a pooler that no
# output uses, and wrong for the head of a task: missing_weights_matter runs the model to tell them
# apart.

_patching = threading.Lock()


@contextmanager
def record_missing_weights() -> Iterator[dict[int, dict[str, str]]]:
    """Record the missing weights of every model loaded in the context, by the model's id.

    Patches `from_pretrained`, for lack of a hook: `transformers.pipeline` loads the model itself,
    fails on `output_loading_info=True` in `model_kwargs`, and reports only a formatted table to the
    log; given a loaded model it would not load the processors.
    """
    recorded: dict[int, dict[str, str]] = {}
    with _patching:
        original = vars(PreTrainedModel)["from_pretrained"]

        def from_pretrained(cls: Any, *args: Any, **keywords: Any) -> Any:
            wants_info = keywords.pop("output_loading_info", False)
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = original.__get__(None, cls)(*args, **{**keywords, **options})
            recorded[id(model)] = missing_weight_names(info)
            return (model, info) if wants_info else model

        setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
        try:
            yield recorded
        finally:
            setattr(PreTrainedModel, "from_pretrained", original)  # noqa: B010


def missing_weight_names(info: dict[str, Any]) -> dict[str, str]:
    """Return the missing or mismatched weights of a loading info, with their descriptions."""
    names = {name: name for name in info["missing_keys"]}
    for name, stored, expected in info["mismatched_keys"]:
        names[name] = f"{name} (it has {tuple(stored)} where config.json has {tuple(expected)})"
    return dict(sorted(names.items()))


@torch.no_grad()
def missing_weights_matter(
    model: PreTrainedModel, names: dict[str, str], run: Callable[[], bytes]
) -> bool:
    """Return whether the bytes that `run` makes of the model's output depend on these weights.

    Runs the model with other random values in them, and restores the values afterwards.
    """
    state = model.state_dict()
    loaded = {value.data_ptr() for name, value in state.items() if name not in names}
    initialized = [
        state[name]
        for name in names
        if name in state
        and state[name].is_floating_point()
        and state[name].data_ptr() not in loaded  # tied to a weight of the checkpoint
    ]
    if not initialized:
        return False
    before = [value.clone() for value in initialized]
    try:
        reference = on_worker(partial(_run_seeded, run))
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for value in initialized:
                value.copy_(torch.randn(value.shape, generator=generator))
            if on_worker(partial(_run_seeded, run)) != reference:
                return True
    finally:
        for value, original in zip(initialized, before, strict=True):
            value.copy_(original)
    return False


def _run_seeded(run: Callable[[], bytes]) -> bytes:
    """Run with fixed noise; an exception counts as an output."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return run()
        except Exception as error:  # any type, from any model with any weights
            return repr(error).encode()


def describe_missing_weights(names: dict[str, str]) -> str:
    """Return the clause of an error text that names the missing weights."""
    first = list(names.values())[:MAX_NAMED_WEIGHTS]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"its checkpoint has no weights for {', '.join(first)}{more}"
