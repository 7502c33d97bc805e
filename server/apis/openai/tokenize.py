"""`POST /tokenize`, `POST /detokenize`: text or a conversation to token ids, and back, as in vLLM.

Both use the tokenizer without a forward pass, and run in a pool thread. So do the counts of the
tokens of a prompt, by rendering and tokenizing it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.endpoint import BodyEndpoint, GenerationEndpoint
from server.apis.openai.images import check_images
from server.apis.openai.messages import Messages, conversation
from server.apis.openai.models import ModelGroup
from server.apis.openai.request_fields import TokenId, decode
from server.apis.openai.tools import Tools
from server.core.settings import Settings
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.errors import HttpError
from server.http.json import in_thread, parse_json
from server.http.operation import Operation, OperationRoute
from server.http.request import read_json_request, send_json
from worker.messages.generation import Chat
from worker.messages.protocol import TextModel

MAX_PROMPT_BYTES = 1 << 20
THREADS = 2  # a long text delays others here, but no generation
T = TypeVar("T")


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


def tokenizer_routes(
    settings: Settings, worker_client: WorkerClient, models: ModelGroup
) -> list[OperationRoute]:
    shared = settings, worker_client, models
    return [
        OperationRoute(TOKENIZE, TokenizerEndpoint(*shared, TokenizeRequest)),
        OperationRoute(DETOKENIZE, TokenizerEndpoint(*shared, DetokenizeRequest)),
    ]


@dataclass(eq=False)
class TokenizerEndpoint(BodyEndpoint[TokenizeRequest | DetokenizeRequest]):
    """An endpoint for one kind of request, to any of the models."""

    kind: type[TokenizeRequest | DetokenizeRequest]
    threads: CapacityLimiter = field(init=False, default_factory=partial(CapacityLimiter, THREADS))

    def parse(self, body: bytes, scope: Scope) -> TokenizeRequest | DetokenizeRequest:
        return decode(
            parse_json(body), self.kind, self.models.id_for, scope, self.models.max_entries
        )

    async def serve(
        self, incoming: IncomingRequest, send: Send, request: TokenizeRequest | DetokenizeRequest
    ) -> None:
        async with self.models.find(request.model).loaded(incoming) as model:
            tokens = await run_tokenizer(request.run, model, incoming, self.threads)
        await send_json(send, tokens)


@dataclass(eq=False)
class TokenCounter:
    """An ASGI app that counts the tokens of the prompts that an endpoint reads. It takes a slot of
    the queue only while its model loads. `result` makes the response from the count."""

    endpoint: GenerationEndpoint[Any]
    result: Callable[[int], Struct]
    threads: CapacityLimiter = field(init=False, default_factory=partial(CapacityLimiter, THREADS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, incoming = await read_json_request(scope, receive)
        request = await self.endpoint.read(incoming, body)
        count = partial(count_tokens, request.inputs[0].prompt)
        async with self.endpoint.model_of(request).loaded(incoming) as model:
            number = await run_tokenizer(count, model, incoming, self.threads)
        await send_json(send, self.result(number))


def count_tokens(chat: Chat, model: TextModel) -> int:
    check_images(chat, model)
    return len(model.encode(chat))


async def run_tokenizer(
    work: Callable[[TextModel], T],
    model: TextModel,
    incoming: IncomingRequest,
    threads: CapacityLimiter,
) -> T:
    """Return the result of `work`, which runs in a pool thread. Raises DeadlineExceeded."""

    def run(model: TextModel) -> T:
        try:
            return work(model)
        except Exception:
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            raise InvalidInput("the tokenizer failed on this input") from error

    return await in_thread(run, model, incoming.deadlines.first, threads)
