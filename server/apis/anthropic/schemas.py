"""The response bodies of `/v1/messages`. The fields' order is the order of the keys."""

from typing import Any, Literal

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
