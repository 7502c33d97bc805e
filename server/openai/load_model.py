"""`POST /load_model`: what `transformers chat` asks before its first message.

It waits for an event that says `ready`. Here the one model is loaded from the start, so that is
the only event; another model is a 404.
"""

from functools import partial

import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server.http.body import Parsing, read_request, require_json
from server.openai.models import ModelNames
from server.openai.params import decode
from server.settings import Settings


class LoadRequest(Struct):
    model: str | None = None


class LoadModel:
    def __init__(self, settings: Settings, models: ModelNames) -> None:
        self.settings = settings
        self.models = models
        self.parsing = Parsing()

    async def answer(self, request: Request) -> Response:
        headers, body, deadlines = await read_request(
            request.scope, request.receive, self.settings, self.models.engine
        )
        require_json(headers)
        asked = await self.parsing.run(partial(decode, kind=LoadRequest), body, deadlines.first)
        model = self.models.require(asked.model)
        if (refusal := self.models.engine.refusal("generation")) is not None:
            raise refusal
        event = orjson.dumps({"status": "ready", "model": model, "cached": True})
        return Response(b"data: %b\n\n" % event, media_type="text/event-stream")
