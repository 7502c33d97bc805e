"""`POST /v1/messages`, Anthropic's chat, and `POST /v1/messages/count_tokens`.

    body → MessagesRequest → GenerationInput → deltas → MessageBuilder → message, or events

The path of every generation request (apis/openai/endpoint.py). Tokens are counted by rendering and
tokenizing the same input (apis/openai/tokenize.py).
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from server.apis.anthropic.builder import MessageResponse
from server.apis.anthropic.request import CountTokensRequest, MessagesRequest
from server.http.operation import Operation


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


COUNT_TOKENS = Operation(
    "POST /v1/messages/count_tokens",
    "The number of tokens of a conversation",
    TokenCount,
    CountTokensRequest,
    error=AnthropicError,
)


MESSAGES = Operation(
    "POST /v1/messages",
    "The next message of a conversation, as Anthropic has it",
    MessageResponse,
    MessagesRequest,
    stream="With stream: true. message_start, events of the blocks, message_stop.",
    error=AnthropicError,
)
