"""`GET /v1/models`, `GET /models`, `POST /models/load`, `/models/unload` and `/load_model`.

`/models` and its paths are as in llama.cpp's router, `/load_model` is as in transformers' server.

The endpoints of /v1 look up a request's model by the names of a NamedModel.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.request_fields import convert_body, required
from server.core.model_manager import AWAIT_MODEL, Residency
from server.core.settings import ModelReference, SettingsError
from server.core.worker_client import IncomingRequest, Submission, WorkerClient
from server.http.access import check_admin
from server.http.errors import HttpError
from server.http.json import JsonBodyParser, parse_json
from server.http.operation import EVENTS, Operation, OperationRoute, routes_of
from server.http.request import read_json_request
from server.http.sse import COMMENT, EventStream, data_frame
from worker.messages.adapters import Adapter
from worker.messages.generation import PLURALS, SamplingDefaults
from worker.messages.protocol import TextModel
from worker.registry import ServedModel, TextModelInfo
from worker.task_detection import split_file
from worker.tasks import TASKS

MAX_NAME = 200  # characters that are compared with patterns
ANY_MODEL = ("", "dummy", "tgi")  # sent by clients that have to name a model
KIND_TASKS = {
    "generation": ["text-generation"],
    "embedding": ["feature-extraction"],
    "rerank": ["text-ranking"],
    "transcription": ["automatic-speech-recognition"],
}
Modality = Literal["text", "image", "audio", "video"]
MODALITIES: dict[str, list[Modality]] = {
    "text": ["text"], "json": ["text"], "image": ["image"], "audio": ["audio"],
}  # fmt: skip


# The limits of a model that has not been loaded yet: its `prepare` has its own.
NOT_LOADED = TextModelInfo(max_model_len=1 << 20, refused_media={})


class LoadRequest(Struct):
    model: str | None = None


class Progress(Struct):
    current: int
    total: int


class LoadEvent(Struct):
    """An event of `POST /load_model`, as transformers' server sends them."""

    status: Literal["loading", "ready", "error"]
    model: str | None
    stage: str | UnsetType = UNSET  # while it is loading, as the next
    progress: Progress | UnsetType = UNSET
    cached: bool | UnsetType = UNSET  # when it is ready
    message: str | UnsetType = UNSET  # of an error


class LoadResponse(Struct):
    success: bool


