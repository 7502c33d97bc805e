"""Loading any kind of model, on the worker thread: from settings to weights in memory.

Covers the path and dtype of a checkpoint, the check that it fits into memory, its progress in the
log, and the weights that it lacks. How a model runs is decided by the package of its task.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_log
from transformers.utils.import_utils import is_accelerate_available

from batching.errors import NoRoom, OnequeueError, OutOfMemory
from worker.backends.gptq import drop_int4_grids
from worker.backends.quantization import gguf_arguments, memory_factor, quantization_arguments
from worker.checkpoint_files import (
    count_problem,
    file_problem,
    folder_problem,
    read_config,
    weight_files,
)
from worker.device.device import choose_device, free_bytes
from worker.error_classification import failure_of, first_line
from worker.load_context import (
    add_memory,
    current_load,
    expect_download,
    on_worker,
    remaining_bytes,
    report,
)
from worker.messages.protocol import Batching, ModelInfo
from worker.task_detection import (
    file_sizes,
    is_custom_code,
    is_path,
    load_error,
    split_file,
    split_revision,
)
from worker.text.chat_template import sandbox  # noqa: F401  # bounds templates from its import on
from worker.text.tekken import fast_tokenizer

log = logging.getLogger("onequeue.loading")

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
GB = 1e9
# COMPILE=auto skips smaller models: compiling takes a minute and gains little.
MIN_COMPILED_PARAMETERS = 10_000_000
# Bytes of an element, for the safetensors dtypes that DTYPE converts.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGER_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # others: 1
WEIGHTS_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
LOADED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
PROGRESS_INTERVAL_S = 3.0
MAX_NAMED_WEIGHTS = 3
# A model as it is built may have this many times the bytes of its weights: 2 bits become 16, and
# tied weights are not tied yet. Each parameter takes memory of its own.
BUILT_FACTOR, MAX_SMALL_BUILT, PARAMETER_BYTES = 16, 200_000_000, 10_000
MIN_VOCABULARY = 10  # entries that are no special tokens
ADD_TOKENIZER = "add its files (tokenizer.json and tokenizer_config.json)"
# A transformers.Pipeline. Its attributes are annotated as optional, whatever the task.
Pipe: TypeAlias = Any


class LoadingFailed(OnequeueError):
    """The model cannot be served; the message names the model and the reason."""


class TooLittleMemory(LoadingFailed, NoRoom):
    """The model would fit if other models were unloaded."""


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
    options: ModelOptions,
    path: str,
    auto_class: Callable[[Any], Any],
    subfolder: str = "",
    quantization: str = "none",
) -> tuple[Any, Any, dict[str, str]]:
    """Load a model onto its device.

    `auto_class` returns transformers' auto class for a configuration. `path`: a folder, a hub id or
    a GGUF file. `quantization`: by transformers; `pack_weights` applies the other kinds. Return the
    model, its tokenizer and the descriptions of the weights that the checkpoint lacks, by name.
    Raise LoadingFailed if the weights do not fit into memory.
    """
    device = choose_device(options.device)
    report("config")
    check_fits(str(Path(path) / subfolder) if is_path(path) else path, options.dtype, device)
    files: Any = {"subfolder": subfolder, "trust_remote_code": False}
    folder, gguf = split_file(path)
    if gguf:
        _log_gguf_progress()
        files = {"gguf_file": gguf, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **files)
    auto = auto_class(config)
    tokenizer = load_tokenizer(folder, **files)
    dtype = choose_dtype(options.dtype, path, device, subfolder)
    if gguf:
        quantized = {"config": config, **gguf_arguments(quantization, device)}
    else:
        quantized = quantization_arguments(config, quantization, dtype, device)
        if device.type == "cuda" and not quantized and is_accelerate_available():
            # each tensor is copied while others are read; else all are, from a copy in memory
            quantized = {"device_map": {"": device}}
    model, info = auto.from_pretrained(
        folder,
        use_safetensors=True,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **files,
        **quantized,
        **attention_keywords(options.attention),
    )
    if "device_map" not in quantized:
        model = model.to(device)
    model.eval()
    if quantization != "int4":
        drop_int4_grids(model)
    add_memory(Weights(model))
    return model, tokenizer, missing_weight_names(info)


def load_tokenizer(path: str, **files: Any) -> Any:
    """Load a checkpoint's tokenizer. Raises LoadingFailed if it has none."""
    try:
        tokenizer = fast_tokenizer(AutoTokenizer.from_pretrained(path, **files))
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
def load_errors(name: str, use: str, attention: str = "auto") -> Iterator[None]:
    """Turn any error into LoadingFailed with the model's name, its use and an attention function
    that is set; log the loading time."""
    log.info("loading for=%s model=%s", use, name)
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        why = load_error(error)
        lacks_memory = isinstance(error, NoRoom) or isinstance(failure_of(error), OutOfMemory)
        kind = TooLittleMemory if lacks_memory else LoadingFailed
        how = use if attention == "auto" else f"{use} with ATTN_IMPLEMENTATION={attention}"
        raise kind(f"the model {name!r} could not be loaded for {how}: {why}") from error
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
    path = Path(model).expanduser()
    if split_file(model)[1] and path.is_file():
        return str(path)
    if not path.is_dir():
        raise FileNotFoundError("there is no such folder")
    return str(path)


