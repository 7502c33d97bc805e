"""Checks before torch is imported and a model is loaded, and the setting that a MODEL is for.

    command line → assign_model → settings → check_models → the app

Each check raises a SettingsError: one sentence that names the setting and what it accepts.
settings.py checks single values. MODEL on the command line is assigned to a setting by its
modules.json or by the architecture in its config.json; nothing else is fetched from the hub.
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

import orjson

from batching.errors import InvalidInput
from server.apis.openai.request_fields import GenerationRequest, convert
from server.core.settings import (
    MODEL_SETTINGS,
    ModelReference,
    Settings,
    SettingsError,
    is_folder,
    parse_adapters,
    parse_models,
    refusing,
    split_entries,
    split_entry,
)
from worker.adapter_folder import adapter_folder
from worker.checkpoint_files import CONFIGS, GGUF, config_problem, file_problem, folder_problem
from worker.cores import Cores
from worker.decision_config import UnusableDecisionConfig, load_decision_config
from worker.messages.adapters import InvalidAdapter
from worker.messages.generation import SAMPLING_FIELDS
from worker.segment_store import SegmentStore, open_store
from worker.task_detection import (
    TaskError,
    architectures,
    detect_task,
    download,
    file_sizes,
    is_path,
    load_error,
    split_file,
    tasks_of,
)
from worker.tasks import TASKS, UnservedTask
from worker.template_file import UnusableTemplate, read_template

log = logging.getLogger("onequeue.preflight")

MISUSE = 2  # exit status of shell commands for invalid arguments
STARTUP_FAILURE = 3  # uvicorn's; its supervisor restarts no process with this exit status
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?(@[\w.+/-]{1,128})?")  # with its revision
_HUB_FILE = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(/[\w.-]{1,128}){1,5}\.gguf(@[\w.+/-]{1,128})?")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
# Settings that name a model, with its name in the registry.
KINDS = ("pipeline", "generation", "embedding", "rerank", "transcription")
MODELS = dict(zip(MODEL_SETTINGS, KINDS, strict=True))
CPU_KINDS = ("int8", "int4")
DEMO_MODELS = ("pipeline_model", "chat_model", "embedding_model")
SPIN_COUNT = 20_000  # 0.3 to 1 ms, depending on the CPU's pause instruction
# Compiled products that oneDNN and torch keep, each: 0.8 to 1.4 MB for every number of rows. The
# steps of a few models have fewer; by default 1,024 are kept, up to 1.7 GB.
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_OPENMP_THREADS = re.compile(r"\s*(\d{1,4})\s*(,.*)?")  # the first number is the outer level's
# The setting for a checkpoint by its task; other tasks are for POST /.
SETTING_BY_TASK = {
    "text-generation": "chat_model",
    "image-text-to-text": "chat_model",
    "any-to-any": "chat_model",
    "automatic-speech-recognition": "transcription_model",
}


class MultipleWorkers(SettingsError):
    pass


def exit_with_error(error: Exception | str, status: int = STARTUP_FAILURE) -> NoReturn:
    """Print the error in one line and exit.

    Where uvicorn's command starts several processes, they all import the app: the first one
    prints. The supervisor would then exit with status 0, and uvicorn has no hook for its exit
    status: it is killed."""
    name = multiprocessing.current_process().name
    if not name.startswith("SpawnProcess-") or name == "SpawnProcess-1":
        print(f"onequeue: {error}", file=sys.stderr, flush=True)
    supervisor = multiprocessing.parent_process()
    is_uvicorns = name.startswith("SpawnProcess-") and "uvicorn" in Path(sys.argv[0]).parts[-2:]
    if supervisor and supervisor.pid and is_uvicorns and isinstance(error, MultipleWorkers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGKILL)
    raise SystemExit(status)


def check_models(settings: Settings, with_loader: Container[str] = ()) -> Settings:
    """Return the settings with resolved models. Those of the settings `with_loader` are not
    checked: a function loads them."""
    if not _DEVICE.fullmatch(settings.device):
        raise SettingsError(f"DEVICE={settings.device!r}: must be auto, cpu, cuda or cuda:N")
    task, names_pipeline = settings.pipeline_task, settings.pipeline_model != "auto"
    settings = resolve_models(settings, with_loader)
    if task != "auto" and settings.pipeline_model == "none" and not names_pipeline:
        raise SettingsError(f"PIPELINE_TASK={task}: name a PIPELINE_MODEL for it")
    check_sampling_defaults("SAMPLING_DEFAULTS", settings.sampling_defaults)
    for name in MODELS:
        if name not in with_loader:
            check_setting(name, settings)
    if (file := settings.chat_template) != "auto":
        if settings.chat_model == "none":
            raise SettingsError(f"CHAT_TEMPLATE={file!r}: there is no CHAT_MODEL for it")
        with refusing(f"CHAT_TEMPLATE={file!r}", UnusableTemplate):
            read_template(file)
    if (file := settings.decision_config) not in ("auto", "none"):
        with refusing(f"DECISION_CONFIG={file!r}", UnusableDecisionConfig):
            load_decision_config(file, "")
    read_object("CHAT_TEMPLATE_KWARGS", settings.chat_template_kwargs)
    if (folder := settings.voices_dir) != "none" and not is_folder(folder):
        raise SettingsError(f"VOICES_DIR={folder!r}: {missing(folder)}")
    check_adapters(settings)
    if all(getattr(settings, name) == "none" for name in MODELS):
        nones = ", ".join(f"{name.upper()}=none" for name in MODELS)
        raise SettingsError(f"{nones}: there is nothing to serve")
    return settings


def read_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object of a setting. Raises SettingsError."""
    with contextlib.suppress(ValueError):
        if isinstance(document := orjson.loads(text), dict):
            return document
    raise SettingsError(f"{name}={text!r}: must be a JSON object")


