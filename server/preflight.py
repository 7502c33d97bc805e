"""What can be known to be wrong before torch is imported and a model is loaded.

Each check raises a SettingsError, one sentence that names what to mend; `refuse` says it and ends
the process. Values by themselves are checked in settings.py.

Which setting a MODEL on the command line is for, by the files of its checkpoint.

modules.json, or else the architecture in config.json → a setting; what else is served by default
gives way. Nothing is loaded; of a hub's models the two files are fetched, or come from the cache.
"""

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from server.core.settings import Settings, SettingsError
from worker.cores import Cores
from worker.task_detection import (
    TaskUnclear,
    architectures,
    fetched,
    is_path,
    made_for,
    reason,
    settle_task,
)
from worker.tasks import TASKS, UnservedTask

log = logging.getLogger("onequeue.preflight")

MISUSE = 2  # what a shell's commands end with for words that make no sense
STARTUP_FAILURE = 3  # uvicorn's own; at this exit status its supervisor does not start another
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
# Settings that name a model, and what it is called in the registry.
MODELS = {
    "pipeline_model": "pipeline",
    "chat_model": "generation",
    "embedding_model": "embedding",
    "rerank_model": "rerank",
    "transcription_model": "transcription",
}
_CONFIGS = ("config.json", "modules.json")
SPINS = 20_000  # some 0.3 ms to 1 ms, by how long the processor's pause is
CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_OPENMP_THREADS = re.compile(r"\s*(\d{1,4})\s*(,.*)?")  # the first is for what is not nested


class SeveralWorkers(SettingsError):
    pass


def refuse(error: Exception | str, status: int = STARTUP_FAILURE) -> NoReturn:
    """Say it in one line and end. uvicorn's supervisor imports the app in several processes: the
    first one speaks. It would end with status 0 itself, as if all had been well."""
    name = multiprocessing.current_process().name
    if not name.startswith("SpawnProcess-") or name == "SpawnProcess-1":
        print(f"onequeue: {error}", file=sys.stderr, flush=True)
    supervisor = multiprocessing.parent_process()
    uvicorns = name.startswith("SpawnProcess-") and "uvicorn" in Path(sys.argv[0]).parts[-2:]
    if supervisor and supervisor.pid and uvicorns and isinstance(error, SeveralWorkers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGKILL)
    raise SystemExit(status)


def check_models(settings: Settings, given: Container[str] = ()) -> Settings:
    """The settings with the task that is to run; the models of `given` settings are not loaded from
    them."""
    if not _DEVICE.fullmatch(settings.device):
        raise SettingsError(f"DEVICE={settings.device!r}: must be auto, cpu, cuda or cuda:N")
    named = {name: getattr(settings, name) for name in MODELS if name not in given}
    for name, model in named.items():
        check_model(name.upper(), model)
    task = settings.pipeline_task
    if named.get("pipeline_model") == "demo" and task in TASKS and task != "fill-mask":
        raise SettingsError(f"PIPELINE_MODEL=demo serves fill-mask only: name a model for {task}")
    if named.get("rerank_model") == "demo":
        raise SettingsError("RERANK_MODEL=demo: no reranker is embedded, name a model")
    int8 = "chat_model" in named and settings.quantization == "int8"
    if int8 and settings.device.startswith("cuda"):
        both = f"QUANTIZATION=int8 and DEVICE={settings.device}: int8 is for models on a CPU"
        raise SettingsError(both)
    try:
        task = settle_task(task, settings.pipeline_model)
    except UnservedTask as error:
        raise SettingsError(f"PIPELINE_TASK: {error}") from None
    except TaskUnclear as error:
        raise SettingsError(str(error)) from None
    if all(getattr(settings, name) == "none" for name in MODELS):
        nones = ", ".join(f"{name.upper()}=none" for name in MODELS)
        raise SettingsError(f"{nones}: there is nothing to serve")
    return replace(settings, pipeline_task=task)


def check_model(name: str, model: str) -> None:
    """Whether there may be such a model, which a setting, or a word of the command, names."""
    if wrong := _wrong_with(model):
        raise SettingsError(f"{name}={model!r}: {wrong}")


def _wrong_with(model: str) -> str:
    """Empty where it may be a hub id, or a checkpoint's folder."""
    folder = Path(os.path.expanduser(model))
    if folder.is_file():
        return "is a file, not a checkpoint's folder" + _gguf(folder)
    if folder.is_dir():
        if any((folder / config).is_file() for config in _CONFIGS):
            return ""
        if (folder / "adapter_config.json").is_file():
            return "is an adapter (LoRA), which is not served: merge it into its model first"
        held = next(folder.glob("*.gguf"), folder)
        return "there is no config.json in this folder" + _gguf(held)
    if model.startswith(("/", ".", "~")):
        return "there is no such folder"
    return "" if _HUB_ID.fullmatch(model) else "is neither a folder nor a hub id (owner/name)"


def _gguf(path: Path) -> str:
    """For those who come from llama.cpp."""
    return "; GGUF is not served, give the model's safetensors" if path.suffix == ".gguf" else ""


