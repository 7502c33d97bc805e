"""What can be asked of the server: the table that `GET /openapi.json` is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from server.http.health import Health, Ready, Version
from server.openai import response_schemas as schemas
from server.openai.audio.endpoint import PATHS as AUDIO_PATHS
from server.openai.audio.request import TranscriptionRequest, TranslationRequest, form_schema
from server.openai.chat import ChatRequest
from server.openai.completions import CompletionRequest
from server.openai.decisions.request import DecisionRequest
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.embedding.embeddings import PATHS as EMBEDDING_PATHS
from server.openai.embedding.embeddings import EmbeddingRequest
from server.openai.embedding.rerank import PATHS as RERANK_PATHS
from server.openai.embedding.rerank import RerankRequest
from server.openai.embedding.score import ScoreRequest
from server.openai.models import LoadRequest, Model, ModelList
from server.openai.responses.endpoint import Page
from server.openai.responses.request import ResponseRequest
from server.openai.tokenize import DetokenizeRequest, Prompt, TokenizeRequest, Tokens

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
HTML = "text/html"

Schema = dict[str, Any]
Body = Mapping[str, Schema]  # by media type


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. A struct alone is a body in JSON. What a request may ask for instead of
    it: `stream` describes events, `bare` is the schema of an entry of a list without an object
    around it, `others` are media types of text. `errors` are the statuses beyond 401, 405, 500 and
    those of every body (answers.OF_A_BODY); a struct with a `model` may get 404."""

    summary: str
    answer: type[Struct] | Body
    request: type[Struct] | Body | None = None
    errors: Sequence[int] = ()
    stream: str | None = None
    query: type[Struct] | None = None
    bare: Schema | None = None
    others: Sequence[str] = ()


AUDIO = [f"POST {path}" for path in AUDIO_PATHS]
FORM, SUBTITLES = "multipart/form-data", (TEXT, "application/x-subrip", "text/vtt")
HEARD = "With stream: true. Deltas of the text, then the whole; the last is [DONE]."
CHUNKS = "With stream: true. Each event is a chunk, the last is [DONE]."
RESPONSE_EVENTS = "With stream: true. The last event holds the response."

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        "The next message of a conversation",
        schemas.ChatCompletion,
        ChatRequest,
        stream=CHUNKS,
    ),
    "POST /v1/completions": Operation(
        "What follows a text or token ids",
        schemas.Completion,
        CompletionRequest,
        stream=CHUNKS,
    ),
    "POST /v1/responses": Operation(
        "A model's response to items or a text, stored unless store is false",
        schemas.Response,
        ResponseRequest,
        stream=RESPONSE_EVENTS,
    ),
    "GET /v1/responses/{id}": Operation("A response", schemas.Response, errors=[400, 404]),
    "DELETE /v1/responses/{id}": Operation("Forget a response", schemas.Deleted, errors=[404]),
    "GET /v1/responses/{id}/input_items": Operation(
        "What a response was given, newest first",
        schemas.ItemList,
        errors=[400, 404],
        query=Page,
    ),
    "POST /v1/responses/{id}/cancel": Operation(
        "End a response that runs in the background", schemas.Response, errors=[400, 404]
    ),
    "POST /v1/decisions": Operation(
        "How likely the answers to questions about an input are",
        schemas.Decision,
        DecisionRequest,
    ),
    "POST /v1/systemone": Operation(
        "The same, of named questions about a state", schemas.SystemOne, SystemOneRequest
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in EMBEDDING_PATHS),
        Operation(
            "The vectors of texts or token ids; of `inputs` as a bare list",
            schemas.Embeddings,
            EmbeddingRequest,
            bare={"type": "array", "items": {"type": "number"}},
        ),
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in RERANK_PATHS),
        Operation(
            "Documents by relevance to a query; `texts` as a bare list",
            schemas.Reranked,
            RerankRequest,
            bare={"type": "object", "required": ["index", "score"]},
        ),
    ),
    "POST /v1/score": Operation("How well texts go together", schemas.Scores, ScoreRequest),
    AUDIO[0]: Operation(
        "What a recording says",
        schemas.Transcription,
        {FORM: form_schema(TranscriptionRequest)},
        [404],
        HEARD,
        others=SUBTITLES,
    ),
    AUDIO[1]: Operation(
        "What a recording says, in English",
        schemas.Transcription,
        {FORM: form_schema(TranslationRequest)},
        [404],
        others=SUBTITLES,
    ),
    "GET /v1/models": Operation("The models", ModelList, errors=[503]),
    "GET /v1/models/{id}": Operation("A model by its name", Model, errors=[404, 503]),
    "POST /tokenize": Operation(
        "The token ids of a text or a conversation", Tokens, TokenizeRequest
    ),
    "POST /detokenize": Operation("The text of token ids", Prompt, DetokenizeRequest),
    "POST /load_model": Operation(
        "An event that says that the model is ready",
        {EVENTS: {"description": "One event, a JSON object."}},
        LoadRequest,
    ),
    "GET /health": Operation("Is the process worth keeping", Health, errors=[503]),
    "GET /ready": Operation("Should it get traffic", Ready, errors=[503]),
    "GET /ping": Operation("The same as /ready", Ready, errors=[503]),
    "GET /version": Operation("Which server this is", Version),
    "GET /favicon.ico": Operation("Its icon", {"image/svg+xml": {}}),
    "GET /metrics": Operation("For Prometheus", {TEXT: {"type": "string"}}),
    "GET /": Operation(
        "A page for browsers; lines of curl for others",
        {HTML: {"type": "string"}, TEXT: {"type": "string"}},
    ),
    "GET /assets/{name}": Operation("A file of the page", {"*/*": {}}, errors=[404]),
    "GET /openapi.json": Operation("This document", {JSON: {"type": "object"}}),
}