def checkpoint_path(model: str, demo: str) -> str:
    """Return `local_path`, with a GGUF file of a hub downloaded. Raises LoadingFailed for a folder
    or file that cannot be served."""
    path = local_path(model, demo)
    repository, file = split_file(path)
    if not is_path(path):
        expect_download()
    if file:
        if not is_path(path):
            id, revision = split_revision(repository)
            path = hf_hub_download(id, file, revision=revision)
        if problem := file_problem(Path(path)):
            raise LoadingFailed(f"{file} {problem}")
        _check_counts(str(Path(path).parent), len(gguf_header(path).tensors), Path(path).name)
        return path
    id, revision = split_revision(path)
    if not is_path(path) and revision:
        path = snapshot_download(id, revision=revision, allow_patterns=LOADED_FILES)
    if not is_path(path):
        _check_counts(path)
    elif problem := folder_problem(Path(path)):
        raise LoadingFailed(problem)
    return path


def _check_counts(path: str, tensors: int = 0, gguf: str | None = None) -> None:
    """Raise LoadingFailed for a configuration with too large counts, as of layers. `gguf`: the name
    of the file that has it."""
    with suppress(OSError):  # there is none: the load says so
        config, _ = PreTrainedConfig.get_config_dict(path, gguf_file=gguf)
        if problem := count_problem(config, tensors):
            raise LoadingFailed(problem)


def attention_keywords(attention: str) -> dict[str, str]:
    """Return the arguments of `from_pretrained` for the ATTN_IMPLEMENTATION setting."""
    return {} if attention == "auto" else {"attn_implementation": attention}


def log_own_attention(attention: str, place: str) -> None:
    """Log that the attention function of the setting is not used, where one is set."""
    if attention != "auto":
        log.info("attention: %s use their own function, not %s", place, attention)


def choose_dtype(
    name: str, model: str, device: torch.device, subfolder: str = ""
) -> torch.dtype | str:
    """Return the dtype to load with: the named one, or for `auto` the checkpoint's, bfloat16 for a
    GGUF file that is quantized. A float16 checkpoint becomes bfloat16 on a CPU."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # checked by the settings
    own: torch.dtype | str = "auto"
    if split_file(model)[1]:
        stored = own = gguf_header(model).dtype or torch.bfloat16
    else:
        files: Any = {"subfolder": subfolder, "trust_remote_code": False}
        stored = getattr(AutoConfig.from_pretrained(model, **files), "dtype", None)
    return torch.bfloat16 if stored == torch.float16 and device.type == "cpu" else own


def gguf_header(file: str) -> Any:
    """Return transformers' description of a GGUF file. Raise LoadingFailed if it is damaged."""
    from transformers.integrations.gguf.reader import GgufHeader

    name = Path(file).name
    damaged = f"{name} is damaged: download it again"
    try:
        header = GgufHeader.from_file(file)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise LoadingFailed(damaged) from error
        raise LoadingFailed(f"{name} cannot be read: {first_line(error)}") from error
    except Exception as error:  # the reader raises many kinds for invalid bytes
        raise LoadingFailed(damaged) from error
    end = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    size, expected = Path(file).stat().st_size, header.data_start + end
    if size < expected:
        raise LoadingFailed(f"{name} is incomplete, {size} of {expected} bytes: download it again")
    return header


# ── memory ──


def check_fits(path: str, dtype: str, device: torch.device) -> None:
    """Raise TooLittleMemory if a local checkpoint needs more bytes than are free.

    On a CPU the largest tensor counts twice: a weight exists in both layouts while it is packed,
    and an output head that is tied to the embedding keeps both.
    """
    needed, limit = needed_bytes(path, dtype, device), remaining_bytes()
    if needed > limit:
        raise TooLittleMemory(
            f"its weights need {needed / GB:.1f} GB but MODELS_GB leaves {limit / GB:.1f} GB"
        )
    if needed > (free := free_bytes(device)):
        raise TooLittleMemory(
            f"its weights need {needed / GB:.1f} GB but {free / GB:.1f} GB are free on {device}"
        )
    if needed and (context := current_load()):
        context.built, context.max_built = 0, BUILT_FACTOR * needed + MAX_SMALL_BUILT
    if not is_path(path):
        expect_download()


