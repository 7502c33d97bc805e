"""The models that the settings name, each with its name in the registry and its own settings."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.apis.openai.decisions.endpoint import uses_language_model
from server.core.settings import OPTIONS, ModelReference, Settings, parse_models
from server.preflight import MODELS, pipeline_task

TEXT_GENERATION = "text-generation"
# Settings of the default chat model, with their value for others.
OF_DEFAULT_MODEL: Mapping[str, Any] = {"chat_template": "auto", "decision_config": "auto"}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """`settings` have the model's options. `name`: the kind, of its first model, or kind:name."""

    kind: str
    name: str
    reference: ModelReference
    settings: Settings
    generates: bool  # a language model
    served_by: str  # name of the entry whose model serves it: its own, or that of a chat model

    @property
    def generates_text(self) -> bool:
        """Whether its model, which may be a pipeline's, generates text and has a KV cache."""
        is_pipeline = self.kind == "pipeline"
        return self.generates or (is_pipeline and self.settings.pipeline_task == TEXT_GENERATION)


def model_entries(settings: Settings, with_loader: Container[str]) -> list[ModelEntry]:
    """Return the entries of all settings, each pipeline with its task. Models that generate text
    share KV_CACHE_GB and MAX_RUNNING. Raises SettingsError for a task that is not served.

    `with_loader`: settings whose models a function loads."""
    entries = list(_entries(settings, with_loader))
    count = sum(entry.generates_text and entry.served_by == entry.name for entry in entries)
    return [
        replace(entry, settings=_with_share(entry.settings, count))
        if entry.generates_text
        else entry
        for entry in entries
    ]


def _entries(settings: Settings, with_loader: Container[str]) -> Iterator[ModelEntry]:
    chats = {reference.path: name for name, reference in _named("chat_model", settings)}
    for setting, kind in MODELS.items():
        for name, reference in _named(setting, settings):
            own, served_by = reference.apply(settings), name
            generates = kind == "generation"
            if setting == "pipeline_model":
                own = replace(own, pipeline_task=pipeline_task(own, reference))
            if setting == "pipeline_model" and setting not in with_loader:
                if generates := uses_language_model(own, reference.path):
                    own = replace(own, chat_template="auto")
                    served_by = chats.get(reference.path, name)
            elif generates and name != kind:
                own = replace(own, **OF_DEFAULT_MODEL)
            yield ModelEntry(kind, name, reference, own, generates, served_by)


def entry_on_demand(
    kind: str, reference: ModelReference, settings: Settings, entries: Sequence[ModelEntry]
) -> ModelEntry:
    """Return the entry of a model that no setting names, with a share like that of its kind's
    configured ones, `entries`."""
    name, share = f"{kind}:{reference.name}", next(e.settings for e in entries if e.kind == kind)
    options: dict[str, Any] = {field: getattr(settings, field) for field, _ in OPTIONS.values()}
    own = replace(share, **options, **OF_DEFAULT_MODEL)
    return ModelEntry(kind, name, reference, own, kind == "generation", name)


def _named(setting: str, settings: Settings) -> Iterator[tuple[str, ModelReference]]:
    kind = MODELS[setting]
    for n, reference in enumerate(parse_models(setting, getattr(settings, setting))):
        yield f"{kind}:{reference.name}" if n else kind, reference


def _with_share(settings: Settings, count: int) -> Settings:
    """Return the settings of one of `count` models that generate text."""
    cache = settings.kv_cache_gb
    return replace(
        settings,
        kv_cache_gb=None if cache is None else cache / count,
        max_running=max(1, settings.max_running // count),
    )


def shares_recognizer(pipeline: ModelEntry, transcription: ModelEntry) -> bool:
    """Return whether POST / and /v1/audio use the same model, which is then loaded once."""
    same = pipeline.reference.path == transcription.reference.path
    return same and pipeline.settings.pipeline_task == "automatic-speech-recognition"
