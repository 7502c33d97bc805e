"""`POST /tokenize`, `POST /detokenize`: the token ids of a text or a conversation, and back.

As vLLM answers them. Both need the tokenizer and no forward pass, and run in a pool thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from msgspec import Struct
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.http.json import in_thread, parse_json
from server.http.request import read_json_request, send_json
from server.openai.images import check_images
from server.openai.messages import Messages, conversation
from server.openai.models import ModelNames, id_of
from server.openai.request_fields import TokenId, decode
from server.openai.tools import Tools
from worker.messages.generation import Chat
from worker.messages.protocol import TextModel

THREADS = 2  # a long text delays other texts here, not what is being generated


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

    def text(self, model: TextModel) -> Chat | str:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInput.at("prompt", "needs either this or messages")
        if self.messages is None:
            return self.prompt or ""
        chat = conversation(self, self.messages, self.tools)
        check_images(chat, model)
        for each in chat.images:
            if each.link:
                raise InvalidInput.at(each.param, "must be a data: URL: nothing is fetched")
        return chat

    def answer(self, model: TextModel) -> Tokens:
        special = True if self.add_special_tokens is None else self.add_special_tokens
        ids = model.encode(self.text(model), special)
        strings = [model.token(each) for each in ids] if self.return_token_strs else None
        return Tokens(len(ids), model.max_model_len, ids, strings)


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None

    def answer(self, model: TextModel) -> Prompt:
        if self.tokens:
            largest = max(self.tokens)
            try:
                model.token(largest)
            except InvalidInput as error:
                path = f"tokens[{self.tokens.index(largest)}]"
                raise InvalidInput.at(path, str(error)) from None
        return Prompt(model.decode(self.tokens))


def tokenizer_routes(models: Sequence[ModelNames]) -> list[Route]:
    tokenize = TokenizerEndpoint(TokenizeRequest, models)
    detokenize = TokenizerEndpoint(DetokenizeRequest, models)
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


@dataclass(eq=False)
class TokenizerEndpoint:
    """A bare ASGI app, for one of the requests above, of whichever model is named."""

    kind: type[TokenizeRequest | DetokenizeRequest]
    models: Sequence[ModelNames]

    def __post_init__(self) -> None:
        self.threads = anyio.CapacityLimiter(THREADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive)
        await send_json(send, await in_thread(self._answer, body, deadlines.first, self.threads))

    def _answer(self, body: bytes) -> Tokens | Prompt:
        longest = max(each.text_model.max_model_len for each in self.models)
        try:
            request = decode(parse_json(body), self.kind, partial(id_of, self.models), longest)
            [names] = [each for each in self.models if each.id == request.model]
            return request.answer(names.text_model)
        except Exception:
            raise
        except BaseException as error:  # a panic in a tokenizer is no Exception
            raise InvalidInput("the tokenizer cannot take this") from error