def _count_built(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Note a tensor of a model that this thread loads. transformers builds a model without memory
    first, by config.json; raise LoadingFailed if it is much larger than the weights."""
    if tensor is None or (context := current_load()) is None:
        return
    context.advance()
    context.built += tensor.nbytes + PARAMETER_BYTES if tensor.is_meta else 0
    if context.built > context.max_built:
        raise LoadingFailed("its config.json describes a model that is larger than its weights")


register_module_parameter_registration_hook(_count_built)
register_module_buffer_registration_hook(_count_built)


def needed_bytes(model: str, dtype: str, device: torch.device) -> int:
    """Return the bytes that loading a checkpoint takes, as `check_fits` counts them. A hub's model
    that is not on this machine counts with the size of its files; 0 if they cannot be listed."""
    path, file = model, split_file(model)[1]
    if not is_path(model):
        id, revision = split_revision(split_file(model)[0])
        found = try_to_load_from_cache(id, file or "config.json", revision=revision)
        if not isinstance(found, str):
            return _hub_bytes(model)
        path = found if file else str(Path(found).parent)
    sizes = list(_gguf_bytes(path, dtype, device) if file else _tensor_bytes(path, dtype, device))
    return sum(sizes) + (max(sizes, default=0) if device.type == "cpu" else 0)


def _hub_bytes(model: str) -> int:
    """Return the size of the files with weights of a hub's model."""
    repository, file = split_file(model)
    sizes = file_sizes(repository)
    if file:
        return sizes.get(file, 0)
    return sum(size for name, size in sizes.items() if WEIGHTS_FILE.fullmatch(name))


def _gguf_bytes(file: str, dtype: str, device: torch.device) -> Iterator[int]:
    loaded: Any = choose_dtype(dtype, file, device)
    for tensor in gguf_header(file).tensors:
        is_dequantized = device.type == "cpu"
        yield math.prod(tensor.shape) * loaded.itemsize if is_dequantized else tensor.nbytes


def _tensor_bytes(path: str, dtype: str, device: torch.device) -> Iterator[int]:
    """Yield the bytes of each tensor after loading."""
    folder = Path(path)
    dequantized = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    section: Any = read_config(folder).get("quantization_config")
    is_quantized = isinstance(section, dict) and section
    factor = memory_factor(section, device, dequantized.itemsize) if is_quantized else 1.0
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118
                tensor = checkpoint.get_slice(name)
                stored, count = tensor.get_dtype(), math.prod(tensor.get_shape())
                if stored not in FLOAT_BYTES:
                    yield int(count * INTEGER_BYTES.get(stored, 1) * factor)
                    continue
                itemsize = FLOAT_BYTES[stored]
                if dtype != "auto":
                    itemsize = getattr(torch, dtype).itemsize
                yield count * itemsize


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
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: "LOAD REPORT" not in str(record.msg)
    )
    if handlers := logging.getLogger("onequeue").handlers:
        transformers_log.disable_default_handler()
        for handler in handlers:
            transformers_log.add_handler(handler)


def _log_gguf_progress() -> None:
    """Replace the progress bar of transformers' older reader, which does not use its hook."""
    with suppress(ImportError):
        from transformers import modeling_gguf_pytorch_utils as reader

        vars(reader)["tqdm"] = log_progress


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

_thread = threading.local()  # .recorded: by the load that runs on this thread


@contextmanager
def record_missing_weights() -> Iterator[dict[int, dict[str, str]]]:
    """Record the missing weights of every model loaded in the context, by the model's id.

    Patches `from_pretrained`, for lack of a hook: `transformers.pipeline` loads the model itself,
    fails on `output_loading_info=True` in `model_kwargs`, and reports only a formatted table to the
    log; given a loaded model it would not load the processors.
    """
    _patch_from_pretrained()
    _thread.recorded = {}
    try:
        yield _thread.recorded
    finally:
        del _thread.recorded


@cache
def _patch_from_pretrained() -> None:
    original = vars(PreTrainedModel)["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **keywords: Any) -> Any:
        recorded: dict[int, dict[str, str]] | None = getattr(_thread, "recorded", None)
        if recorded is None:
            return original.__get__(None, cls)(*args, **keywords)
        wants_info = keywords.pop("output_loading_info", False)
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = original.__get__(None, cls)(*args, **{**keywords, **options})
        recorded[id(model)] = missing_weight_names(info)
        return (model, info) if wants_info else model

    setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010


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
