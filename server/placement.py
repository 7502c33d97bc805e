"""Which setting a MODEL on the command line is for, by the files of its checkpoint.

modules.json, or else the architecture in config.json → a setting; what else is served by default
gives way. Nothing is loaded; of a hub's models the two files are fetched, or come from the cache.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.preflight import MODELS, check_model
from server.settings import SettingsError
from worker.architectures import architectures, fetched, is_path, made_for, reason

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
