"""`POST /tokenize`, `POST /detokenize`: text or a conversation to token ids, and back, as in vLLM.

Both use the tokenizer without a forward pass, and run in a pool thread.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.http.errors import HttpError
from server.http.json import JsonBodyParser, in_thread, parse_json
from server.http.operation import Operation, OperationRoute
from server.http.request import read_json_request, send_json
from server.openai.images import check_images
from server.openai.messages import Messages, conversation
from server.openai.models import ModelGroup, NamedModel
from server.openai.request_fields import TokenId, decode
from server.openai.tools import Tools
from worker.messages.generation import Chat
from worker.messages.protocol import TextModel

MAX_PROMPT_BYTES = 1 << 20
THREADS = 2  # a long text delays others here, but no generation


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Struct):
    prompt: str


class TokenizeRequest(Struct):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def input(self, model: TextModel) -> Chat | str:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInput.at("prompt", "is required, or messages instead; not both")
        if self.messages is None:
            return self.prompt or ""
        chat = conversation(self, self.messages, self.tools)
        check_images(chat, model)
        for image in chat.images:
            if image.link:
                raise InvalidInput.at(image.param, "must be a data: URL; links are not fetched")
        return chat

    def run(self, model: TextModel) -> Tokens:
        special = True if self.add_special_tokens is None else self.add_special_tokens
        if len((self.prompt or "").encode()) > MAX_PROMPT_BYTES:
            raise HttpError(413, f"prompt: at most {MAX_PROMPT_BYTES} bytes are accepted", "prompt")
        ids = model.encode(self.input(model), special)
        strings = [model.token(id) for id in ids] if self.return_token_strs else None
        return Tokens(len(ids), model.max_model_len, ids, strings)


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None

    def run(self, model: TextModel) -> Prompt:
        if self.tokens:
            largest = max(self.tokens)
            try:
                model.token(largest)
            except InvalidInput as error:
                path = f"tokens[{self.tokens.index(largest)}]"
                raise InvalidInput.at(path, str(error)) from None
        return Prompt(model.decode(self.tokens))


TOKENIZE = Operation(
    "POST /tokenize", "The token ids of a text or a conversation", Tokens, TokenizeRequest
)
DETOKENIZE = Operation("POST /detokenize", "The text of token ids", Prompt, DetokenizeRequest)


def tokenizer_routes(models: Sequence[NamedModel]) -> list[OperationRoute]:
    group = ModelGroup(models)
    return [
        OperationRoute(TOKENIZE, TokenizerEndpoint(TokenizeRequest, group)),
        OperationRoute(DETOKENIZE, TokenizerEndpoint(DetokenizeRequest, group)),
    ]


@dataclass(eq=False)
class TokenizerEndpoint:
    """An ASGI app for one kind of request, to any of the models."""

    kind: type[TokenizeRequest | DetokenizeRequest]
    models: ModelGroup

    def __post_init__(self) -> None:
        self.threads = anyio.CapacityLimiter(THREADS)
        self.body_parser = JsonBodyParser()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        request = await self.body_parser.run(self._parse, body, deadlines.first)
        model = self.models.find(request.model)
        async with model.loaded(scope, receive, deadlines) as text_model:
            run = partial(self._run, model=text_model)
            tokens = await in_thread(run, request, deadlines.first, self.threads)
        await send_json(send, tokens)

    def _parse(self, body: bytes) -> TokenizeRequest | DetokenizeRequest:
        return decode(parse_json(body), self.kind, self.models.id_for, self.models.max_entries)

    def _run(
        self, request: TokenizeRequest | DetokenizeRequest, model: TextModel
    ) -> Tokens | Prompt:
        with panics_as_invalid_input():
            return request.run(model)


@contextlib.contextmanager
def panics_as_invalid_input() -> Iterator[None]:
    """Convert a panic of the Rust tokenizer, which is no Exception."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise InvalidInput("the tokenizer failed on this input") from error
