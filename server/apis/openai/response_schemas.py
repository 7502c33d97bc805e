"""The response bodies that several modules build, as structs; others are beside their endpoints.

Endpoints build and encode them, and the OpenAPI document describes them. The fields' order is the
order of the keys. A field of type UnsetType is absent where it is UNSET.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field, json

T = TypeVar("T")


def encode_now(struct: T) -> T:
    """Return the struct as encoded JSON, to be inserted into a larger response.

    A response with hundreds of thousands of log-probabilities would take much memory as structs,
    and encoding it in one call would block other threads for long."""
    return cast(T, Raw(json.encode(struct)))


# ── chat and text completions ──


class PromptTokensDetails(Struct):
    cached_tokens: int
    audio_tokens: int | UnsetType = UNSET  # of a prompt with recordings


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


TokenIds = Annotated[Sequence[int] | UnsetType, Meta(description="With return_token_ids")]


class PromptLogprob(Struct):
    logprob: float | None
    rank: Annotated[int, Meta(description="Among all tokens, from 1 on")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | UnsetType,
    Meta(description="With prompt_logprobs: for each token, by the ids of it and the likeliest"),
]


class ScoredToken(Struct):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredTokenWithTop(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(Struct):
    content: list[ScoredTokenWithTop]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class FunctionCallText(Struct):
    name: str
    arguments: str


class CustomCallText(Struct):
    name: str
    input: str


class MessageToolCall(Struct):
    id: str
    type: Literal["function", "custom"]
    function: FunctionCallText | UnsetType = UNSET
    custom: CustomCallText | UnsetType = UNSET


REASONING = Meta(description="The same as reasoning")


class ResponseMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, REASONING] = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = Annotated[
    str | int | None, Meta(description="The stop string or token id that ended the choice")
]


class ChatChoice(Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    token_ids: TokenIds = UNSET


class CompletionChoice(Struct, kw_only=True):
    """A choice of a text completion, whole or the part of it in a chunk."""

    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    token_ids: TokenIds = UNSET


class CompletionBase(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None


class ChatCompletion(CompletionBase, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(CompletionBase, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class ChatChunkChoice(Struct):
    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET  # with finish_reason
    token_ids: TokenIds = UNSET


class CompletionChunk(CompletionBase, kw_only=True):
    object: Literal["chat.completion.chunk", "text_completion"]
    choices: Sequence[ChatChunkChoice | CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET


# ── responses and conversations ──


class ResponseError(Struct):
    code: str
    message: str


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(Struct):
    id: str
    object: Literal["response", "file", "conversation.deleted"]
    deleted: bool


class ListBase(Struct):
    object: Literal["list"]
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemList(ListBase):
    data: list[dict[str, Any]]


class Conversation(Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


# ── embeddings, reranking and scores ──


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


# ── files and batches ──


class FileObject(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(ListBase):
    data: list[FileObject]


class BatchError(Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class BatchUsage(Struct):
    """The tokens of the lines with a response so far."""

    input_tokens: int = 0
    input_tokens_details: PromptTokensDetails = field(
        default_factory=lambda: PromptTokensDetails(0)
    )
    output_tokens: int = 0
    output_tokens_details: CompletionTokensDetails = field(
        default_factory=lambda: CompletionTokensDetails(0)
    )
    total_tokens: int = 0


class BatchJob(Struct):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    status: BatchStatus = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    usage: BatchUsage = field(default_factory=BatchUsage)
    model: str | None = None  # of the first response


class BatchList(ListBase):
    data: list[BatchJob]
