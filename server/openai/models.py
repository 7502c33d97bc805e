"""`GET /v1/models`, `GET /v1/models/{id}`, `POST /load_model`, and which names the model has."""

import time
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.engine import Engine
from server.http.json import Parsing, to_json
from server.http.request import JsonEndpoint, read_json_request
from server.openai.params import Names, decode
from server.settings import Settings

PATH = "/v1/models"
ONE_PATH = "/v1/models/{id:path}"
ANY_MODEL = ("", "dummy", "tgi")  # what clients send that have to send something


class LoadRequest(Struct):
    model: str | None = None


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    context_length: int


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class ModelNames:
    """The one language model, by the names that requests may call it."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.engine = engine
        self.created = int(time.time())
        self.id = setting = settings.chat_model
        if setting.startswith(("/", ".", "~")) or (setting != "demo" and Path(setting).is_dir()):
            self.id = Path(setting).expanduser().resolve().name or setting
        self.names = Names(self.id, {setting, *ANY_MODEL})
        self.parsing = Parsing()

    def routes(self) -> list[Route]:
        return [
            Route(PATH, JsonEndpoint(self.list), methods=["GET"]),
            Route(ONE_PATH, JsonEndpoint(self.one), methods=["GET"]),
            Route("/load_model", self.load, methods=["POST"]),
        ]

    async def list(self, request: Request) -> ModelList:
        return ModelList("list", [self._described()])

    async def one(self, request: Request) -> Model:
        request.scope["counted_as"] = PATH + "/{id}"
        self.names.of(request.path_params["id"])
        return self._described()

    async def load(self, request: Request) -> Response:
        """What `transformers chat` asks before its first message. It waits for an event that says
        `ready`: the model is loaded from the start, so that this is the only one."""
        body, deadlines = await read_json_request(request.scope, request.receive, "generation")
        read = partial(decode, kind=LoadRequest, names=self.names)
        model = (await self.parsing.run(read, body, deadlines.first)).model
        event = to_json({"status": "ready", "model": model, "cached": True})
        return Response(b"data: %b\n\n" % event, media_type="text/event-stream")

    def _described(self) -> Model:
        if (refusal := self.engine.refusal("generation")) is not None:
            raise refusal
        length = self.engine.generator.max_model_len
        return Model(self.id, "model", self.created, "onequeue", length, length)
