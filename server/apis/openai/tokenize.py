"""`POST /tokenize`, `POST /detokenize`: text or a conversation to token ids, and back, as in vLLM.

They and `POST /decode` of text-embeddings-inference use the tokenizer without a forward pass, and
run in a pool thread. So do the text of a prompt and the count of its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyio import CapacityLimiter
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.chat import ChatRequest
from server.apis.openai.endpoint import BodyEndpoint, GenerationEndpoint
from server.apis.openai.media import check_media
from server.apis.openai.messages import Messages, conversation
from server.apis.openai.models import ModelGroup
from server.apis.openai.request_fields import TokenId, decode, read_inputs
from server.apis.openai.response_schemas import InputTokens
from server.apis.openai.tools import Tools
from server.core.settings import Settings
from server.core.worker_client import IncomingRequest, WorkerClient
from server.http.errors import HttpError
from server.http.json import in_thread, parse_json, to_json
from server.http.operation import JSON, Operation, OperationRoute, Schema
from server.http.request import read_json_request, send_json
from worker.messages.generation import Chat
from worker.messages.protocol import TextModel

MAX_PROMPT_BYTES = 1 << 20
MAX_DECODED_IDS = MAX_DESCRIBED_CHARS = 1 << 18
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
    inputs: str | tuple[str, ...] | None = None  # of text-embeddings-inference
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
        check_media(chat, model)
        for file in chat.media:
            if file.link:
                raise InvalidInput.at(file.param, "must be a data: URL; links are not fetched")
        return chat

    def run(self, model: TextModel) -> Tokens | list[list[dict[str, Any]]]:
        special = True if self.add_special_tokens is None else self.add_special_tokens
        if self.inputs is not None:
            if self.prompt is not None or self.messages is not None:
                raise InvalidInput.at("inputs", "cannot be combined with prompt or messages")
            texts: Any = read_inputs(self.inputs, "inputs").values()
            if sum(map(len, texts)) > MAX_DESCRIBED_CHARS:
                raise InvalidInput.at("inputs", f"takes at most {MAX_DESCRIBED_CHARS} characters")
            return [describe_tokens(text, model.hf_tokenizer, special) for text in texts]
        if len((self.prompt or "").encode()) > MAX_PROMPT_BYTES:
            raise HttpError(413, f"prompt: at most {MAX_PROMPT_BYTES} bytes are accepted", "prompt")
        ids = model.encode(self.input(model), special)
        strings = [model.token(id) for id in ids] if self.return_token_strs else None
        return Tokens(len(ids), model.max_model_len, ids, strings)


def describe_tokens(text: str, tokenizer: Any, add_special_tokens: bool) -> list[dict[str, Any]]:
    """Return the tokens of a text with their places. Raises InvalidInput if those are unknown."""
    if not tokenizer.is_fast:
        raise InvalidInput.at("inputs", "this model's tokenizer has no offsets: use prompt")
    options = dict.fromkeys(("return_offsets_mapping", "return_special_tokens_mask"), True)
    output = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options)
    fields = [output[name] for name in ("input_ids", "special_tokens_mask", "offset_mapping")]
    return [
        {"id": id, "text": token, "special": True, "start": None, "stop": None}
        if special
        else {"id": id, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        for token, id, special, (start, stop) in zip(output.tokens(), *fields, strict=True)
    ]


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None

    def run(self, model: TextModel) -> Prompt:
        return Prompt(text_of(self.tokens, "tokens", model))


class DecodeRequest(Struct):
    ids: tuple[TokenId | tuple[TokenId, ...], ...]
    model: str | None = None
    skip_special_tokens: bool | None = None

    def run(self, model: TextModel) -> list[str]:
        lists: dict[str, Any] = {**read_inputs(self.ids, "ids")}
        if (count := sum(map(len, lists.values()))) > MAX_DECODED_IDS:
            raise InvalidInput.at("ids", f"takes at most {MAX_DECODED_IDS} ids, not {count}")
        skips = self.skip_special_tokens is not False
        return [text_of(ids, path, model, skips) for path, ids in lists.items()]


def text_of(ids: Sequence[int], path: str, model: TextModel, skip_special: bool = False) -> str:
    """Return the text of ids. Raises InvalidInput for one that the model does not have."""
    if ids:
        largest = max(ids)
        try:
            model.token(largest)
        except InvalidInput as error:
            raise InvalidInput.at(f"{path}[{ids.index(largest)}]", str(error)) from None
    return model.decode(ids, skip_special)


Request = TokenizeRequest | DetokenizeRequest | DecodeRequest
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
TOKENIZE = Operation(
    "POST /tokenize",
    "The token ids of a text or a conversation; the tokens of `inputs` as bare lists",
    Tokens,
    TokenizeRequest,
    alternatives=[{"type": "array", "items": {"type": "array", "items": {"type": "object"}}}],
)
DETOKENIZE = Operation("POST /detokenize", "The text of token ids", Prompt, DetokenizeRequest)
COUNT_PATH = "POST /v1/chat/completions/input_tokens"
COUNT = Operation(COUNT_PATH, "The number of tokens of a chat's prompt", InputTokens, ChatRequest)
RENDER = Operation("POST /apply-template", "The text of a chat's prompt", Prompt, ChatRequest)
DECODE = Operation("POST /decode", "The texts of lists of token ids", {JSON: TEXTS}, DecodeRequest)


def tokenizer_routes(
    settings: Settings, worker_client: WorkerClient, models: ModelGroup, embedders_first: ModelGroup
) -> list[OperationRoute]:
    shared = settings, worker_client, models, embedders_first
    kinds = (TOKENIZE, TokenizeRequest), (DETOKENIZE, DetokenizeRequest), (DECODE, DecodeRequest)
    return [OperationRoute(each, TokenizerEndpoint(*shared, kind)) for each, kind in kinds]


def prompt_routes(completions: GenerationEndpoint[Any]) -> list[OperationRoute]:
    return [
        OperationRoute(COUNT, PromptEndpoint(completions, InputTokens)),
        OperationRoute(RENDER, PromptEndpoint(completions, Prompt, renders=True)),
    ]


@dataclass(eq=False)
class TokenizerEndpoint(BodyEndpoint[Request]):
    """An endpoint for one kind of request, to any of the models. `embedders_first`: the same
    models, in the order for requests of text-embeddings-inference, which name none."""

    embedders_first: ModelGroup
    kind: type[Request]
    threads: CapacityLimiter = field(init=False, default_factory=partial(CapacityLimiter, THREADS))

    def parse(self, body: bytes, scope: Scope) -> Request:
        document = parse_json(body)
        is_of_tei = self.kind is DecodeRequest or document.get("inputs") is not None
        models = self.embedders_first if is_of_tei else self.models
        return decode(document, self.kind, models.id_for, scope, models.max_entries)

    async def serve(self, incoming: IncomingRequest, send: Send, request: Request) -> None:
        async with self.models.find(request.model).loaded(incoming) as model:
            content = await run_tokenizer(request.run, model, incoming, self.threads)
        await send_json(send, content)


@dataclass(eq=False)
class PromptEndpoint:
    """An ASGI app that renders the prompts that an endpoint reads, or counts their tokens. It takes
    a slot of the queue only while its model loads. `result` makes the response."""

    endpoint: GenerationEndpoint[Any]
    result: Callable[[Any], Struct]
    renders: bool = False
    threads: CapacityLimiter = field(init=False, default_factory=partial(CapacityLimiter, THREADS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, incoming = await read_json_request(scope, receive)
        request = await self.endpoint.read(incoming, body)
        if request.inputs[0].truncate is not None:
            raise InvalidInput.at("truncate_prompt_tokens", "is not implemented here, leave it out")
        chat, param = request.inputs[0].prompt, request.inputs[0].param

        def respond(model: TextModel) -> Struct:
            check_media(chat, model)
            try:
                return self.result(model.render(chat) if self.renders else len(model.encode(chat)))
            except InvalidInput as error:
                if error.param == "messages":  # the field of chats
                    error.args, error.param = (str(error).replace("messages", param, 1),), param
                raise

        async with self.endpoint.model_of(request).loaded(incoming) as model:
            content = await run_tokenizer(respond, model, incoming, self.threads)
        await send_json(send, content)


async def run_tokenizer(
    work: Callable[[TextModel], object],
    model: TextModel,
    incoming: IncomingRequest,
    threads: CapacityLimiter,
) -> bytes:
    """Return the result of `work` as JSON, from a pool thread. Raises DeadlineExceeded."""

    def run(model: TextModel) -> bytes:
        try:
            return to_json(work(model))
        except Exception:
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            raise InvalidInput("the tokenizer failed on this input") from error

    return await in_thread(run, model, incoming.deadlines.first, threads)
