"""What answers look like, as types: some are made of them, the OpenAPI document describes all."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

ERRORS = {
    400: "What was sent is malformed or out of range; `param` names the field",
    401: "A valid API key is needed",
    404: "It is not here",
    405: "The path takes other methods",
    408: "The body stopped arriving",
    413: "The body is too large",
    415: "The body's media type cannot be served",
    500: "The model failed on this input, or the server made a mistake",
    503: "Too busy, loading, failing or stopping: try again later",
    504: "The time limit has passed; the header X-Request-Timeout-Ms shortens it",
}
ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 503: "Retry-After"}
OF_A_BODY = {400, 408, 413, 415, 503, 504}  # what may become of one


class ErrorDetails(Struct):
    message: str
    type: str
    param: Annotated[str | None, Meta(description="The field it is about: messages[0].content")]
    code: str


class Error(Struct):
    error: ErrorDetails


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, Meta(description="The same as reasoning")] = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


TOKEN_IDS = Meta(description="With return_token_ids")
TokenIds = Annotated[list[int] | UnsetType, TOKEN_IDS]


class PromptLogprob(Struct):
    logprob: float
    rank: Annotated[int, Meta(description="Among all tokens, from 1 on")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | UnsetType,
    Meta(description="With prompt_logprobs: of each token, by the ids of it and the likeliest"),
]


class Choice(Struct, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: TokenIds = UNSET


class ChatChoice(Choice, kw_only=True):
    message: AnswerMessage


class CompletionChoice(Choice, kw_only=True):
    text: str
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Generated(Struct):
    id: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str | None


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseError(Struct):
    code: str
    message: str


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseText(Struct):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"]


class Response(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: ResponseText
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    tools: list[dict[str, Any]]
    usage: ResponseUsage | None


class Deleted(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
    model: str
    usage: ResponseUsage


class StateUsage(Struct):
    input_tokens: int
    output_tokens: int


class SystemOne(Struct):
    model: str
    answers: dict[str, dict[str, Any]]
    usage: StateUsage


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="base64: float32, little-endian")]


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TextDocument(Struct):
    text: Annotated[str, Meta(min_length=1)]


class Ranked(Struct):
    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Reranked(Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]


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


class Duration(Struct):
    type: Literal["duration"]
    seconds: float


class Transcription(Struct):
    """Whole, or verbose."""

    text: str
    usage: Duration
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[dict[str, Any]] | UnsetType = UNSET
    words: list[dict[str, Any]] | UnsetType = UNSET
