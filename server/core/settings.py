"""Settings: the only place that reads environment variables (and `.env`).

Each field is an environment variable in capitals and a flag of `python -m server`. A value
that cannot be used is refused at start-up by name. Nothing is looked up again later.
"""

import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from dotenv import dotenv_values, load_dotenv

NEARLY = 0.82  # of difflib's 1: two letters swapped, a part left out
SHORT = 7  # letters: a name that is a setting and a letter more may well be somebody else's


class SettingsError(ValueError):
    """Says which setting is wrong and what it may be."""


def setting(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    each: tuple[str, str] = ("", ""),
) -> Any:
    """A number whose default is None is written `auto`. `each`: a pattern for each part of what is
    comma-separated, and what that is in words."""
    about = {"help": text, "choices": choices, "minimum": minimum, "each": each}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Settings:
    pipeline_task: str = setting(
        "auto", "what POST / runs: a transformers pipeline task; auto: what the model was made for"
    )
    pipeline_model: str = setting("demo", "a hub id, a local path, demo, or none")
    chat_model: str = setting("demo", "what the chat and completions endpoints run, named likewise")
    embedding_model: str = setting("demo", "what /v1/embeddings runs, named likewise")
    rerank_model: str = setting("none", "what /rerank and /v1/score run, named likewise")
    transcription_model: str = setting("none", "what /v1/audio/transcriptions runs, named likewise")
    allow_dimensions: bool = setting(
        False, "embeddings may be shortened that were not trained for it (Matryoshka)"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto",
        "precision of the weights; auto is the checkpoint's own",
        ("auto", "float32", "bfloat16", "float16"),
    )
    attn_implementation: str = setting("auto", "attention backend, as transformers names them")
    quantization: str = setting("none", "int8 weights on a CPU", ("none", "int8"))
    compile: str = setting(
        "auto", "compile in the background: the chat model, attention", ("auto", "on", "off")
    )
    speculation: str = setting("auto", "draft tokens from the request's own text", ("auto", "off"))
    pin_worker: str = setting(
        "auto",
        "the worker thread keeps as many cores as compute; auto: where others are left over",
        ("auto", "on", "off"),
    )
    max_model_len: int | None = setting(None, "tokens of prompt and answer together", minimum=2)
    kv_cache_gb: float | None = setting(
        None, "memory for keys and values of running sequences", minimum=0.000001
    )
    max_running: int = setting(256, "sequences generated at the same time", minimum=1)
    max_batch_size: int = setting(32, "rows in one forward pass at most", minimum=1)
    max_batch_tokens: int = setting(16384, "tokens in one forward pass at most", minimum=1)
    max_batch_wait_ms: float = setting(
        1.0, "how long the first item of a batch waits for others, in milliseconds", minimum=0
    )
    max_queue_size: int = setting(1024, "accepted and unanswered inputs; beyond it 503", minimum=1)
    request_timeout_s: float = setting(
        60.0, "a request whose answer, or its first token, takes longer gets 504", minimum=0.001
    )
    body_timeout_s: float = setting(
        10.0,
        "a body without progress, or a header that is not whole, for so long gets 408",
        minimum=0.001,
    )
    max_body_mb: float = setting(32.0, "larger bodies get 413", minimum=0.000001)
    max_image_mp: float = setting(
        64.0, "megapixels of one image, and of all that are decoded at a time", minimum=1
    )
    image_fetch: tuple[str, ...] = setting(
        (),
        "comma-separated hosts from which images of chats may be fetched, or any",
        each=(r"[\w.-]+|[\da-fA-F:]+", "hosts without scheme, port or *, or any"),
    )
    max_audio_mb: float = setting(200.0, "larger uploads of sound get 413", minimum=0.000001)
    max_audio_s: float = setting(7200.0, "seconds that a recording may last", minimum=0.03)
    shutdown_grace_s: float = setting(
        30.0, "how long accepted work may take after SIGTERM", minimum=0
    )
    stuck_after_s: float = setting(
        120.0, "a forward longer than this turns /health red", minimum=0.001
    )
    responses_db: str = setting(
        ":memory:", "sqlite file that keeps stored responses; :memory: loses them at the end"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "comma-separated; empty: everybody may call",
        each=("[!-~]+", "keys of ASCII characters without spaces, as a header can carry"),
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "comma-separated origins of web pages, or *",
        each=(
            r"\*|null|[\w+.-]+://[^\s/*]+",
            "origins like https://their.site, or *",
        ),
    )
    debug: bool = setting(False, "show internals in error messages")


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """From the environment, where it says nothing from `.env`, which is put into it."""
    if environ is None:
        for name, guess in misspelt(dotenv_values(".env")):
            raise SettingsError(f"{name} in .env is not a setting; did you mean {guess}?")
        for name, guess in misspelt(os.environ):  # which is not ours alone
            print(f"onequeue: {name} is not a setting; did you mean {guess}?", file=sys.stderr)
        load_dotenv(".env")  # with what is for the hub's library, and others
        environ = os.environ
    values = {
        spec.name: _parse(spec, raw)
        for spec in fields(Settings)
        if (raw := environ.get(spec.name.upper())) is not None
    }
    return Settings(**values)


def put_flags(flags: Mapping[str, str | None]) -> None:
    """Flags that were given, by field name, into the environment."""
    os.environ.update({name.upper(): raw for name, raw in flags.items() if raw is not None})


def misspelt(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that are none of ours but nearly, each with the one that is meant."""
    known = [spec.name.upper() for spec in fields(Settings)]
    for name in given:
        if name not in known:
            for guess in difflib.get_close_matches(name.upper(), known, 1, NEARLY):
                if len(guess) > SHORT or len(guess) == len(name):
                    yield name, guess


def _parse(spec: Any, raw: str) -> Any:
    raw, choices, minimum = raw.strip(), spec.metadata["choices"], spec.metadata["minimum"]
    if isinstance(spec.default, tuple):
        parts = tuple(part.strip() for part in raw.split(",") if part.strip())
        pattern, wanted = spec.metadata["each"]
        if all(re.fullmatch(pattern, part) for part in parts):
            return parts
        shown = "" if spec.name == "api_keys" else f"={raw!r}"  # which are secret
        raise SettingsError(f"{spec.name.upper()}{shown}: must be {wanted}")
    [kind, *optional] = get_args(spec.type) or [spec.type]
    if kind is str:
        if raw and (raw in choices or not choices):
            return raw
        wanted = "one of " + ", ".join(choices) if choices else "a name"
    elif kind is bool:
        if raw.lower() in ("", "0", "1", "true", "false", "on", "off", "yes", "no"):
            return raw.lower() in ("1", "true", "on", "yes")
        wanted = "1 or 0"
    elif optional and raw.lower() == "auto":
        return None
    else:
        try:
            value = kind(raw)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
        else:
            if minimum <= value < math.inf:
                return value
            wanted = f"at least {minimum:g}"
    raise SettingsError(f"{spec.name.upper()}={raw!r}: must be {wanted}")
