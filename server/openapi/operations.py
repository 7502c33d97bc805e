"""The operations of `GET /openapi.json`, by method and path; document.py uses those mounted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from server.anthropic.request import CountTokensRequest, MessagesRequest
from server.anthropic.schemas import AnthropicError, MessageResponse, TokenCount
from server.http.debug import DebugQueue
from server.http.health import Health, Ready, Version
from server.openai import response_schemas as schemas
from server.openai.adapters import AdapterResponse, LoadAdapterRequest, UnloadAdapterRequest
from server.openai.audio.endpoint import AUDIO_PATHS
from server.openai.audio.request import TranscriptionRequest, TranslationRequest, form_schema
from server.openai.batches.endpoint import BatchPage, BatchRequest
from server.openai.batches.files import FilePage, file_form
from server.openai.chat import ChatRequest
from server.openai.completions import CompletionRequest
from server.openai.decisions.request import DecisionRequest
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.embedding.embeddings import EMBEDDING_PATHS, EmbeddingRequest
from server.openai.embedding.rerank import RERANK_PATHS, RerankRequest
from server.openai.embedding.score import ScoreRequest
from server.openai.models import LoadRequest, LoadResponse, Model, ModelList
from server.openai.responses.endpoint import Page
from server.openai.responses.request import ResponseRequest
from server.openai.tokenize import DetokenizeRequest, Prompt, TokenizeRequest, Tokens

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
HTML, NDJSON = "text/html", "application/x-ndjson"
LINES = "One line per line of the request: its response, or an error with the number of the line"

Schema = dict[str, Any]
Body = Mapping[str, Schema]  # by media type


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. A struct is a JSON body.

    Alternatives to the response: `stream` describes events, `bare` is the schema of an entry of a
    bare list, `others` are media types of text, `alternatives` are other structs. `errors` are the
    statuses beyond 401, 403, 405, 421, 500 and, with a request body, BODY_ERRORS; a request with a
    `model` may get 404. `error` is their body.
    """

    summary: str
    response: type[Struct] | Body
    request: type[Struct] | Body | None = None
    errors: Sequence[int] = ()
    stream: str | None = None
    query: type[Struct] | None = None
    bare: Schema | None = None
    others: Sequence[str] = ()
    alternatives: Sequence[type[Struct]] = ()
    error: type[Struct] = schemas.Error
    takes_lines: bool = False  # the request may be NDJSON, and its response then is, too


