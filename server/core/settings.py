"""Settings: the only module that reads environment variables and `.env`, with preflight.py.

Each field is an environment variable in capitals and a flag of `onequeue serve`. An invalid value
is refused at startup by name. Settings do not change later.
"""

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, get_args

from dotenv import dotenv_values, load_dotenv

MODEL_SETTINGS = (
    "pipeline_model", "chat_model", "embedding_model", "rerank_model", "transcription_model",
)  # fmt: skip
MAX_NUMBER = 10**9  # as seconds less than a wait of a thread may take
MIN_SIMILARITY = 0.82  # of difflib's 1: two letters swapped, or a part left out
# A longer variable that differs from a name this short is likely another program's.
SHORT_NAME = 7
# A served name, by which requests choose a model. It is no path.
SERVED_NAME = re.compile(r"[\w@][\w.:@+/-]{0,127}", re.ASCII)
ADAPTER = re.compile(rf"({SERVED_NAME.pattern})=([^;]+?)(?:;base=([^;]+))?", re.ASCII)
OUTSIDE_BRACES = r"(?![^{}]*})"  # follows a separator that is not in the JSON of an option
PATH = "(?!(?i:none|null|auto)$).+"  # of a file or folder; no word that stands for nothing
KEYS = ("[!-~]+", "keys of ASCII characters without spaces, as a header can carry")
ALIAS = re.compile(r"[\w@*][\w.:@+/*-]{0,127}", re.ASCII)
HUB_LINK = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)"
    r"([\w.-]+(?:/[\w.-]+)?)(?:/tree/main|/(?:blob|resolve)/main/([\w./-]+\.gguf))?/?(?:[?#].*)?"
)

GGUF_NAME = re.compile(r"([^:@]+)(@[^:@]+)?:([^:@]+\.gguf)(@.+)?")  # as in transformers serve


class SettingsError(ValueError):
    """The message names the setting and what it accepts."""