class ModelStatus(Struct):
    """As llama.cpp's router has it. `stage`: of the load, or of the compilation after it."""

    value: Literal["unloaded", "loading", "loaded", "failed"]
    stage: str | UnsetType = UNSET
    progress: Progress | UnsetType = UNSET
    failed: bool | UnsetType = UNSET
    error: str | UnsetType = UNSET


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the id, of an alias that of its model
    serves: str  # `kind` of NamedModel
    status: ModelStatus
    tasks: list[str]
    input_modalities: list[Modality]
    max_model_len: int | UnsetType = UNSET  # of text models, as the next
    context_length: int | UnsetType = UNSET
    sampling_defaults: SamplingDefaults | UnsetType = UNSET  # of a loaded language model
    mask_token: str | UnsetType = UNSET  # of a loaded fill-mask pipeline
    parent: str | UnsetType = UNSET  # of an adapter: the id of its base


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class NamedModel:
    """A model and the names that requests may use for it. Responses name its id.

    `registry_name` is the kind (generation, embedding, rerank or transcription), which is the name
    of the kind's default model, or kind:name. The ids of `others` are taken. `task`: of a pipeline.
    """

    def __init__(
        self,
        reference: ModelReference,
        worker_client: WorkerClient,
        registry_name: str,
        others: "Sequence[NamedModel]" = (),
        task: str = "",
    ) -> None:
        self.worker_client = worker_client
        self.registry_name = registry_name
        self.kind, _, own_name = registry_name.partition(":")
        self.created = int(time.time())
        self.id = reference.name
        self.names: set[str | None] = {self.id}
        if not own_name:
            self.names |= {None, *ANY_MODEL}
        if not reference.is_named:
            self.names |= {reference.path, ":".join(filter(None, split_file(reference.path)))}
        self.adapter: Adapter | None = None  # that its requests run with
        self.adapters: dict[str, AdaptedModel] = {}  # by name
        self.aliases: list[str] = []
        self.patterns: dict[str, int] = {}  # aliases with a `*`: their places in MODEL_ALIASES
        self.tasks = [task] if task else KIND_TASKS[self.kind]
        self.modalities = MODALITIES[TASKS[task].kind if task else "text"]
        if self.kind == "transcription":
            self.modalities = MODALITIES["audio"]
        ids = [other.id for other in others]
        if self.id in ids:
            self.id = f"{self.id}-{self.kind}"
            self.names.add(self.id)
            if self.id in ids:
                raise SettingsError(f"two models are served by the name {self.id!r}")

    @property
    def served(self) -> ServedModel:
        return self.worker_client.models[self.registry_name]

    @property
    def text_model(self) -> TextModel:
        text_model = self.served.engine.text_model
        assert text_model, f"{self.registry_name} takes no text"
        return text_model

    @asynccontextmanager
    async def loaded(self, incoming: IncomingRequest) -> AsyncIterator[TextModel]:
        """Have the model loaded and keep it. Raises the errors of a submission."""
        if self.served.state == "ready":
            yield self.text_model
            return
        name = self.registry_name
        with Submission[None](self.worker_client, name, [AWAIT_MODEL], incoming) as submission:
            await submission.items[0].future
            yield self.text_model

    @property
    def text_info(self) -> TextModel | TextModelInfo:
        """The limits of the model: since its first load its own."""
        return self.text_model if self.served.is_loaded else self.served.text_info or NOT_LOADED

    @property
    def defaults(self) -> SamplingDefaults | None:
        """The loaded language model's defaults; None while it is not loaded."""
        generator = self.served.generator if self.served.is_loaded else None
        return generator.defaults if generator else None

    def call_id(self, name: str, index: int) -> str:
        """Return an id for a tool call, as the loaded language model accepts it back."""
        generator = self.served.generator
        assert generator, f"{self.registry_name} is not a language model"
        return generator.call_id(name, index)

    @property
    def residency(self) -> Residency:
        return self.worker_client.manager.models[self.registry_name]

    def status(self) -> ModelStatus:
        entry = self.residency
        if entry.is_loading:
            load = entry.model.progress
            progress = Progress(load.done, load.total) if load.total else UNSET
            return ModelStatus("loading", load.stage, progress)
        if entry.model.state == "failed":
            return ModelStatus("failed", failed=True, error=entry.failure)
        if entry.model.state == "ready":
            return ModelStatus("loaded", entry.model.stage or UNSET)
        return ModelStatus("unloaded")

    def load_event(self) -> LoadEvent:
        """Return the event of a model that is loading, ready or failed."""
        entry, id, status = self.residency, self.id, self.status()
        if status.value == "loading":
            return LoadEvent("loading", id, status.stage, status.progress)
        if entry.is_ready:
            return LoadEvent("ready", id, cached=False)
        return LoadEvent("error", id, message=entry.failure or "the model was unloaded")

    def describe(self, name: str) -> Model:
        """Describe the model under its id or an alias."""
        if (refusal := self.worker_client.refusal()) is not None:
            raise refusal
        model = Model(
            id=name,
            object="model",
            created=self.created,
            owned_by="onequeue",
            root=self.id,
            serves=self.kind,
            status=self.status(),
            tasks=self.tasks,
            input_modalities=[*self.modalities],
            sampling_defaults=self.defaults or UNSET,
        )
        if self.served.info and self.served.info.mask:
            model.mask_token = self.served.info.mask
        if self.kind in ("transcription", "pipeline") or (info := self.text_info) is NOT_LOADED:
            return model
        model.input_modalities += [kind for kind in PLURALS if kind not in info.refused_media]
        model.max_model_len = model.context_length = info.max_model_len
        return model


