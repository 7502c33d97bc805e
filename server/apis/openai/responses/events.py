"""A response while it is generated: the object that is sent and stored, and its events.

    created, in_progress → output items → completed | incomplete | failed | cancelled
    output_item.added → content_part.added → deltas → ….done → content_part.done → output_item.done

Each stretch of reasoning, text or arguments is an output item. Calls have no content parts. Events
share their items with the response, so an event is encoded before the next one is built.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from server.apis.openai.custom_tools import CustomInputReader
from server.apis.openai.endpoint import ResponseBuilder, consume
from server.apis.openai.logprobs import scored_token_with_top
from server.apis.openai.models import NamedModel
from server.apis.openai.response_format import TextFormat
from server.apis.openai.response_schemas import (
    CompletionTokensDetails,
    ResponseError,
    ScoredTokenWithTop,
)
from server.apis.openai.response_tools import HostedType, ToolChoice
from server.apis.openai.responses.items import new_id
from server.apis.openai.responses.request import (
    ENCRYPTED,
    ConversationReference,
    ParsedResponseRequest,
    ResponseRequest,
)
from server.apis.openai.responses.store import Stored
from server.apis.openai.tools import CallableTool, ToolKind
from server.core.delta_stream import UsageCounts
from server.core.sealing import seal
from server.http.errors import HttpError
from server.http.json import Document, read_object, to_json
from server.http.sse import named_frame
from worker.messages.deltas import Delta, TokenLogprob
from worker.messages.generation import Chat

NO_TOOLS: Mapping[str, CallableTool] = {}
ITEM_TYPES: dict[str, Literal["message", "reasoning"]] = {
    "content": "message",
    "reasoning": "reasoning",
}
ItemStatus = Literal["in_progress", "completed", "incomplete"]
FinalStatus = Literal["completed", "incomplete"]
OutputItemType = Literal[
    "message", "reasoning", "function_call", "custom_tool_call", "local_shell_call"
]
CALL_ITEM_TYPES: dict[ToolKind, OutputItemType] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
}
# Fields of a request that its response has unchanged.
REPEATED_FIELDS = (
    "instructions", "max_output_tokens", "max_tool_calls", "model", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "user",
)  # fmt: skip
# The events of an item's text, without `.delta` or `.done`; those of a local shell have none.
TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[None] = []
    logprobs: list[ScoredTokenWithTop] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputItem(Struct, kw_only=True):
    """A message, a reasoning item or a call, each with its own fields alone."""

    id: str
    type: OutputItemType
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[None] | UnsetType = UNSET
    content: list[OutputText | ReasoningText] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET  # of a custom tool
    action: dict[str, Any] | UnsetType = UNSET  # of the local shell
    encrypted_content: str | UnsetType = UNSET  # of reasoning


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseReasoning(Struct):
    effort: str | None
    summary: str | None


class ResponseText(Struct):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"]


class Response(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = (
        "queued"
    )
    background: bool
    conversation: Annotated[
        ConversationReference | UnsetType | None,
        Meta(description="Null if the items could not be added to it"),
    ] = UNSET
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    max_tool_calls: int | None = None
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    reasoning: ResponseReasoning
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: ToolChoice
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    instructions: str | None
    max_output_tokens: int | None
    model: str | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None


class ResponsesBuilder(ResponseBuilder[Delta]):
    """Builds a response. A failed one has the error code `invalid_prompt` if the request is the
    cause, else `server_error`."""

    def __init__(
        self, request: ParsedResponseRequest, usage: UsageCounts, model: NamedModel
    ) -> None:
        prompt = request.inputs[0].prompt
        assert isinstance(prompt, Chat)
        self.streams = bool(request.body.stream)
        self.usage = usage
        self.input_items = request.items
        self.output = ResponseOutput(
            model.call_id,
            prompt.num_tool_calls,
            request.tools.callable,
            ENCRYPTED in (request.body.include or ()),
            bool(request.body.return_tokens_as_token_ids),
        )
        if dropped := request.tools.dropped:
            self.headers = [(b"x-dropped-tools", ", ".join(dropped).encode())]
        self.response = _new_response(request.body, self.output.items)
        self._request, self._model = request.body, model
        self._set_defaults()
        self._is_truncated = False  # by max_output_tokens or the end of the context
        self._events = 0

    def _set_defaults(self) -> None:
        """Set what the request leaves to the model, which may not be loaded at first."""
        if defaults := self._model.defaults:
            if self._request.temperature is None:
                self.response.temperature = defaults.temperature
            if self._request.top_p is None:
                self.response.top_p = defaults.top_p

    @property
    def stored(self) -> Stored:
        """The response as it is stored: a failed one without its input."""
        items = [] if self.response.status == "failed" else self.input_items
        return Stored(msgspec.json.decode(to_json(self.response)), items)

    def queue(self) -> Iterator[bytes]:
        """Yield the events of a response that waits in the background."""
        yield self._frame(self._event("created"))
        yield self._frame(self._event("queued"))

    def start(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        self._set_defaults()
        self.response.status = "in_progress"
        if not self._events:
            yield self._frame(self._event("created"))
        yield self._frame(self._event("in_progress"))

    def add(self, delta: Delta) -> Iterator[bytes]:
        self._is_truncated = self._is_truncated or delta.finish_reason == "length"
        return map(self._frame, self.output.add(delta))

    def finish(self) -> Iterator[bytes]:
        """Yield the events that close the last item. The event of the response is `end`."""
        status: FinalStatus = "incomplete" if self._is_truncated else "completed"
        yield from map(self._frame, self.output.close(status))
        if self._is_truncated:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._set_final(status)

    def fail(self, error: HttpError) -> Iterator[bytes]:
        """Close the open item without events."""
        codes = {"invalid_value": "invalid_prompt", "context_length_exceeded": error.code}
        self.response.error = ResponseError(codes.get(error.code, "server_error"), str(error))
        self.abort("failed")
        return iter(())

    def refuse(self, error: HttpError) -> bytes:
        details = error.document["error"]  # SDKs read it, or the fields themselves
        return self._frame({**details, "type": "error", "error": details})

    def end(self) -> bytes:
        return self._frame(self._event(self.response.status))

    def build(self, deltas: Sequence[Delta]) -> Response:
        self._set_defaults()
        for delta in deltas:
            consume(self.add(delta))
        consume(self.finish())
        return self.response

    def abort(self, status: Literal["failed", "cancelled"]) -> None:
        """End the response with incomplete output."""
        consume(self.output.close("incomplete"))
        self._set_final(status)

    def _set_final(self, status: Literal["completed", "incomplete", "failed", "cancelled"]) -> None:
        self.response.status = status
        if self.usage.prompt:
            self.response.usage = response_usage(self.usage)
        if status == "completed":
            self.response.completed_at = int(time.time())

    def _event(self, name: str) -> Document:
        return {"type": f"response.{name}", "response": self.response}

    def _frame(self, event: Document) -> bytes:
        event["sequence_number"] = self._events
        self._events += 1
        return named_frame(event)


def response_usage(usage: UsageCounts) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt,
        InputTokensDetails(usage.cached, 0),
        usage.completion,
        CompletionTokensDetails(usage.reasoning),
        usage.prompt + usage.completion,
    )


class ResponseOutput:
    """Builds output items from deltas. `call_id`: of NamedModel. `earlier_calls`: calls in the
    conversation before. `tools`: by the names that the model calls. `seals`: reasoning is also sent
    sealed. `names_ids`: scored tokens have their ids in place of their texts."""

    def __init__(
        self,
        call_id: Callable[[str, int], str],
        earlier_calls: int,
        tools: Mapping[str, CallableTool] = NO_TOOLS,
        seals: bool = False,
        names_ids: bool = False,
    ) -> None:
        self.items: list[OutputItem] = []
        self._tools, self._seals, self._names_ids = tools, seals, names_ids
        self._input: CustomInputReader | None = None  # of the open call of a custom tool
        self._call_id = call_id
        self._calls = earlier_calls
        self._open: OutputItem | None = None  # the last item, unless it is closed
        self._texts: list[str] = []  # of the open item
        # Not sent yet. They may lag behind the text, or belong to a later message.
        self._logprobs: deque[TokenLogprob] = deque()
        self._unscored = 0  # characters of the open message without log-probabilities

    def add(self, delta: Delta) -> Iterator[Document]:
        self._logprobs += delta.logprobs
        for part in delta.parts:
            is_call = self._open is not None and self._open.call_id is not UNSET
            if part.kind == "call":
                if part.name is not None or not is_call:
                    yield from self._close("completed")
                    yield from self._begin_call(part.name or "")
            elif self._open is None or self._open.type != ITEM_TYPES[part.kind]:
                yield from self._close("completed")
                yield from self._begin(ITEM_TYPES[part.kind])
            text = self._input.push(part.text) if self._input else part.text
            if text:
                self._texts.append(text)
                self._unscored += len(text)
                if self.items[-1].type in TEXT_EVENTS:
                    yield self._delta_event(text)

    def close(self, status: FinalStatus) -> Iterator[Document]:
        """Close the open item. A completed output without items gets an empty message."""
        if status == "completed" and not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin_call(self, name: str) -> Iterator[Document]:
        tool = self._tools.get(name)
        item_type = CALL_ITEM_TYPES[tool.kind if tool else "function"]
        item = OutputItem(id=new_id(item_type), type=item_type)
        item.call_id = self._call_id(name, self._calls)
        self._calls += 1
        if item_type == "local_shell_call":
            item.action = {"type": "exec", "command": [], "env": {}}
        else:
            item.name = tool.name if tool else name
            if tool and tool.namespace:
                item.namespace = tool.namespace
        if item_type == "custom_tool_call":
            item.input, self._input = "", CustomInputReader()
        elif item_type == "function_call":
            item.arguments = ""
        yield self._added(item)

    def _added(self, item: OutputItem) -> Document:
        self.items.append(item)
        self._open, self._texts, self._unscored = item, [], 0
        return self._event("response.output_item.added", item=item)

    def _begin(self, kind: Literal["message", "reasoning"]) -> Iterator[Document]:
        item = OutputItem(id=new_id(kind), type=kind)
        part: OutputText | ReasoningText
        if kind == "message":
            item.role, item.content = "assistant", []
            part = OutputText()
        else:
            item.summary, item.content = [], []
            part = ReasoningText()
        yield self._added(item)
        added = "response.content_part.added"
        yield self._event(added, item_id=item.id, content_index=0, part=part)
        item.content.append(part)

    def _event(self, type: str, **fields: object) -> Document:
        return {"type": type, "output_index": len(self.items) - 1, **fields}

    def _delta_event(self, text: str) -> Document:
        item = self.items[-1]
        event = self._event(TEXT_EVENTS[item.type] + ".delta", item_id=item.id, delta=text)
        if item.content is not UNSET:
            event["content_index"], [part] = 0, item.content
            if isinstance(part, OutputText):
                event["logprobs"] = self._take_logprobs()
                part.logprobs += event["logprobs"]
        return event

    def _take_logprobs(self) -> list[ScoredTokenWithTop]:
        """Remove and return the log-probabilities of the open message's text."""
        scores = []
        while self._logprobs and len(self._logprobs[0].text) <= self._unscored:
            token = self._logprobs.popleft()
            self._unscored -= len(token.text)
            scores.append(scored_token_with_top(token, self._names_ids))
        return scores

    def _close(self, status: FinalStatus) -> Iterator[Document]:
        if (item := self._open) is None:
            return
        if self._input and (rest := self._input.finish()):
            self._texts.append(rest)
            yield self._delta_event(rest)
        self._input = None
        text = "".join(self._texts)
        done = TEXT_EVENTS.get(item.type, "") + ".done"
        if item.type == "local_shell_call":
            # without a command if the output ended early
            item.action = {"type": "exec", "command": [], "env": {}, **read_object(text)}
        elif item.type == "custom_tool_call":
            item.input = text
            yield self._event(done, item_id=item.id, input=text)
        elif item.content is UNSET:
            item.arguments = text
            yield self._event(done, item_id=item.id, name=item.name, arguments=text)
        else:
            if item.type == "reasoning" and self._seals:
                item.encrypted_content = seal(text)
            [part] = item.content
            part.text = text
            event = self._event(done, item_id=item.id, content_index=0, text=text)
            if isinstance(part, OutputText):
                part.logprobs += self._take_logprobs()
                event["logprobs"] = part.logprobs
            yield event
            done = "response.content_part.done"
            yield self._event(done, item_id=item.id, content_index=0, part=part)
        item.status = status
        self._open = None
        yield self._event("response.output_item.done", item=item)


