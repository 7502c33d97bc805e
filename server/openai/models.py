"""`GET /v1/models`, `GET /v1/models/{id}`, and which names of the language model are known."""

import time
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.engine import Engine
from server.http.errors import HttpError

PATH = "/v1/models"
ONE_PATH = "/v1/models/{id:path}"
ANY_MODEL = ("", "dummy", "tgi")  # what clients send that have to send something


class ModelNames:
    """The one language model, by the names that requests may call it."""

    def __init__(self, setting: str, engine: Engine) -> None:
        self.engine = engine
        self.created = int(time.time())
        self.id = setting
        if setting.startswith(("/", ".", "~")) or (setting != "demo" and Path(setting).is_dir()):
            self.id = Path(setting).expanduser().resolve().name or setting
        self.names = {setting, self.id, *ANY_MODEL}

    def require(self, name: str | None) -> str:
        """The listed id; 404 for a model that is not here."""
        if name is not None and name not in self.names:
            unknown = f"there is no model {name[:200]!r} here, only {self.id!r}"
            raise HttpError(404, unknown, "model", code="model_not_found")
        return self.id

    async def list(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def one(self, request: Request) -> Response:
        request.scope["counted_as"] = PATH + "/{id}"
        self.require(request.path_params["id"])
        return _json(self._described())

    def _described(self) -> dict[str, object]:
        if (refusal := self.engine.refusal("generation")) is not None:
            raise refusal
        length = self.engine.generator.max_model_len
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "onequeue",
            "max_model_len": length,
            "context_length": length,
        }


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