def check_sampling_defaults(name: str, text: str) -> None:
    """Raise SettingsError for values that a request's fields do not accept."""
    document, known = read_object(name, text), ", ".join(SAMPLING_FIELDS)
    with refusing(f"{name}={text!r}", InvalidInput):
        for field in document.keys() - SAMPLING_FIELDS:
            raise InvalidInput(f"{field!r} is no sampling parameter, only {known}")
        convert(document, GenerationRequest)


def open_stored_prefixes(settings: Settings) -> SegmentStore | None:
    """Return the store of KV_CACHE_DIR, None if it is not set. Raises SettingsError for a folder
    that cannot be used."""
    if (folder := settings.kv_cache_dir) == "none":
        return None
    with refusing(f"KV_CACHE_DIR={folder!r}", OSError):
        return open_store(folder, int(settings.kv_cache_dir_gb * 1e9))


def check_adapters(settings: Settings) -> None:
    """Raise SettingsError for adapters that have no files inside LORA_DIR, or no base."""
    root = settings.lora_dir
    if root != "none" and not is_folder(root):
        raise SettingsError(f"LORA_DIR={root!r}: {missing(root)}")
    for reference in parse_adapters(settings):
        where = f"LORA={reference.entry!r}"
        if settings.chat_model == "none":
            raise SettingsError(f"{where}: there is no CHAT_MODEL for it")
        if root == "none":
            raise SettingsError(f"{where}: set LORA_DIR to the folder of all adapters")
        with refusing(where, InvalidAdapter):
            adapter_folder(root, reference.path)


def check_setting(name: str, settings: Settings) -> None:
    """Raise SettingsError for a model of a setting that cannot be served."""
    for reference in parse_models(name, getattr(settings, name)):
        check_model(name.upper(), reference.entry, reference.path)
        own = reference.apply(settings)
        where = f"{name.upper()}={reference.entry!r}: sampling_defaults"
        check_sampling_defaults(where, own.sampling_defaults)
        task = own.pipeline_task
        if reference.path == "demo" and name == "rerank_model":
            raise SettingsError(f"{name.upper()}=demo: there is no demo reranker, name a model")
        is_demo_pipeline = reference.path == "demo" and name == "pipeline_model"
        if is_demo_pipeline and task in TASKS and task != "fill-mask":
            raise SettingsError(
                f"{name.upper()}=demo serves fill-mask only: name a model for {task}"
            )
        if reference.path.endswith(GGUF) and name != "chat_model":
            raise SettingsError(
                f"{name.upper()}={reference.entry!r}: GGUF files are served as CHAT_MODEL only"
            )
        kind = own.quantization
        if name == "chat_model" and kind in CPU_KINDS and own.device.startswith("cuda"):
            conflict = f"QUANTIZATION={kind} and DEVICE={own.device}: {kind} is for models on a CPU"
            raise SettingsError(conflict)


def pipeline_task(settings: Settings, reference: ModelReference) -> str:
    """Return the task of a pipeline, by its own settings. Raises SettingsError."""
    try:
        return detect_task(settings.pipeline_task, reference.path)
    except UnservedTask as error:
        is_own = "pipeline_task" in dict(reference.options)
        where = f"PIPELINE_MODEL={reference.entry!r}" if is_own else "PIPELINE_TASK"
        raise SettingsError(f"{where}: {error}") from None
    except TaskError as error:
        raise SettingsError(str(error)) from None


