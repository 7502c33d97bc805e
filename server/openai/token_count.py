"""Endpoints that count the tokens of a request's prompt, by rendering and tokenizing its input."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from server.http.json import JsonBodyParser, in_thread
from server.http.request import read_json_request, send_json
from server.openai.endpoint import ParsedRequest
from server.openai.images import ImageLoader
from server.openai.models import ModelGroup
from server.openai.tokenize import THREADS, panics_as_invalid_input
from worker.messages.generation import Chat, GenerationInput
from worker.messages.protocol import TextModel


@dataclass(eq=False)
class TokenCounter:
    """An ASGI app that takes a slot of the queue only while its model loads. `parse` may block if
    `parse_blocks`; `result` makes the response from the count."""

    models: ModelGroup
    images: ImageLoader
    parse: Callable[[bytes, Scope], ParsedRequest]
    result: Callable[[int], Struct]
    parse_blocks: bool = False

    def __post_init__(self) -> None:
        self.threads = anyio.CapacityLimiter(THREADS)
        self.body_parser = JsonBodyParser()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def parse(body: bytes) -> ParsedRequest:
            return self.parse(body, scope)

        body, deadlines = await read_json_request(scope, receive)
        until = deadlines.first
        request = await self.body_parser.run(parse, body, until, self.parse_blocks)
        named = self.models.find(request.body.model)
        async with named.loaded(scope, receive, deadlines) as model:
            [prompt] = await self.images.load(scope, receive, request.inputs, model, until)
            count = await in_thread(partial(count_tokens, model), prompt, until, self.threads)
        await send_json(send, self.result(count))


def count_tokens(model: TextModel, prompt: GenerationInput) -> int:
    assert isinstance(prompt.prompt, Chat)
    with panics_as_invalid_input():
        return len(model.encode(prompt.prompt))
