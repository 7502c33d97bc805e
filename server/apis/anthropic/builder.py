"""A message while it is generated: the document that is sent, or its events.

    message_start → content_block_start → ping → deltas → content_block_stop → … → message_delta
                  → message_stop

Each stretch of reasoning, text or arguments is a block. A failure is the event `error`, the last.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from server.apis.anthropic.request import MessagesRequest
from server.apis.openai.endpoint import (
    MAX_INLINE_ENTRIES,
    ParsedRequest,
    ResponseBuilder,
    consume,
)
from server.apis.openai.models import NamedModel
from server.core.delta_stream import UsageCounts
from server.core.sealing import seal
from server.http.errors import HttpError, anthropic_document
from server.http.json import Document, read_object
from server.http.sse import named_frame
from worker.messages.deltas import Delta, DeltaPart
from worker.messages.generation import Chat

# The type of a block's deltas, and their field.
DELTA_FIELDS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
PING = named_frame({"type": "ping"})
INLINE_CHARS = 4096 // MAX_INLINE_ENTRIES  # per entry: longer deltas are encoded in a pool thread


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """The prompt's tokens are `input_tokens` and those read from the cache. Prefixes are cached
    always, and at no cost: none is counted as created."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageBlock(Struct):
    """A block of text, thinking, or the call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageResponse(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageBuilder(ResponseBuilder[Delta]):
    keep_alive = PING

    def __init__(self, request: ParsedRequest, usage: UsageCounts, model: NamedModel) -> None:
        [generation_input] = request.inputs
        prompt = generation_input.prompt
        assert isinstance(prompt, Chat)
        assert isinstance(request.body, MessagesRequest)
        self.streams = bool(request.body.stream)
        self.usage = usage
        self._request = request.body
        self._call_id = model.call_id
        self._calls = prompt.num_tool_calls if generation_input.tool_policy else 0
        self._message = MessageResponse(
            id="msg_" + secrets.token_hex(12),
            type="message",
            role="assistant",
            model=request.body.model or model.id,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage_now(),
        )
        self._open: MessageBlock | None = None  # the last block, unless it is closed
        self._texts: list[str] = []  # of the open block
        self._failed = False

    def entries(self, delta: Delta) -> int:
        return sum(len(part.text) for part in delta.parts) // INLINE_CHARS

    def start(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        self._message.usage = self._usage_now()
        yield named_frame({"type": "message_start", "message": self._message})

    def add(self, delta: Delta) -> Iterator[bytes]:
        for part in delta.parts:
            for event in self._add_part(part):
                yield named_frame(event)
                if event["type"] == "content_block_start" and event["index"] == 0:
                    yield PING
        if delta.finish_reason is not None:
            self._set_stop(delta)

    def finish(self) -> Iterator[bytes]:
        yield from map(named_frame, self._close())
        message = self._message
        message.usage = self._usage_now()
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield named_frame({"type": "message_delta", "delta": stop, "usage": message.usage})

    def fail(self, error: HttpError) -> Iterator[bytes]:
        self._failed = True
        yield named_frame(anthropic_document(error))

    def end(self) -> bytes:
        return b"" if self._failed else named_frame({"type": "message_stop"})

    def build(self, deltas: Sequence[Delta]) -> MessageResponse:
        for delta in deltas:
            for part in delta.parts:
                consume(self._add_part(part))
            self._set_stop(delta)
        consume(self._close())
        self._message.usage = self._usage_now()
        return self._message

    # ── blocks ──

    def _add_part(self, part: DeltaPart) -> Iterator[Document]:
        block = self._open
        kind = {"content": "text", "reasoning": "thinking", "call": "tool_use"}[part.kind]
        if block is None or block.type != kind or part.name is not None:
            yield from self._close()
            block = self._new_block(part)
            self._message.content.append(block)
            self._open, self._texts = block, []
            yield self._event("content_block_start", content_block=block)
        if not part.text:
            return
        self._texts.append(part.text)
        if not (block.type == "thinking" and self._request.hides_thinking):
            type_, field = DELTA_FIELDS[block.type]
            yield self._event("content_block_delta", delta={"type": type_, field: part.text})

    def _new_block(self, part: DeltaPart) -> MessageBlock:
        if part.kind == "content":
            return MessageBlock("text", text="")
        if part.kind == "reasoning":
            return MessageBlock("thinking", thinking="", signature="")
        name = part.name or ""
        id = self._call_id(name, self._calls)
        self._calls += 1
        return MessageBlock("tool_use", id=id, name=name, input={})

    def _close(self) -> Iterator[Document]:
        """Complete the open block. The signature of thinking has the text that is not shown."""
        if (block := self._open) is None:
            return
        text, self._open = "".join(self._texts), None
        if block.type == "text":
            block.text = text
        elif block.type == "tool_use":
            block.input = read_object(text)  # empty if the output ended within it
        else:
            hidden = self._request.hides_thinking
            block.thinking = "" if hidden else text
            block.signature = seal(text if hidden else "")
            signature = {"type": "signature_delta", "signature": block.signature}
            yield self._event("content_block_delta", delta=signature)
        yield self._event("content_block_stop")

    def _event(self, type: str, **fields: object) -> Document:
        return {"type": type, "index": len(self._message.content) - 1, **fields}

    # ── the end ──

    def _set_stop(self, delta: Delta) -> None:
        message, request = self._message, self._request
        reason: StopReason = "end_turn"
        if delta.finish_reason == "tool_calls":
            reason = "tool_use"
        elif delta.finish_reason == "length":
            is_limit = self.usage.completion >= request.max_tokens
            reason = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif delta.stop_reason in (request.stop_sequences or ()):
            reason, message.stop_sequence = "stop_sequence", str(delta.stop_reason)
        message.stop_reason = reason

    def _usage_now(self) -> MessageUsage:
        usage = self.usage
        return MessageUsage(
            input_tokens=usage.prompt - usage.cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached,
            output_tokens=usage.completion,
            output_tokens_details=OutputTokensDetails(usage.reasoning),
        )