def resolve_models(settings: Settings, with_loader: Container[str]) -> Settings:
    """Replace `auto`: the demo models are served if no setting names a model. A function that
    loads a model, for a setting in `with_loader`, names one."""
    models = {name: getattr(settings, name) for name in MODELS}
    unnamed = [name for name, model in models.items() if model in ("auto", "none")]
    with_demos = len(unnamed) == len(MODELS) and not any(name in with_loader for name in MODELS)
    resolved: dict[str, Any] = {
        name: "demo" if name in with_loader or (with_demos and name in DEMO_MODELS) else "none"
        for name, model in models.items()
        if model == "auto"
    }
    return replace(settings, **resolved)


def check_model(name: str, entry: str, path: str) -> None:
    """Raise SettingsError unless `path` is a checkpoint's folder or has the form of a hub id."""
    if path in ("none", "auto"):
        raise SettingsError(f"{name}={entry!r}: there is no model to name")
    if problem := _model_problem(path):
        raise SettingsError(f"{name}={entry!r}: {problem}")


def missing(path: str, kind: str = "folder") -> str:
    """Return why there is nothing at a path: the process may lack the rights to see it."""
    try:
        os.stat(os.path.expanduser(path))
    except PermissionError as error:
        return f"this {kind} cannot be read: {error.strerror}"
    except OSError:
        pass
    return f"there is no such {kind}"


def _model_problem(model: str) -> str:
    """Return why there can be no such model; empty if there can."""
    if os.path.isfile(os.path.expanduser(model)):
        return file_problem(Path(model).expanduser())
    if is_folder(model):
        return folder_problem(Path(model).expanduser())
    if model.startswith(("/", ".", "~")):
        return missing(model, "file" if model.endswith(GGUF) else "folder")
    if "://" in model:
        return "is no link to a model: https://huggingface.co/OWNER/NAME"
    if model.partition("@")[0].endswith(GGUF):
        named = "is neither a file nor one of the hub (owner/name/file.gguf)"
        return "" if _HUB_FILE.fullmatch(model) else named
    return "" if _HUB_ID.fullmatch(model) else "is neither a folder nor a hub id (owner/name)"


def check_hub(settings: Settings) -> None:
    """Raise SettingsError for a hub id whose config.json cannot be had. It is downloaded then."""
    for name in MODELS:
        for reference in parse_models(name, getattr(settings, name)):
            path = reference.path
            if path == "demo" or is_path(path) or split_file(path)[1]:
                continue
            where = f"{name.upper()}={path!r}"
            if all(_read_json(where, path, config) is None for config in CONFIGS):
                raise SettingsError(f"{where}: {_hub_problem(path)}")


def _hub_problem(model: str) -> str:
    """Return why a hub model has no configuration."""
    files = file_sizes(model)
    return config_problem(files) if files else "it has no config.json"


def check_workers(flag: str | None = None) -> None:
    """Raise MultipleWorkers for more than one process: each would load its own model and keep its
    own queue, batcher and metrics.

    `flag` is the value of `--workers`; by default it is read from the command line, which uvicorn's
    child processes share."""
    for argument, following in pairwise([*sys.argv[1:], ""]):
        name, equals, value = argument.partition("=")
        if name == "--workers" and not flag:
            flag = value if equals else following
    workers = flag or os.environ.get("WEB_CONCURRENCY", "1")
    if workers.isdigit() and int(workers) > 1:
        where = f"--workers {workers}" if flag else f"WEB_CONCURRENCY={workers}"
        raise MultipleWorkers(
            f"{where}: one process serves the model, with one queue and one worker thread; "
            "run several servers on different ports behind a load balancer"
        )


def openmp_threads() -> int | None:
    """Return the operator's number of compute threads, from OMP_NUM_THREADS."""
    match = _OPENMP_THREADS.fullmatch(os.environ.get("OMP_NUM_THREADS", ""))
    return int(match[1]) or None if match else None


def set_openmp_variables(cores: Cores) -> None:
    """Set the environment of the OpenMP library that torch is about to load; the operator's own
    variables stay.

    Threads that wait for each other spin, 300,000 rounds in libgomp. Under a CPU quota spinning is
    bounded, since it uses up the quota. Without one, spinning brings a tenth more tokens/s on an
    idle machine; on a busy one, steps take four times as long."""
    if openmp_threads() is None:  # OpenMP would use all cores for an invalid number
        os.environ["OMP_NUM_THREADS"] = str(cores.threads)
    if cores.limited and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds; LLVM's and Intel's library


def limit_kernel_caches() -> None:
    """Set the environment of oneDNN and torch before their import; the operator's own stays."""
    for name, count in KERNEL_CACHES.items():
        os.environ.setdefault(name, count)


