"""`GET /v1/models`, `GET /v1/models/{id}`, `POST /load_model`, and which names models have."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.core.worker_client import WorkerClient
from server.http.errors import HttpError
from server.http.json import JsonBodyParser, parse_json, to_json
from server.http.request import JsonEndpoint, read_json_request
from server.openai.request_fields import decode
from worker.messages.protocol import TextModel

ANY_MODEL = ("", "dummy", "tgi")  # what clients send that have to send something


class LoadRequest(Struct):
    model: str | None = None


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    serves: str  # its name in the registry: generation, embedding, rerank, transcription
    input_modalities: list[Literal["text", "image", "audio"]]
    # of models of text
    max_model_len: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class ModelNames:
    """A model, by the names that requests may call it; `serves` is its name in the registry."""

    def __init__(
        self,
        setting: str,
        worker_client: WorkerClient,
        serves: str,
        named: "Sequence[ModelNames]" = (),
    ) -> None:
        """`named`: those before it, whose ids are taken."""
        self.worker_client = worker_client
        self.serves = serves
        self.created = int(time.time())
        self.id = setting
        if setting.startswith(("/", ".", "~")) or (setting != "demo" and Path(setting).is_dir()):
            self.id = Path(setting).expanduser().resolve().name or setting
        self.names = {None, setting, self.id, *ANY_MODEL}
        if self.id in [each.id for each in named]:
            self.id = f"{self.id}-{serves}"
            self.names.add(self.id)
        self.called = partial(id_of, [self])  # what requests call it → its id

    @property
    def text_model(self) -> TextModel:
        """Valid once the worker client's `refusal` has returned None."""
        text_model = self.worker_client.models[self.serves].engine.text_model
        assert text_model, f"{self.serves} takes no text"
        return text_model

    def described(self) -> Model:
        if (refusal := self.worker_client.refusal()) is not None:
            raise refusal
        model = Model(self.id, "model", self.created, "onequeue", self.serves, ["audio"])
        if self.serves != "transcription":
            model.input_modalities = ["text"] if self.text_model.no_images else ["text", "image"]
            model.max_model_len = model.context_length = self.text_model.max_model_len
        return model


def find(models: Sequence[ModelNames], name: str | None) -> ModelNames:
    """The first that goes by a name; 404 with what there is."""
    for each in models:
        if name in each.names:
            return each
    ids = ", ".join(dict.fromkeys(repr(each.id) for each in models))
    unknown = f"there is no model {(name or '')[:200]!r} here, only {ids}"
    raise HttpError(404, unknown, "model", code="model_not_found")


def id_of(models: Sequence[ModelNames], name: str | None) -> str:
    return find(models, name).id


class ModelListing:
    """All models that are called by a name."""

    def __init__(self, models: Sequence[ModelNames]) -> None:
        self.models = models
        self.parsing = JsonBodyParser()

    def routes(self) -> list[Route]:
        routes = [
            Route("/v1/models", JsonEndpoint(self.list), methods=["GET"]),
            Route("/v1/models/{id:path}", JsonEndpoint(self.one), methods=["GET"]),
        ]
        if self.models[0].serves == "generation":
            routes.append(Route("/load_model", self.load, methods=["POST"]))
        return routes

    async def list(self, request: Request) -> ModelList:
        return ModelList("list", [names.described() for names in self.models])

    async def one(self, request: Request) -> Model | ModelList:
        if not (name := request.path_params["id"]):
            return await self.list(request)
        return find(self.models, name).described()

    async def load(self, request: Request) -> Response:
        """What `transformers chat` asks before its first message. It waits for an event that says
        `ready`: the model is loaded from the start, so that this is the only one."""
        body, deadlines = await read_json_request(request.scope, request.receive)
        document = await self.parsing.run(parse_json, body, deadlines.first)
        model = decode(document, LoadRequest, self.models[0].called).model
        event = to_json({"status": "ready", "model": model, "cached": True})
        return Response(b"data: %b\n\n" % event, media_type="text/event-stream")
