"""Why a checkpoint cannot be served, by its files: one sentence with the next step.

Runs before torch is imported, and again where a model is loaded. Only names, sizes, JSON and the
headers of safetensors files are read. What needs transformers is found while loading
(model/loading.py).
"""

import json
import os
import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

MAX_FILES = 10_000
MAX_NAMED = 3  # in an error
POSITIONS = re.compile(r"(.*_)?positions?(_embeddings)?")
MAX_POSITIONS = 1 << 27
COUNTS = re.compile(r"(.*_)?(layers?|blocks|experts|depth)")
MAX_UNSTORED = 1024  # of these in a model that has not as many tensors
LFS_POINTER = b"version https://git-lfs"
CONFIGS = ("config.json", "modules.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Starts of files with those endings that have no pickled weights.
NO_PICKLES = ("training_args", "optimizer", "scheduler", "rng_state", "openvino_")
OTHER_FRAMEWORKS = (".onnx", "_model.xml", ".h5", ".msgpack")  # OpenVINO's end in _model.xml
GGUF = ".gguf"
GGUF_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf")
SAVE = "load it once in transformers and save it with save_pretrained, which writes safetensors"


def folder_problem(folder: Path) -> str:
    """Return why the checkpoint in a folder cannot be served; empty if its files can be."""
    try:
        names = list(_files(folder))
    except OSError as error:
        return f"this folder cannot be read: {error.strerror}"
    if problem := config_problem(names):
        return problem
    try:
        return _unreadable_config(folder) or weights_problem(names) or _damaged_weights(folder)
    except OSError as error:
        return f"{Path(error.filename or '').name} cannot be read: {error.strerror}"


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of the files in a folder and, with its name, of those in each subfolder."""
    for entry in islice(os.scandir(folder), MAX_FILES):
        if entry.is_file():
            yield entry.name
        elif entry.is_dir() and os.access(entry.path, os.R_OK | os.X_OK):
            for file in islice(os.scandir(entry.path), MAX_FILES):
                yield f"{entry.name}/{file.name}"


def config_problem(names: Collection[str]) -> str:
    """Return why these files have no configuration of transformers; empty if they have one."""
    if any(config in names for config in CONFIGS):
        return ""
    top = [name for name in names if "/" not in name]
    if "adapter_config.json" in top:
        return "is an adapter (LoRA), which is not served: merge it into its model first"
    if "model_index.json" in top:
        return "is a diffusers pipeline, which is not served: transformers has no such models"
    if not names:
        return "it is empty: download the model's files into it"
    missing = "there is no config.json in it"
    if files := sorted(name for name in names if name.endswith(GGUF)):
        return f"{missing}: name a GGUF file in it, such as {files[0]}"
    if any(name.startswith("snapshots/") for name in names):
        return f"{missing}: name the folder of a revision in its folder snapshots"
    nested = sorted(
        name for name in names if name.count("/") == 1 and name.endswith("/config.json")
    )
    if nested:
        return f"{missing}: name a folder in it that has one, such as {Path(nested[0]).parent}"
    return f"{missing}, but {', '.join(sorted(names)[:MAX_NAMED])}: add the model's other files"


def weights_problem(names: Collection[str]) -> str:
    """Return why these files have no weights that transformers loads; empty if they have them."""
    files = [name.rpartition("/")[2] for name in names]
    if any(file in WEIGHTS for file in files):
        return ""
    if "adapter_config.json" in files:
        return "is an adapter (LoRA), which is not served: merge it into its model first"
    if others := sorted(file for file in files if file.endswith(".safetensors")):
        return f"its weights are {others[0]}, and transformers loads model.safetensors: rename them"
    if ggufs := sorted(name for name in names if name.endswith(GGUF)):
        return f"its weights are GGUF: name the file, such as {ggufs[0]}"
    pickles = [f for f in files if f.endswith(PICKLES) and not f.startswith(NO_PICKLES)]
    if pickles:
        return f"its weights are a pickle ({min(pickles)}), which could run code: {SAVE}"
    if others := sorted(file for file in files if file.endswith(OTHER_FRAMEWORKS)):
        return f"its weights are {others[0]} only: use the model's safetensors"
    return "it has no weights: add model.safetensors"


def file_problem(file: Path) -> str:
    """Return why a file is no checkpoint; empty for a GGUF file."""
    if not file.name.endswith(GGUF):
        return "is a file: name the checkpoint's folder"
    if GGUF_PART.search(file.name):
        return "is a part of a GGUF file: merge the parts with llama-gguf-split"
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if start == LFS_POINTER:
        return _pointer(file.name)
    return "" if start.startswith(b"GGUF") else "is no GGUF file: download it again"


def _unreadable_config(folder: Path) -> str:
    """Return why a configuration file cannot be read; empty if it can."""
    for name in CONFIGS:
        file = folder / name
        if not file.is_file():
            continue
        content = file.read_bytes()
        if content.startswith(LFS_POINTER):
            return _pointer(name)
        try:
            document: Any = json.loads(content)
        except ValueError as error:
            return f"its {name} cannot be read, it is not JSON: {error}"
        expected = dict if name == "config.json" else list
        if not isinstance(document, expected):
            kind = "an object" if expected is dict else "a list"
            return f"its {name} is not {kind}: download it again"
        section = document.get("quantization_config") if isinstance(document, dict) else None
        if section is not None and not isinstance(section, dict):
            return f"the quantization_config in its {name} is not an object: download it again"
    return ""


def _pointer(name: str) -> str:
    return f"its {name} is a pointer of Git LFS: run git lfs pull in its folder"


def _damaged_weights(folder: Path) -> str:
    """Return which weights are missing or incomplete; empty if all are there."""
    folders = [folder, *(entry for entry in folder.iterdir() if entry.is_dir())]
    for parent in folders:
        if not os.access(parent, os.R_OK | os.X_OK):
            continue
        try:
            files = weight_files(parent)
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"its {WEIGHTS[1]} cannot be read, or names files elsewhere: download it again"
        if missing := [file.name for file in files if not file.is_file()]:
            return f"its weights lack {missing[0]}: download it"
        headers = [_read_header(file) for file in files]
        for _, problem in headers:
            if problem:
                return problem
        tensors = sum(count for count, _ in headers)
        if headers and (problem := count_problem(read_config(parent), tensors)):
            return problem
    return ""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that transformers loads from a folder. Links in it may lead to a
    cache. Raise ValueError if an index names a file outside of its folder, and other errors if it
    cannot be read."""
    whole, index = (folder / name for name in WEIGHTS)
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    names: set[str] = set(json.loads(index.read_bytes())["weight_map"].values())
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        raise ValueError(f"{index.name} names files outside of its folder")
    return [folder / name for name in sorted(names)]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; empty if it has none, or one that is not an object."""
    try:
        config = json.loads((folder / CONFIGS[0]).read_bytes())
    except (OSError, ValueError):
        config = None
    return config if isinstance(config, dict) else {}


def count_problem(config: Any, tensors: int) -> str:
    """Return which count of a configuration is too large: transformers makes lists and layers of
    such lengths before it reads weights. `tensors`: of the weights, 0: unknown."""
    sections = [config]
    while sections:
        section = sections.pop()
        items = section.items() if isinstance(section, dict) else ()
        sections += section if isinstance(section, list) else [value for _, value in items]
        for key, value in items:
            count = value if isinstance(value, int) else 0
            if POSITIONS.fullmatch(key) and count > MAX_POSITIONS:
                return f"its configuration has {key} {count}, more than {MAX_POSITIONS}"
            if COUNTS.fullmatch(key) and count > max(tensors, MAX_UNSTORED):
                stored = f"and its weights only {tensors} tensors"
                limit = stored if tensors else f"more than {MAX_UNSTORED}"
                return f"its configuration has {key} {count}, {limit}"
    return ""


def _read_header(file: Path) -> tuple[int, str]:
    """Return how many tensors a safetensors file has, and how it is damaged, by its header."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            return 0, _pointer(file.name)
    try:
        with safe_open(file, framework="np") as opened:
            return len(opened.keys()), ""
    except SafetensorError:
        return 0, f"its {file.name} is damaged or incomplete: download it again"