@cache
def has_cache_folder() -> bool:
    """Return whether compiled code can be cached.

    If not, nothing is to be compiled, and TORCHINDUCTOR_CACHE_DIR becomes an existing folder: the
    import of torch creates the folder that it names."""
    setting = os.environ.get(CACHE_FOLDER)
    folder = Path(setting or "/")
    try:
        folder = Path(setting or tempfile.gettempdir()).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return True
        problem = "it is not writable"
    except OSError as error:
        problem = str(error)
    log.warning("no compiled and no native code, %s=%s: %s", CACHE_FOLDER, folder, problem)
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    os.environ[CACHE_FOLDER] = str(existing)
    return False


def telemetry_is_configured() -> bool:
    """Return whether OpenTelemetry's variables name a receiver."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    kinds = ("", "TRACES_", "METRICS_")
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in kinds)


def forbid_conversion() -> None:
    """Keep transformers from having the hub convert a model that has no safetensors."""
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def check_socket(path: str) -> None:
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise SettingsError(f"--uds {path}: its folder does not exist or is not writable")


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise SettingsError for TLS files that are missing: uvicorn's error does not name them."""
    if not certfile:
        raise SettingsError(f"--ssl-keyfile {keyfile}: needs --ssl-certfile")
    for flag, file in (("certfile", certfile), ("keyfile", keyfile or certfile)):
        if not os.access(file, os.R_OK):
            raise SettingsError(f"--ssl-{flag} {file}: does not exist or is not readable")


def check_address(host: str, port: int) -> None:
    """Raise SettingsError unless the server can listen there: uvicorn binds during the load."""
    given_host, given_port = _flag_or_variable("host", host), _flag_or_variable("port", str(port))
    if not 0 <= port < 65536:
        raise SettingsError(f"{given_port}: must be 0 to 65535")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise SettingsError(f"{given_host}: {reason}") from None
    for family, _, _, _, address in infos:
        try:
            with socket.create_server(address, family=family):
                pass
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:  # the host may lack IPv6
                reason = os.strerror(error.errno or 0)
                raise SettingsError(f"{given_host} {given_port}: {reason}") from None


def _flag_or_variable(flag: str, value: str) -> str:
    variable = flag.upper()
    return f"{variable}={value}" if os.environ.get(variable) == value else f"--{flag} {value}"


def assign_model(model: str, flags: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the flags with MODEL under its setting, and `none` for models without a flag. Of a
    list of models, the first one decides.

    Raises SettingsError if there is no such model, or a flag names one for its setting, too."""
    entry = split_entries(model)[0]
    _, path, _ = split_entry(entry)
    check_model("MODEL", entry, path)
    if model != "demo" and path == "demo":
        named = f"demo is three models: name one, as --chat-model {model}"
        raise SettingsError(f"MODEL={model!r}: {named}")
    if model == "demo":
        return {**flags, **{name: flags[name] or "demo" for name in DEMO_MODELS}}
    setting = "pipeline_model" if flags["pipeline_task"] else setting_for(path)
    if flags[setting]:
        flag = "--" + setting.replace("_", "-")
        raise SettingsError(f"MODEL={model!r} and {flag} {flags[setting]!r}: give one of them")
    return {**flags, **{name: flags[name] or "none" for name in MODELS}, setting: model}


def setting_for(model: str) -> str:
    """Return the setting that a checkpoint is for."""
    if split_file(model)[1]:
        return "chat_model"
    where = f"MODEL={model!r}"
    config = _read_json(where, model, "config.json")
    if modules := _read_json(where, model, "modules.json"):  # of sentence-transformers
        kinds = [str(module.get("type")) for module in modules]
        if any(kind.endswith("LogitScore") for kind in kinds):
            return "rerank_model"
        if not any(".cross_encoder." in kind for kind in kinds):
            return "embedding_model"
    if config is None:
        problem = "it has no config.json" if is_path(model) else _hub_problem(model)
        raise SettingsError(f"{where}: {problem}")
    [task] = tasks_of(config)[:1] or [""]
    setting = SETTING_BY_TASK.get(task, "pipeline_model")
    names = architectures(config)
    is_transcriber = any(name.startswith("Whisper") or name.endswith("ForCTC") for name in names)
    if setting == "transcription_model" and not is_transcriber:
        return "pipeline_model"  # /v1/audio serves these architectures alone
    return setting


def _read_json(where: str, model: str, name: str) -> Any:
    """Return a file's JSON; None if the checkpoint has no such file. Raises SettingsError, which
    begins with `where`."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = Path(model).expanduser() / name if is_path(model) else download(model, name)
        return json.loads(path.read_text())
    except LocalEntryNotFoundError as error:  # offline: the file may or may not exist
        if name != "config.json":
            return None
        problem = load_error(error)
    except (EntryNotFoundError, FileNotFoundError):
        return None
    except Exception as error:  # of the hub, the file or its content
        problem = f"its {name} cannot be read: {load_error(error)}"
    raise SettingsError(f"{where}: {problem}")