def _new_response(request: ResponseRequest, output: list[OutputItem]) -> Response:
    """Return a response before anything is generated, with the request's parameters."""
    text, reasoning = request.text, request.reasoning
    return Response(
        id="resp_" + secrets.token_hex(24),
        created_at=int(time.time()),
        background=bool(request.background),
        frequency_penalty=request.frequency_penalty or 0.0,
        output=output,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=request.presence_penalty or 0.0,
        reasoning=ResponseReasoning(
            reasoning.effort if reasoning else None, reasoning.summary if reasoning else None
        ),
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=ResponseText(
            _format_document(text.format if text else None), (text and text.verbosity) or "medium"
        ),
        tool_choice="auto" if request.choice is None else request.choice,
        tools=[
            tool.document() for tool in request.tools or () if tool.type not in get_args(HostedType)
        ],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        metadata=request.metadata or {},
        truncation=request.truncation or "disabled",
        conversation=ConversationReference(of) if (of := request.conversation_id) else UNSET,
        **{name: getattr(request, name) for name in REPEATED_FIELDS},
    )


def _format_document(text_format: TextFormat | None) -> Document:
    """Return a format with the fields of its type alone."""
    if text_format is None:
        return {"type": "text"}
    if text_format.type == "json_schema":
        document: dict[str, Any] = msgspec.to_builtins(text_format)
        return document
    if text_format.type == "json_object" and text_format.schema:
        return {"type": text_format.type, "schema": text_format.schema}
    return {"type": text_format.type}
