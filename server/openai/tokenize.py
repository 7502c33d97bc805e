"""`POST /tokenize`: the token ids of a text or a conversation, as vLLM answers it."""

from typing import Any

import anyio
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.engine import Engine
from server.http.body import in_thread, read_json_request
from server.http.json import send_json
from server.openai.chat_request import chat
from server.openai.messages import Messages
from server.openai.models import ModelNames
from server.openai.params import decode
from server.openai.tools import Tools
from server.settings import Settings
from worker.protocol import Chat

THREADS = 2  # a long text holds up its own kind, not what is being generated


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
            raise InvalidInput("prompt: needs either this or messages", "prompt")
        if self.messages is None:
            return self.prompt or ""
        return chat(
            self.messages,
            self.tools,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            bool(self.continue_final_message),
        )


class TextEndpoint:
    """What needs the tokenizer and no forward pass: answered in a pool thread."""

    def __init__(self, settings: Settings, engine: Engine, models: ModelNames) -> None:
        self.settings = settings
        self.engine = engine
        self.models = models
        self.threads = anyio.CapacityLimiter(THREADS)

    def answer(self, body: bytes) -> Any:
        raise NotImplementedError

    def _guarded(self, body: bytes) -> Any:
        try:
            return self.answer(body)
        except Exception:
            raise
        except BaseException as error:  # a panic in a tokenizer is no Exception
            raise InvalidInput("the tokenizer cannot take this") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(
            scope, receive, self.settings, self.engine, "generation"
        )
        await send_json(send, await in_thread(self._guarded, body, deadlines.first, self.threads))


class Tokenize(TextEndpoint):
    def answer(self, body: bytes) -> Any:
        generator = self.engine.generator
        request = decode(body, TokenizeRequest, generator.max_model_len)
        self.models.require(request.model)
        special = True if request.add_special_tokens is None else request.add_special_tokens
        ids = generator.encode(request.text(), special)
        strings = [generator.token(each) for each in ids] if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": generator.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