class AdaptedModel(NamedModel):
    """A language model with a LoRA adapter, which requests name by the adapter's name."""

    adapter: Adapter

    def __init__(self, base: NamedModel, adapter: Adapter) -> None:
        reference = ModelReference(adapter.name, adapter.name, "", is_named=True)
        super().__init__(reference, base.worker_client, base.registry_name)
        self.names = {self.id}
        self.base = base
        self.adapter = adapter

    def status(self) -> ModelStatus:
        status = super().status()
        if status.value == "loaded" and (reason := self.adapter.unusable_reason):
            return ModelStatus("failed", failed=True, error=reason)
        return status

    def describe(self, name: str) -> Model:
        model = super().describe(name)
        model.parent = self.base.id
        return model


class UnknownModel(HttpError):
    """A 404: no model has the name."""


class ModelGroup:
    """The models of an endpoint, in lists that may grow. The first serves unnamed requests."""

    def __init__(self, *lists: Sequence[NamedModel]) -> None:
        self.lists = lists

    @property
    def models(self) -> Sequence[NamedModel]:
        return [*chain(*self.lists)]

    @property
    def default(self) -> NamedModel:
        return self.models[0]

    @property
    def max_entries(self) -> int:
        """The tokens of the longest context: no list of a request is longer."""
        return max((model.text_info.max_model_len for model in self.models), default=0)

    def find(self, name: str | None) -> NamedModel:
        """Return the first model of a name, or else that of its first pattern. Raises UnknownModel
        (404) that lists the models."""
        models = self.models
        for model in models:
            if name in model.names:
                return model
            if adapted := model.adapters.get(name or ""):
                return adapted
        matches = {
            place: model
            for model in models
            for pattern, place in model.patterns.items()
            if name and fnmatchcase(name[:MAX_NAME], pattern)
        }
        if matches:
            return matches[min(matches)]
        served = [named for model in models for named in (model, *model.adapters.values())]
        ids = ", ".join(dict.fromkeys(repr(named.id) for named in served))
        message = f"there is no model {(name or '')[:200]!r} here, only {ids}"
        raise UnknownModel(404, message, "model", code="model_not_found")

    async def look_up(self, name: str | None) -> NamedModel:
        """Return the model of a name as `find` does, also one that was added to the cache."""
        try:
            return self.find(name)
        except UnknownModel:
            await self.default.worker_client.manager.rescan()
        return self.find(name)

    def id_for(self, name: str | None) -> str:
        """Return the id for a name, or raise UnknownModel (404)."""
        return self.find(name).id


def add_aliases(models: Sequence[NamedModel], aliases: Sequence[str]) -> None:
    """Add the names of `ALIAS=NAME` to the models; a `*` in an alias stands for any text. Raises
    SettingsError for one that is taken, or for an unknown model."""
    ids = {model.id: model for model in models}
    given: set[str] = set()
    for place, entry in enumerate(aliases):
        alias, _, id = entry.partition("=")
        if alias in given:
            raise SettingsError(f"MODEL_ALIASES: {alias!r} is given twice")
        if any(alias in model.names for model in models):
            raise SettingsError(f"MODEL_ALIASES: {alias!r} is a served model's own name")
        if id not in ids:
            known = ", ".join(map(repr, ids)) or "none"
            raise SettingsError(
                f"MODEL_ALIASES={entry!r}: no model is served by the name {id!r}, only {known}"
            )
        given.add(alias)
        if "*" in alias:
            ids[id].patterns[alias] = place
        else:
            ids[id].aliases.append(alias)
    for model in models:
        model.names.update(model.aliases)


