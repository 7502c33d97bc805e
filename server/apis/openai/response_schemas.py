"""The response bodies of all endpoints as structs.

Endpoints build and encode them, and the OpenAPI document describes them. The fields' order is the
order of the keys. A field of type UnsetType is absent where it is UNSET.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field, json

from server.apis.openai.response_tools import ToolChoice

T = TypeVar("T")


def encode_now(struct: T) -> T:
    """Return the struct as encoded JSON, to be inserted into a larger response.

    A response with hundreds of thousands of log-probabilities would take much memory as structs,
    and encoding it in one call would block other threads for long.
    """
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


# ── responses ──

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[None] = []
    logprobs: list[ScoredTokenWithTop] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


OutputItemType = Literal[
    "message", "reasoning", "function_call", "custom_tool_call", "local_shell_call"
]


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


class ResponseError(Struct):
    code: str
    message: str


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


class ConversationReference(Struct):
    id: Annotated[str, Meta(min_length=1)]


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


# ── decisions ──


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    name: str | None
    probability: float


class ChoiceProbability(Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(Struct):
    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class Decision(Struct):
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str | None
    usage: ResponseUsage


class NamedNoulAnswer(Struct, tag_field="type", tag="noul"):
    noul: float


class NamedChoiceAnswer(Struct, tag_field="type", tag="choice"):
    choice: str
    confidence: float
    probabilities: dict[str, float]


class NamedScoreAnswer(Struct, tag_field="type", tag="score"):
    score: float
    legend: Mapping[str, str | dict[str, Any] | list[Any]]
    confidence: float
    probabilities: dict[str, float]


class StateUsage(Struct):
    input_tokens: int
    output_tokens: int


class SystemOne(Struct):
    model: str | None
    answers: dict[str, NamedNoulAnswer | NamedChoiceAnswer | NamedScoreAnswer]
    usage: StateUsage


# ── embeddings, reranking and scores ──


class Embedding(Struct):
    """Encoded by the embedding model's `finish`, in a pool thread."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="base64: float32, little-endian")]


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str | None
    usage: EmbeddingUsage


class TextDocument(Struct):
    text: Annotated[str, Meta(min_length=1)]


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Ranking(Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class RankedText(Struct):
    """A result as text-embeddings-inference returns it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


# ── audio ──


class Duration(Struct, tag_field="type", tag="duration"):
    seconds: float


class TranscribedTokens(Struct, tag_field="type", tag="tokens"):
    """The usage of a chat model."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(Struct):
    text: str
    usage: Duration | TranscribedTokens
    logprobs: list[ScoredToken] | UnsetType = UNSET


class TranscribedSegment(Struct):
    id: int
    seek: int
    start: float
    end: float
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    tokens: Sequence[int]


class TranscribedWord(Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscribedSegment] | UnsetType = UNSET
    words: list[TranscribedWord] | UnsetType = UNSET
    usage: Duration


class TranscriptTextDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[ScoredToken] | UnsetType = UNSET


class TranscriptTextDone(Transcription, tag_field="type", tag="transcript.text.done"): ...


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
