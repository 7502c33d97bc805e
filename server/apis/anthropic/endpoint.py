"""`POST /v1/messages`, Anthropic's chat, and `POST /v1/messages/count_tokens`.

    body → MessagesRequest → GenerationInput → deltas → MessageBuilder → message, or events

The path of every generation request (apis/openai/endpoint.py). Tokens are counted by rendering and
tokenizing the same input (apis/openai/tokenize.py).
"""

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.types import Scope

from server.apis.anthropic.builder import MessageBuilder, MessageResponse
from server.apis.anthropic.request import CountTokensRequest, MessagesRequest
from server.apis.openai.endpoint import GenerationEndpoint, ParsedRequest
from server.apis.openai.request_fields import decode
from server.core.delta_stream import UsageCounts
from server.http.json import parse_json
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


@dataclass(frozen=True)
class ParsedMessagesRequest(ParsedRequest):
    """`model_name`: the client's. Claude Code sends thinking back to a model of that name only."""

    body: MessagesRequest
    model_name: str


@Operation(
    "POST /v1/messages",
    "The next message of a conversation, as Anthropic has it",
    MessageResponse,
    MessagesRequest,
    stream="With stream: true. message_start, events of the blocks, message_stop.",
    error=AnthropicError,
)
@dataclass(eq=False)
class MessagesEndpoint(GenerationEndpoint[ParsedMessagesRequest]):
    """An endpoint for one kind of request. The app itself takes those of `/v1/messages`."""

    kind: Any = MessagesRequest

    def parse(self, body: bytes, scope: Scope) -> ParsedMessagesRequest:
        models, document = self.models, parse_json(body)
        request = decode(document, self.kind, models.id_for, scope, models.max_entries)
        name = str(document.get("model") or request.model)
        return ParsedMessagesRequest(request, [request.generation_input()], name)

    def builder(self, request: ParsedMessagesRequest, usage: UsageCounts) -> MessageBuilder:
        call_id = self.model_of(request).call_id
        body, [prompt] = request.body, request.inputs
        return MessageBuilder(body, request.model_name, prompt, usage, call_id)