class ModelListing:
    """The endpoints about models. `named`: those of /v1; `pipelines`: those of `POST /`."""

    def __init__(self, named: ModelGroup, pipelines: Sequence[NamedModel]) -> None:
        self.named = named
        self.all = ModelGroup(*named.lists, pipelines)
        self.body_parser = JsonBodyParser()

    def routes(self) -> list[OperationRoute]:
        routes = routes_of(self.list_all, self.load, self.unload)
        if self.named.models:
            routes += routes_of(self.list, self.retrieve, self.load_events)
        return routes

    @Operation("GET /v1/models", "The models", ModelList, errors=[503])
    async def list(self, request: Request) -> ModelList:
        return await listing(self.named)

    @Operation("GET /models", "The models, those of POST / included", ModelList, errors=[503])
    async def list_all(self, request: Request) -> ModelList:
        return await listing(self.all)

    @Operation("GET /v1/models/{id:path}", "A model by its name", Model, errors=[503])
    async def retrieve(self, request: Request) -> Model | ModelList:
        if not (name := request.path_params["id"]):
            return await self.list(request)
        model = await self.named.look_up(name)
        return model.describe(name if name in model.aliases else model.id)

    async def _model(self, scope: Scope, receive: Receive, models: ModelGroup) -> NamedModel:
        body, incoming = await read_json_request(scope, receive)
        document = await self.body_parser.run(parse_json, body, incoming.deadlines.first)
        required(document.get("model"), "model")
        return await models.look_up(convert_body(document, LoadRequest, scope).model)

    @Operation(
        "POST /models/load", "Start to load a model", LoadResponse, LoadRequest, errors=[403]
    )
    async def load(self, request: Request) -> LoadResponse:
        """Start to load a model; its progress is in the listing."""
        check_admin(request.scope)
        model = await self._model(request.scope, request.receive, self.all)
        if model.residency.is_ready or model.residency.is_loading:
            raise InvalidInput.at("model", f"{model.id!r} is already {model.status().value}")
        model.worker_client.manager.request_load(model.residency)
        return LoadResponse(success=True)

    @Operation(
        "POST /models/unload",
        "Unload a model once what runs on it has finished",
        LoadResponse,
        LoadRequest,
        errors=[403],
    )
    async def unload(self, request: Request) -> LoadResponse:
        """Unload a model once its work has finished, or end its load. New requests load it."""
        check_admin(request.scope)
        model = await self._model(request.scope, request.receive, self.all)
        if model.served.pin:
            raise InvalidInput.at("model", f"{model.id!r} is pinned")
        can_end = model.residency.queued and model.worker_client.worker.started
        if not (model.residency.is_ready or can_end):
            status = model.status().value
            state = "already being unloaded" if status == "loaded" else f"{status}, not loaded"
            raise InvalidInput.at("model", f"{model.id!r} is {state}")
        model.worker_client.manager.request_unload(model.residency)
        return LoadResponse(success=True)

    @Operation(
        "POST /load_model",
        "Load a model: an event for each change, the last is `ready` or `error`",
        {EVENTS: {"description": "Events, each a JSON object."}},
        LoadRequest,
        errors=[403],
    )
    async def load_events(self, request: Request) -> Response:
        """transformers' chat client waits for `ready` before its first message."""
        model = await self._model(request.scope, request.receive, self.named)
        if model.residency.is_ready:
            frame = data_frame(LoadEvent("ready", model.id, cached=True))
            return Response(frame, media_type="text/event-stream")
        check_admin(request.scope)
        model.worker_client.manager.request_load(model.residency)
        return LoadEvents(model)


class LoadEvents(Response):
    """The response of `POST /load_model` while the model loads. The load goes on without it."""

    def __init__(self, model: NamedModel) -> None:
        self.model = model
        self.changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watchers = self.model.residency.watchers
        watchers.add(self.changed)
        try:
            await EventStream(scope, send, self.changed.set).run(self.events())
        finally:
            watchers.discard(self.changed)

    async def events(self) -> AsyncIterator[bytes]:
        sent = b""
        while True:
            self.changed.clear()
            event = self.model.load_event()
            frame = data_frame(event)
            yield COMMENT if frame == sent else frame
            sent = frame
            if event.status != "loading":
                return
            await self.changed.wait()


async def listing(group: ModelGroup) -> ModelList:
    await group.default.worker_client.manager.rescan()
    names = [(model, name) for model in group.models for name in (model.id, *model.aliases)]
    names += [(adapted, name) for model in group.models for name, adapted in model.adapters.items()]
    return ModelList("list", [model.describe(name) for model, name in names])