@contextmanager
def refusing(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise SettingsError, which begins with `where`, for errors of these kinds."""
    try:
        yield
    except kinds as error:
        raise SettingsError(f"{where}: {error}") from None


def setting(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    part: tuple[str, str] = ("", ""),
) -> Any:
    """Define a field. A number whose default is None is written `auto`.

    `part`: for text, and for each part of a comma-separated list, the pattern and its
    description."""
    metadata = {"help": text, "choices": choices, "minimum": minimum, "part": part}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    pipeline_task: str = setting(
        "auto", "transformers pipeline task of POST /; auto: inferred from the checkpoint"
    )
    pipeline_model: str = setting(
        "auto",
        "models of POST /: hub ids, local paths, demo or none; auto: demo if no model is named, "
        "else none; comma-separated [NAME=]MODEL[@REVISION][;OPTION=VALUE…]",
    )
    chat_model: str = setting("auto", "models of the text endpoints under /v1, likewise")
    embedding_model: str = setting("auto", "models of /v1/embeddings, likewise")
    rerank_model: str = setting("none", "models of /rerank and /v1/score, likewise")
    transcription_model: str = setting("none", "models of /v1/audio/transcriptions, likewise")
    models: str = setting("none", "TOML file with the lists of models, by the settings' names")
    models_from_cache: bool = setting(
        False, "serve the models of the local hub cache, by name, as those of a kind that is served"
    )
    model_idle_s: float = setting(
        0.0, "time without requests until a model is unloaded, in seconds; 0: never", minimum=0
    )
    load_timeout_s: float = setting(
        300.0,
        "time without progress after which a load is abandoned, in seconds; not counted "
        "while files are downloaded",
        minimum=0.001,
    )
    models_gb: float | None = setting(
        None,
        "memory of the weights and caches of all models, in GB; auto: the free memory",
        minimum=0.000001,
    )
    model_aliases: tuple[str, ...] = setting(
        (),
        "comma-separated ALIAS=NAME: further names of the models under /v1; * stands for any text",
        part=(rf"{ALIAS.pattern}=[^=]+", "ALIAS=NAME, the name being a served model's"),
    )
    lora: tuple[str, ...] = setting(
        (),
        "comma-separated NAME=PATH[;base=MODEL]: LoRA adapters of the first chat model, or of the "
        "named one",
        part=(ADAPTER.pattern, "NAME=PATH or NAME=PATH;base=MODEL"),
    )
    lora_dir: str = setting("none", "folder that all LoRA adapters lie inside")
    chat_template: str = setting(
        "auto", "file with the chat model's template in Jinja; auto: the checkpoint's"
    )
    chat_template_kwargs: str = setting(
        "{}", "JSON object with values of the chat template's variables, unless a request sets them"
    )
    decision_config: str = setting(
        "auto",
        "decision.json of the chat model and the task decision; auto: the checkpoint's; none: "
        "without one",
    )
    sampling_defaults: str = setting(
        "{}", "JSON object of sampling parameters that neither request nor generation_config sets"
    )
    reasoning: str = setting(
        "auto",
        "the chat template's switch for reasoning, unless a request sets it; auto: its own default",
        ("auto", "on", "off"),
    )
    default_seed: int | None = setting(
        None, "seed of requests under /v1 without one; auto: a random one for each", minimum=0
    )
    allow_dimensions: bool = setting(
        False, "shorten embeddings also of models not trained for it (Matryoshka)"
    )
    embedding_pooling: str = setting(
        "auto",
        "pooling of embedding models; auto: by the checkpoint's files; splade: sparse vectors of a "
        "masked language model",
        ("auto", "splade"),
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto",
        "precision of the weights; auto: the checkpoint's",
        ("auto", "float32", "bfloat16", "float16"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention backend, by transformers' names, or a kernel of a hub",
        part=(
            r"auto|sdpa|eager|flash_attention_[234]|flex_attention"
            r"|[\w.-]+/[\w.-]+(@[\w.-]+)?(:[\w.-]+)?",
            "auto, sdpa, eager, flash_attention_2, flash_attention_3, flex_attention or a kernel, "
            "OWNER/NAME[@REVISION][:FUNCTION]",
        ),
    )
    quantization: str = setting(
        "none",
        "weights of chat models: int8 or int4 on CPUs, or those of bitsandbytes",
        ("none", "int8", "int4", "bnb-8bit", "bnb-4bit"),
    )
    compile: str = setting(
        "auto",
        "compile the chat model in the background, use native operations",
        ("auto", "on", "off"),
    )
    deterministic: bool = setting(
        False,
        "on a GPU: the output does not depend on the batch, at a lower speed; a CPU ignores it",
    )
    speculation: str = setting(
        "auto",
        "draft tokens from the request's own text, on a CPU also from earlier outputs",
        ("auto", "off"),
    )
    simulated_model: str = setting(
        "none",
        "for measuring the host: steps of chat models take so many milliseconds and compute "
        "nothing, and so many microseconds more for each prompt token",
        part=(r"none|\d+(\.\d+)?(,\d+(\.\d+)?)?", "STEP_MS or STEP_MS,PROMPT_TOKEN_US"),
    )
    pin_worker: str = setting(
        "auto",
        "pin the worker to its compute cores; auto: if other cores remain",
        ("auto", "on", "off"),
    )
    max_model_len: int | None = setting(
        None,
        "maximum tokens of prompt and output together; auto: the whole context, if memory allows",
        minimum=2,
    )
    kv_cache_gb: float | None = setting(
        None, "memory of the key-value cache, in GB", minimum=0.000001
    )
    kv_cache_dir: str = setting(
        "none",
        "folder of keys and values that outlive model and process; none: they do not",
        part=(rf"none|{PATH}", "a folder, or none"),
    )
    kv_cache_dir_gb: float = setting(10.0, "maximum size of the files in it, in GB", minimum=0.001)
    max_running: int = setting(256, "maximum sequences generated at the same time", minimum=1)
    max_batch_size: int = setting(32, "maximum rows in one forward pass", minimum=1)
    max_batch_tokens: int = setting(16384, "maximum tokens in one forward pass", minimum=1)
    max_batch_wait_ms: float = setting(
        1.0, "longest wait of a batch's first item for others, in milliseconds", minimum=0
    )
    max_queue_size: int = setting(
        1024, "maximum inputs accepted and not answered; beyond it 503", minimum=1
    )
    request_timeout_s: float = setting(
        60.0,
        "limit for a response in seconds; of generated text for the wait until the prompt's first "
        "step, and for any time without progress; beyond it 504",
        minimum=0.001,
    )
    sse_keepalive_s: float = setting(
        5.0, "seconds after which a stream without an event sends a comment", minimum=0.05
    )
    body_timeout_s: float = setting(
        10.0,
        "limit for a body without progress or a header, in seconds; beyond it 408",
        minimum=0.001,
    )
    max_body_mb: float = setting(
        32.0, "maximum size of a body, in MB; beyond it 413", minimum=0.000001
    )
    max_image_mp: float = setting(
        64.0, "maximum megapixels of one image, and of all images decoded at a time", minimum=1
    )
    image_fetch: tuple[str, ...] = setting(
        (),
        "comma-separated hosts from which chat images may be fetched, or any",
        part=(r"[\w.-]+|[\da-fA-F:]+", "hosts without scheme, port or *, or any"),
    )
    max_audio_mb: float = setting(
        200.0, "maximum size of an audio upload, in MB; beyond it 413", minimum=0.000001
    )
    max_audio_s: float = setting(7200.0, "maximum length of a recording, in seconds", minimum=0.03)
    voices_dir: str = setting(
        "none",
        "folder with an embedding NAME.npy, or a recording, for each voice of text-to-audio models",
    )
    drain_delay_s: float = setting(
        0.0,
        "time after SIGTERM in which /ready is 503 and requests are still accepted, in seconds",
        minimum=0,
    )
    shutdown_grace_s: float = setting(
        30.0, "time for accepted requests after that, in seconds", minimum=0
    )
    stuck_after_s: float = setting(
        120.0, "a forward pass longer than this, in seconds, turns /health to 503", minimum=0.001
    )
    store: str = setting(
        "sqlite",
        "postgresql://… keeps responses, conversations, files, batches and the use of keys' limits "
        "for all servers; sqlite: RESPONSES_DB and BATCH_DIR",
        # of a password with an @ or a / libpq takes a part for the host, which is in its errors
        part=(
            r"sqlite|postgres(ql)?://([^@/\s]*@)?[^@\s]*",
            "sqlite or postgresql://…, where a password has %40 for @ and %2F for /",
        ),
    )
    responses_db: str = setting(
        ":memory:",
        "sqlite file of stored responses; :memory: keeps them until the end",
        part=(PATH, "a file, or :memory:"),
    )
    responses_ttl_s: float = setting(
        30 * 24 * 3600.0,
        "time that stored responses and conversations are kept after their last use, in seconds",
        minimum=1,
    )
    batch_dir: str = setting(
        "none",
        "folder of /v1/files and /v1/batches; none: they are not served",
        part=(rf"none|{PATH}", "a folder, or none"),
    )
    batch_dir_gb: float = setting(
        10.0, "maximum size of the files in it, in GB; a key's at most half", minimum=0.000001
    )
    api_keys: tuple[str, ...] = setting(
        (), "comma-separated keys; empty: no key is needed", part=KEYS
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        "comma-separated keys that may load and unload models, and all that other keys may",
        part=KEYS,
    )
    api_keys_file: str = setting(
        "none", "TOML file of hashed keys with their classes, shares and limits"
    )
    metrics_keys: tuple[str, ...] = setting(
        (), "comma-separated keys that GET /metrics needs; empty: no key is needed", part=KEYS
    )
    model_control: bool = setting(
        False, "let clients load and unload models, where no keys are set"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "comma-separated origins of web pages, or *",
        part=(r"\*|null|[\w+.-]+://[^\s/*]+", "origins like https://their.site, or *"),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "comma-separated names in Host headers on a loopback address, or *",
        part=(r"\*|[\w.-]+", "host names without scheme, port or *, or * alone"),
    )
    log_format: str = setting("text", "format of the log's lines", ("text", "json"))
    unknown_fields: str = setting(
        "ignore", "fields of requests that nothing reads", ("ignore", "refuse")
    )
    trust_request_chat_template: bool = setting(
        False, "render the chat_template of a request, within the bounds of a checkpoint's"
    )
    debug: bool = setting(False, "show internal errors in error messages")

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys) or self.api_keys_file != "none"

    @property
    def has_batches(self) -> bool:
        return self.batch_dir != "none" or self.store != "sqlite"


SPECS = {spec.name: spec for spec in fields(Settings)}


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment. By default `.env` is loaded into it first; variables
    that are set already stay. Raises SettingsError."""
    if environ is None:
        for name, guess in misspelled(os.environ):  # other programs' variables: a warning only
            print(f"onequeue: {name} is not a setting; did you mean {guess}?", file=sys.stderr)
        load_env_file(".env")
        environ = os.environ
    values = {
        name: parse(spec, raw)
        for name, spec in SPECS.items()
        if (raw := environ.get(name.upper())) is not None
    }
    if (file := values.get("models", "none")) != "none":
        for name, value in read_models(file).items():
            if name in values:
                raise SettingsError(f"{name.upper()} is set, and in MODELS={file!r} too")
            values[name] = parse(SPECS[name], value)
    return Settings(**values)


class AdapterReference(NamedTuple):
    """A LoRA adapter as an entry of LORA names it. `base`: a chat model; empty: the first."""

    entry: str
    name: str
    path: str
    base: str


def parse_adapters(settings: Settings) -> list[AdapterReference]:
    matches = filter(None, map(ADAPTER.fullmatch, settings.lora))  # all do: they are checked
    return [AdapterReference(match[0], *match.groups(default="")) for match in matches]


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model as an entry of a setting names it."""

    entry: str  # the text
    name: str  # that clients see
    path: str  # a folder, a hub id, with @REVISION if one is given, or demo
    is_named: bool = False  # the entry gives the name
    options: tuple[tuple[str, Any], ...] = ()  # settings of this model alone, by field name
    pin: bool = False  # it is never unloaded

    def apply(self, settings: Settings) -> Settings:
        return replace(settings, **dict(self.options))


# Options of a model, with the setting that is the default of each, and the settings of models that
# take it; none: all.
OPTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dtype": ("dtype", ()),
    "quantization": ("quantization", ("chat_model",)),
    "attention": ("attn_implementation", ()),
    "task": ("pipeline_task", ("pipeline_model",)),
    "pooling": ("embedding_pooling", ("embedding_model",)),
    "max_len": ("max_model_len", ("chat_model",)),
    "sampling_defaults": ("sampling_defaults", ("chat_model", "pipeline_model")),
}


@cache
def parse_models(setting: str, value: str) -> tuple[ModelReference, ...]:
    """Parse the comma-separated entries of a setting, such as chat_model: `none` and `auto` have
    none. Raises SettingsError for a duplicate name, and the errors of `parse_model`."""
    if value in ("none", "auto"):
        return ()
    entries = split_entries(value)
    if not all(entries):
        raise SettingsError(f"{setting.upper()}={value!r}: an entry is empty: remove its comma")
    references = tuple(parse_model(setting, entry) for entry in entries)
    names = [reference.name for reference in references]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{setting.upper()}={value!r}: the name {name!r} is given twice")
    return references


def split_entries(value: str) -> list[str]:
    """Return the entries of a setting. JSON in an option may have commas."""
    return [entry.strip() for entry in re.split(f",{OUTSIDE_BRACES}", value)]


def split_entry(entry: str) -> tuple[str, str, str]:
    """Return the name that an entry gives, or "", its path and its options."""
    model, _, options = entry.partition(";")
    name, _, path = model.partition("=")
    if not (path and SERVED_NAME.fullmatch(name)) or is_local(model):
        name, path = "", model
    if not is_local(path):
        if link := HUB_LINK.fullmatch(path):
            path = link[1] + (f"/{link[2]}" if link[2] else "")
        elif path.endswith(".gguf") and is_local(file := "/".join(path.rsplit(":", 1))):
            path = file
        elif gguf := GGUF_NAME.fullmatch(path):
            path = f"{gguf[1]}/{gguf[3]}{gguf[2] or gguf[4] or ''}"
    return name, path, options


@cache
def parse_model(setting: str, entry: str) -> ModelReference:
    """Parse `[NAME=]MODEL[@REVISION][;OPTION=VALUE…]`. By default a folder is served by its last
    component, any other model by its id. MODEL:FILE.gguf is MODEL/FILE.gguf. Raises
    SettingsError for an option that is unknown, given twice, or has a value that is not accepted.
    """
    name, path, options = split_entry(entry)
    is_named = bool(name)
    if not name and (path.startswith(("/", ".", "~")) or (path != "demo" and is_local(path))):
        name = Path(path).expanduser().resolve().name
    values: dict[str, Any] = {}
    for option in filter(None, options.split(";")):
        key, _, raw = (part.strip() for part in option.partition("="))
        where = f"{setting.upper()}={entry!r}"
        if key in values:
            raise SettingsError(f"{where}: {key!r} is given twice")
        if key == "pin":
            values[key] = _parse_option(where, key, "debug", raw or "on")
            continue
        accepted = [name for name, (_, kinds) in OPTIONS.items() if not kinds or setting in kinds]
        if key not in accepted:
            known = ", ".join([*accepted, "pin"])
            raise SettingsError(f"{where}: {key!r} is no option of this setting, only {known}")
        values[key] = _parse_option(where, key, OPTIONS[key][0], raw)
    pin = values.pop("pin", False)
    own = tuple((OPTIONS[key][0], value) for key, value in values.items())
    return ModelReference(entry, name or path, path, is_named, own, pin)


def _parse_option(where: str, key: str, field_name: str, raw: str) -> Any:
    """Return the value of an option, by the setting that is its default."""
    try:
        return parse(SPECS[field_name], raw)
    except SettingsError as error:
        reason = str(error).partition(": ")[2]
        raise SettingsError(f"{where}: {key}={raw!r} {reason}") from None


def read_models(file: str) -> dict[str, str]:
    """Return the settings of models in a TOML file, by field name. An entry of a list is a string,
    as in the setting, or a table with model (of `lora` path), name, revision and options. Raises
    SettingsError."""
    where = f"MODELS={file!r}"
    values: dict[str, str] = {}
    for key, entries in read_toml(file, where).items():
        if key not in (*MODEL_SETTINGS, "lora"):
            accepted = ", ".join([*MODEL_SETTINGS, "lora"])
            raise SettingsError(f"{where}: {key!r} is no list of models, only {accepted}")
        given = entries if isinstance(entries, list) else [entries]
        main = "path" if key == "lora" else "model"
        texts = [_entry_of(f"{where}: {key}[{n}]", entry, main) for n, entry in enumerate(given)]
        values[key] = ",".join(texts) or "none"
    return values


def read_toml(file: str, where: str) -> dict[str, Any]:
    """Return the document in a file. Raises SettingsError, which begins with `where`."""
    text = _read_text(file, where)
    with refusing(where, ValueError, RecursionError):
        return tomllib.loads(text)


def _read_text(file: str, where: str) -> str:
    try:
        return Path(file).expanduser().read_text("utf-8-sig")  # Windows editors begin with a mark
    except OSError as error:
        raise SettingsError(f"{where}: {error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: is not UTF-8 text") from None


def load_env_file(file: str) -> None:
    """Load the variables of a file into the environment, also those of other libraries, such as
    HF_TOKEN. Variables that are set stay. A missing file has none. Raises SettingsError."""
    if not os.path.exists(file) or os.path.isdir(file):
        return
    text = _read_text(file, file)
    for name, guess in misspelled(dotenv_values(stream=StringIO(text))):
        raise SettingsError(f"{name} in {file} is not a setting; did you mean {guess}?")
    with refusing(file, ValueError):  # of the operating system, for a name or value
        load_dotenv(stream=StringIO(text))


def _entry_of(where: str, entry: object, main: str) -> str:
    """Return an entry of the file as the setting's text. `main`: the key that a table needs."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or not isinstance(entry.get(main), str):
        raise SettingsError(f"{where}: must be a string, or a table with a {main}")
    table = {key: _option_text(value) for key, value in entry.items()}
    for key, text in table.items():
        if re.search(f"[,;]{OUTSIDE_BRACES}", text):
            raise SettingsError(f"{where}: {key} must have no comma or semicolon, not {text!r}")
    name, model, revision = table.pop("name", ""), table.pop(main), table.pop("revision", "")
    options = "".join(f";{key}={text}" for key, text in table.items())
    return (f"{name}=" if name else "") + model + (f"@{revision}" if revision else "") + options


def _option_text(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def is_folder(path: str) -> bool:
    return os.path.isdir(os.path.expanduser(path))


def is_local(path: str) -> bool:
    """Return whether a path is a folder or a GGUF file."""
    return is_folder(path) or (path.endswith(".gguf") and os.path.isfile(os.path.expanduser(path)))


def export_flags(flags: Mapping[str, str | None]) -> None:
    """Put flags, by field name, into the environment; None is a flag that was not given."""
    os.environ.update({name.upper(): raw for name, raw in flags.items() if raw is not None})


def misspelled(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield names that are nearly a setting's, each with that setting."""
    known = [name.upper() for name in SPECS]
    for name in names:
        if name not in known:
            for guess in difflib.get_close_matches(name.upper(), known, 1, MIN_SIMILARITY):
                if len(guess) > SHORT_NAME or len(guess) == len(name):
                    yield name, guess


def parse(spec: Field[Any], raw: str) -> Any:
    """Return a setting's value. msgspec's lax conversion would cover the numbers alone: neither
    `on` and `off`, nor `auto`, nor lists by commas."""
    raw, choices, minimum = raw.strip(), spec.metadata["choices"], spec.metadata["minimum"]
    if isinstance(spec.default, tuple):
        parts = tuple(part.strip() for part in raw.split(",") if part.strip())
        pattern, accepted = spec.metadata["part"]
        if all(re.fullmatch(pattern, part) for part in parts):
            return parts
        value_text = "" if spec.name.endswith("_keys") else f"={raw[:200]!r}"  # keys are secret
        raise SettingsError(f"{spec.name.upper()}{value_text}: must be {accepted}")
    types: Any = get_args(spec.type) or [spec.type]
    kind, *optional = types
    if kind is str:
        pattern, accepted = spec.metadata["part"]
        if raw and (raw in choices or not choices) and re.fullmatch(pattern or ".*", raw):
            return raw
        accepted = accepted or ("one of " + ", ".join(choices) if choices else "a name")
    elif kind is bool:
        if raw.lower() in ("", "0", "1", "true", "false", "on", "off", "yes", "no"):
            return raw.lower() in ("1", "true", "on", "yes")
        accepted = "1 or 0"
    elif optional and raw.lower() == "auto":
        return None
    else:
        try:
            value = kind(raw)
        except ValueError:
            accepted = "a whole number" if kind is int else "a number"
        else:
            if minimum <= value <= MAX_NUMBER:
                return value
            accepted = f"at most {MAX_NUMBER}" if value > MAX_NUMBER else f"at least {minimum:g}"
    value_text = "" if spec.name == "store" else f"={raw[:200]!r}"  # it may have a password
    raise SettingsError(f"{spec.name.upper()}{value_text}: must be {accepted}")