def check_workers(flag: str | None = None) -> None:
    """Each process would load its own model and keep its own queue, batcher and metrics.

    `flag` is what `--workers` was given; by default it is looked for among the words of uvicorn's
    command, which its processes have too."""
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name == "--workers" and not flag:
            flag = value if equals else following
    asked = flag or os.environ.get("WEB_CONCURRENCY", "1")
    if asked.isdigit() and int(asked) > 1:
        where = f"--workers {asked}" if flag else f"WEB_CONCURRENCY={asked}"
        raise SeveralWorkers(
            f"{where}: one process serves the model, with one queue and one worker thread; "
            "run more of them on ports of their own behind a load balancer"
        )


def asked_threads() -> int | None:
    """How many threads the operator wants to compute."""
    found = _OPENMP_THREADS.fullmatch(os.environ.get("OMP_NUM_THREADS", ""))
    return int(found[1]) or None if found else None


def put_openmp(cores: Cores) -> None:
    """Into the environment, for an OpenMP library that torch is about to load, unless the operator
    has said otherwise.

    Threads that wait for each other spin, libgomp's for 300,000 rounds. Where a quota pays for the
    time that is bounded: it would be missing later. Elsewhere a tenth more tokens/s come of it on a
    quiet machine; on a crowded one steps take four times as long."""
    if asked_threads() is None:  # what is no number OpenMP would take for all cores
        os.environ["OMP_NUM_THREADS"] = str(cores.threads)
    if cores.metered and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds; LLVM's and Intel's library


@cache
def has_code_folder() -> bool:
    """Whether there is a place for compiled code. If not, torch is told of some folder that is
    there, as to import it makes one, and nothing is to be compiled."""
    given = os.environ.get(CODE_FOLDER)
    folder = Path(given or "/")
    try:
        folder = Path(given or tempfile.gettempdir()).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return True
        failed = "it may not be written to"
    except OSError as error:
        failed = str(error)
    log.warning("no compiled and no native code, %s=%s: %s", CODE_FOLDER, folder, failed)
    os.environ[CODE_FOLDER] = str(next(each for each in (folder, *folder.parents) if each.is_dir()))
    return False


def check_socket(path: str) -> None:
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise SettingsError(f"--uds {path}: its folder is not there, or cannot be written to")


def check_address(host: str, port: int) -> None:
    """uvicorn binds when the model is loading already."""
    if not 0 <= port < 65536:
        raise SettingsError(f"--port {port}: must be 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no host's name"
        raise SettingsError(f"--host {host}: {reason}") from None
    for family, _, _, _, address in found:
        try:
            with socket.create_server(address, family=family):
                pass
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:  # a name may have addresses of a kind we lack
                reason = os.strerror(error.errno or 0)
                raise SettingsError(f"--host {host} --port {port}: {reason}") from None


# By what an architecture is made for; everything else is for POST /.
PLACES = {
    "text-generation": "chat_model",
    "image-text-to-text": "chat_model",
    "automatic-speech-recognition": "transcription_model",
}


def place(model: str, flags: Mapping[str, str | None]) -> dict[str, str | None]:
    """The flags with the model among them, and `none` for the models that nobody named.

    SettingsError if there is no such model, or a flag names another in its place."""
    check_model("MODEL", model)
    placed = dict(flags)
    if model == "demo":
        return placed
    setting = "pipeline_model" if flags["pipeline_task"] else setting_for(model)
    if flags[setting]:
        flag = "--" + setting.replace("_", "-")
        raise SettingsError(f"MODEL={model!r} and {flag} {flags[setting]!r}: give one of them")
    for name in MODELS:
        placed[name] = flags[name] or "none"
    return placed | {setting: model}


def listens(architecture: str) -> bool:
    """Whether /v1/audio is for it."""
    return architecture.startswith("Whisper") or architecture.endswith("ForCTC")


def setting_for(model: str) -> str:
    config = _read(model, "config.json")
    if modules := _read(model, "modules.json"):  # sentence-transformers'
        kinds = [str(module.get("type")) for module in modules]
        if any(kind.endswith("LogitScore") for kind in kinds):
            return "rerank_model"
        if not any(".cross_encoder." in kind for kind in kinds):
            return "embedding_model"
    if config is None:
        raise SettingsError(f"MODEL={model!r}: it has no config.json")
    [task] = made_for(config)[:1] or [""]
    setting = PLACES.get(task, "pipeline_model")
    if setting == "transcription_model" and not any(map(listens, architectures(config))):
        return "pipeline_model"
    return setting


def _read(model: str, name: str) -> Any:
    """A file's JSON; None if the checkpoint has none of that name."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = Path(model).expanduser() / name if is_path(model) else fetched(model, name)
        return json.loads(path.read_text())
    except LocalEntryNotFoundError as error:  # nor is it known whether there is one
        if name != "config.json":
            return None
        why = f"there is no such folder; {reason(error)}"
    except (EntryNotFoundError, FileNotFoundError):
        return None
    except Exception as error:  # of the hub, the file or its content
        why = f"its {name} cannot be read: {reason(error)}"
    raise SettingsError(f"MODEL={model!r}: {why}")
