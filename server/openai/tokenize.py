"""`POST /tokenize`, `POST /detokenize`: the token ids of a text or a conversation, and back.

As vLLM answers them. Both need the tokenizer and no forward pass, and run in a pool thread.
"""

from dataclasses import dataclass
from typing import Any

import anyio
from msgspec import Struct
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.engine import Engine
from server.http.json import in_thread
from server.http.request import read_json_request, send_json
from server.openai.chat import Messages, conversation
from server.openai.models import ModelNames
from server.openai.params import TokenId, decode
from server.openai.tools import Tools
from worker.protocol import Chat, Generator

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

    def text(self) -> Chat | str:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInput.at("prompt", "needs either this or messages")
        if self.messages is None:
            return self.prompt or ""
        return conversation(self, self.messages, self.tools)

    def answer(self, generator: Generator) -> Tokens:
        special = True if self.add_special_tokens is None else self.add_special_tokens
        ids = generator.encode(self.text(), special)
        strings = [generator.token(each) for each in ids] if self.return_token_strs else None
        return Tokens(len(ids), generator.max_model_len, ids, strings)


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None

    def answer(self, generator: Generator) -> Prompt:
        if self.tokens:
            largest = max(self.tokens)
            try:
                generator.token(largest)
            except InvalidInput as error:
                path = f"tokens[{self.tokens.index(largest)}]"
                raise InvalidInput.at(path, str(error)) from None
        return Prompt(generator.decode(self.tokens))


def tokenizer_routes(engine: Engine, models: ModelNames) -> list[Route]:
    kinds: dict[str, type[TokenizeRequest | DetokenizeRequest]] = {
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
    return [
        Route(path, TokenizerEndpoint(kind, engine, models), methods=["POST"])
        for path, kind in kinds.items()
    ]


@dataclass(eq=False)
class TokenizerEndpoint:
    """A bare ASGI app, for one of the requests above."""

    kind: type[TokenizeRequest | DetokenizeRequest]
    engine: Engine
    models: ModelNames

    def __post_init__(self) -> None:
        self.threads = anyio.CapacityLimiter(THREADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, "generation")
        await send_json(send, await in_thread(self._answer, body, deadlines.first, self.threads))

    def _answer(self, body: bytes) -> Tokens | Prompt:
        generator = self.engine.generator
        try:
            request = decode(body, self.kind, self.models.names, generator.max_model_len)
            return request.answer(generator)
        except Exception:
            raise
        except BaseException as error:  # a panic in a tokenizer is no Exception
            raise InvalidInput("the tokenizer cannot take this") from error
