"""`GET /v1/models`, `GET /v1/models/{id}` and `POST /load_model`; the `model` field of requests.

The endpoints of /v1 look up a request's model by the names of a NamedModel.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.core.settings import ModelReference, SettingsError
from server.core.worker_client import WorkerClient
from server.http.errors import HttpError
from server.http.json import JsonBodyParser, parse_json
from server.http.request import JsonEndpoint, read_json_request
from server.http.sse import data_frame
from server.openai.request_fields import decode
from worker.messages.protocol import Generator, TextModel

MAX_NAME = 200  # characters that are compared with patterns
ANY_MODEL = ("", "dummy", "tgi")  # sent by clients that have to name a model


class LoadRequest(Struct):
    model: str | None = None


class LoadEvent(Struct):
    status: Literal["ready"]
    model: str | None
    cached: bool


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the id, of an alias that of its model
    serves: str  # `kind` of NamedModel
    input_modalities: list[Literal["text", "image", "audio"]]
    max_model_len: int | UnsetType = UNSET  # of text models, as the next
    context_length: int | UnsetType = UNSET


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class NamedModel:
    """A model and the names that requests may use for it. Responses name its id.

    `registry_name` is the kind (generation, embedding, rerank or transcription), which is the name
    of the kind's default model, or kind:name. The ids of `others` are taken.
    """

    def __init__(
        self,
        reference: ModelReference,
        worker_client: WorkerClient,
        registry_name: str,
        others: "Sequence[NamedModel]" = (),
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
            self.names.add(reference.path)
        self.aliases: list[str] = []
        self.patterns: list[str] = []  # aliases with a `*`
        ids = [other.id for other in others]
        if self.id in ids:
            self.id = f"{self.id}-{self.kind}"
            self.names.add(self.id)
            if self.id in ids:
                raise SettingsError(f"two models are served by the name {self.id!r}")

    @property
    def text_model(self) -> TextModel:
        """The loaded model; valid only while the worker client's `refusal` is None."""
        text_model = self.worker_client.models[self.registry_name].engine.text_model
        assert text_model, f"{self.registry_name} takes no text"
        return text_model

    @property
    def generator(self) -> Generator:
        """The loaded language model's engine, likewise."""
        generator = self.worker_client.models[self.registry_name].generator
        assert generator, f"{self.registry_name} is not a language model"
        return generator

    def describe(self, name: str) -> Model:
        """Describe the model under its id or an alias."""
        if (refusal := self.worker_client.refusal()) is not None:
            raise refusal
        model = Model(name, "model", self.created, "onequeue", self.id, self.kind, ["audio"])
        if self.kind != "transcription":
            text_model = self.text_model
            model.input_modalities = ["text"] if text_model.no_images_reason else ["text", "image"]
            model.max_model_len = model.context_length = text_model.max_model_len
        return model


@dataclass(frozen=True)
class ModelGroup:
    """The models that an endpoint serves. The first one serves requests that name none."""

    models: Sequence[NamedModel]

    @property
    def default(self) -> NamedModel:
        return self.models[0]

    @property
    def max_entries(self) -> int:
        """The tokens of the longest context: no list of a request is longer."""
        return max(model.text_model.max_model_len for model in self.models)

    def find(self, name: str | None) -> NamedModel:
        """Return the first model of a name, or else of a pattern of it. Raises an HttpError (404)
        that lists the models."""
        for model in self.models:
            if name in model.names:
                return model
        for model in self.models:
            if name and any(fnmatchcase(name[:MAX_NAME], pattern) for pattern in model.patterns):
                return model
        ids = ", ".join(dict.fromkeys(repr(model.id) for model in self.models))
        message = f"there is no model {(name or '')[:200]!r} here, only {ids}"
        raise HttpError(404, message, "model", code="model_not_found")

    def id_for(self, name: str | None) -> str:
        """Return the id for a name, or raise an HttpError (404)."""
        return self.find(name).id


def add_aliases(models: Sequence[NamedModel], aliases: Sequence[str]) -> None:
    """Add the names of `ALIAS=NAME` to the models; a `*` in an alias stands for any text. Raises
    SettingsError for one that is taken, or for an unknown model."""
    ids = {model.id: model for model in models}
    given: set[str] = set()
    for entry in aliases:
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
        (ids[id].patterns if "*" in alias else ids[id].aliases).append(alias)
    for model in models:
        model.names.update(model.aliases)


class ModelListing:
    """The endpoints about models."""

    def __init__(self, models: Sequence[NamedModel]) -> None:
        self.models = ModelGroup(models)
        self.body_parser = JsonBodyParser()

    def routes(self) -> list[Route]:
        routes = [
            Route("/v1/models", JsonEndpoint(self.list), methods=["GET"]),
            Route("/v1/models/{id:path}", JsonEndpoint(self.retrieve), methods=["GET"]),
        ]
        if self.models.default.kind == "generation":
            routes.append(Route("/load_model", self.load, methods=["POST"]))
        return routes

    async def list(self, request: Request) -> ModelList:
        models = [
            model.describe(name)
            for model in self.models.models
            for name in (model.id, *model.aliases)
        ]
        return ModelList("list", models)

    async def retrieve(self, request: Request) -> Model | ModelList:
        if not (name := request.path_params["id"]):
            return await self.list(request)
        model = self.models.find(name)
        return model.describe(name if name in model.aliases else model.id)

    async def load(self, request: Request) -> Response:
        """Answer `transformers chat`, which waits for a `ready` event before its first message.

        The model is loaded at start-up, so this event is the only one.
        """
        body, deadlines = await read_json_request(request.scope, request.receive)
        document = await self.body_parser.run(parse_json, body, deadlines.first)
        model = decode(document, LoadRequest, self.models.id_for).model
        frame = data_frame(LoadEvent("ready", model, cached=True))
        return Response(frame, media_type="text/event-stream")
