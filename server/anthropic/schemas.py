"""The response bodies and events of `/v1/messages`. The fields' order is the order of the keys."""

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class AnthropicErrorDetails(Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(Struct):
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class TokenCount(Struct):
    input_tokens: int


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


# ── events ──


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageResponse
    name: ClassVar = "message_start"


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: MessageBlock
    name: ClassVar = "content_block_start"


class BlockDelta(Struct):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDeltaEvent(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta
    name: ClassVar = "content_block_delta"


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int
    name: ClassVar = "content_block_stop"


class StopFields(Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageEnd(Struct, tag_field="type", tag="message_delta"):
    delta: StopFields
    usage: MessageUsage
    name: ClassVar = "message_delta"


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    name: ClassVar = "message_stop"


MessageEvent = MessageStart | BlockStart | BlockDeltaEvent | BlockStop | MessageEnd | MessageStop