AUDIO = [f"POST {path}" for path in AUDIO_PATHS]
FORM, SUBTITLES = "multipart/form-data", (TEXT, "application/x-subrip", "text/vtt")
TRANSCRIPT_EVENTS = "With stream: true. Deltas of the text, then the whole text, then [DONE]."
CHUNKS = "With stream: true. Each event is a chunk, the last is [DONE]."
RESPONSE_EVENTS = "With stream: true. The last event has the response."

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        "The next message of a conversation",
        schemas.ChatCompletion,
        ChatRequest,
        stream=CHUNKS,
    ),
    "POST /v1/completions": Operation(
        "The continuation of a text or token ids",
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
    "POST /v1/responses/input_tokens": Operation(
        "The number of tokens of a response's input", schemas.InputTokens, ResponseRequest
    ),
    "POST /v1/responses/compact": Operation(
        "Refused: compaction is not implemented", {JSON: {}}, errors=[400]
    ),
    "GET /v1/responses/{id}": Operation("A response", schemas.Response, errors=[400, 404]),
    "DELETE /v1/responses/{id}": Operation("Delete a response", schemas.Deleted, errors=[404]),
    "GET /v1/responses/{id}/input_items": Operation(
        "The input items of a response, newest first",
        schemas.ItemList,
        errors=[400, 404],
        query=Page,
    ),
    "POST /v1/responses/{id}/cancel": Operation(
        "Cancel a background response", schemas.Response, errors=[400, 404]
    ),
    "POST /v1/messages": Operation(
        "The next message of a conversation, as Anthropic has it",
        MessageResponse,
        MessagesRequest,
        stream="With stream: true. message_start, events of the blocks, message_stop.",
        error=AnthropicError,
    ),
    "POST /v1/messages/count_tokens": Operation(
        "The number of tokens of a conversation",
        TokenCount,
        CountTokensRequest,
        error=AnthropicError,
    ),
    "POST /v1/decisions": Operation(
        "The probabilities of answers to questions about an input",
        schemas.Decision,
        DecisionRequest,
    ),
    "POST /v1/systemone": Operation(
        "The probabilities of answers to named questions about a state",
        schemas.SystemOne,
        SystemOneRequest,
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in EMBEDDING_PATHS),
        Operation(
            "The vectors of texts or token ids; those of `inputs` as a bare list",
            schemas.Embeddings,
            EmbeddingRequest,
            bare={"type": "array", "items": {"type": "number"}},
            takes_lines=True,
        ),
    ),
    **dict.fromkeys(
        (f"POST {path}" for path in RERANK_PATHS),
        Operation(
            "Documents by relevance to a query; those of `texts` as a bare list",
            schemas.Ranking,
            RerankRequest,
            bare={"type": "object", "required": ["index", "score"]},
        ),
    ),
    "POST /v1/score": Operation("The similarity of pairs of texts", schemas.Scores, ScoreRequest),
    AUDIO[0]: Operation(
        "The text of a recording",
        schemas.Transcription,
        {FORM: form_schema(TranscriptionRequest)},
        [404],
        TRANSCRIPT_EVENTS,
        others=SUBTITLES,
        alternatives=[schemas.VerboseTranscription],
    ),
    AUDIO[1]: Operation(
        "The English translation of a recording",
        schemas.Transcription,
        {FORM: form_schema(TranslationRequest)},
        [404],
        others=SUBTITLES,
        alternatives=[schemas.VerboseTranscription],
    ),
    "POST /v1/files": Operation(
        "Upload the input file of a batch", schemas.FileObject, {FORM: file_form()}
    ),
    "GET /v1/files": Operation(
        "The files of the key", schemas.FileList, errors=[400], query=FilePage
    ),
    "GET /v1/files/{id}": Operation("A file", schemas.FileObject, errors=[404]),
    "DELETE /v1/files/{id}": Operation("Delete a file", schemas.Deleted, errors=[400, 404]),
    "GET /v1/files/{id}/content": Operation(
        "The content of a file", {"application/octet-stream": {}}, errors=[404]
    ),
    "POST /v1/batches": Operation(
        "Run the lines of a file as requests of low priority",
        schemas.BatchJob,
        BatchRequest,
        errors=[404],
    ),
    "GET /v1/batches": Operation(
        "The batches of the key, newest first", schemas.BatchList, errors=[400], query=BatchPage
    ),
    "GET /v1/batches/{id}": Operation("A batch", schemas.BatchJob, errors=[404]),
    "POST /v1/batches/{id}/cancel": Operation(
        "Cancel a batch", schemas.BatchJob, errors=[400, 404]
    ),
    "GET /v1/models": Operation("The models", ModelList, errors=[503]),
    "GET /v1/models/{id}": Operation("A model by its name", Model, errors=[404, 503]),
    "POST /tokenize": Operation(
        "The token ids of a text or a conversation", Tokens, TokenizeRequest
    ),
    "POST /detokenize": Operation("The text of token ids", Prompt, DetokenizeRequest),
    "GET /models": Operation("The models, those of POST / included", ModelList, errors=[503]),
    "POST /models/load": Operation(
        "Start to load a model", LoadResponse, LoadRequest, errors=[403]
    ),
    "POST /models/unload": Operation(
        "Unload a model once what runs on it has finished",
        LoadResponse,
        LoadRequest,
        errors=[403],
    ),
    "POST /load_model": Operation(
        "Load a model: an event for each change, the last is `ready` or `error`",
        {EVENTS: {"description": "Events, each a JSON object."}},
        LoadRequest,
        errors=[403],
    ),
    "POST /v1/load_lora_adapter": Operation(
        "Load a LoRA adapter of a chat model", AdapterResponse, LoadAdapterRequest, errors=[403]
    ),
    "POST /v1/unload_lora_adapter": Operation(
        "Refuse new requests for a LoRA adapter, and free it after the last one",
        AdapterResponse,
        UnloadAdapterRequest,
        errors=[403],
    ),
    "GET /health": Operation("Liveness", Health, errors=[503]),
    "GET /ready": Operation("Readiness", Ready, errors=[503]),
    "GET /ping": Operation("Readiness, the same as /ready", Ready, errors=[503]),
    "GET /version": Operation("The version of the server", Version),
    "GET /debug/queue": Operation("The requests that wait and run", DebugQueue),
    "GET /favicon.ico": Operation("The icon of the page", {"image/svg+xml": {}}),
    "GET /metrics": Operation("Prometheus metrics", {TEXT: {"type": "string"}}),
    "GET /": Operation(
        "A page for browsers; examples with curl for other clients",
        {HTML: {"type": "string"}, TEXT: {"type": "string"}},
    ),
    "GET /assets/{name}": Operation("A file of the page", {"*/*": {}}, errors=[404]),
    "GET /openapi.json": Operation("This document", {JSON: {"type": "object"}}),
}
