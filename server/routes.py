"""The routes: a path for each endpoint whose model is served."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from server.apis.anthropic.builder import MessageBuilder
from server.apis.anthropic.endpoint import COUNT_TOKENS, MESSAGES, TokenCount
from server.apis.anthropic.request import CountTokensRequest, MessagesRequest
from server.apis.openai.adapters import AdapterControl
from server.apis.openai.audio.endpoint import OPERATIONS, TranscriptionEndpoint
from server.apis.openai.audio.speech import SpeechEndpoint
from server.apis.openai.batches.endpoint import BATCH_ENDPOINTS, Batches
from server.apis.openai.batches.runner import BatchRunner
from server.apis.openai.batches.store import BatchStore, open_folder, uploads_of
from server.apis.openai.chat import CHAT, ChatBuilder, ChatEndpoint, ChatRequest
from server.apis.openai.completions import COMPLETIONS, CompletionBuilder, CompletionRequest
from server.apis.openai.database import Database, DatabaseDown, NewerSchema, SqliteDatabase
from server.apis.openai.decisions.endpoint import DecisionEndpoint
from server.apis.openai.decisions.request import DECISIONS, DecisionRequest
from server.apis.openai.decisions.systemone import SYSTEM_ONE, SystemOneRequest
from server.apis.openai.embedding.embeddings import EMBEDDINGS, EmbeddingEndpoint
from server.apis.openai.embedding.endpoint import ScoringEndpoint
from server.apis.openai.embedding.info import info_route
from server.apis.openai.embedding.rerank import RERANK, RerankRequest
from server.apis.openai.embedding.score import SCORE, SIMILARITY, ScoreRequest
from server.apis.openai.endpoint import GenerationEndpoint
from server.apis.openai.infill import INFILL, InfillBuilder, InfillRequest
from server.apis.openai.jobs import JobRunner
from server.apis.openai.media import MediaLoader
from server.apis.openai.models import ANY_MODEL, ModelGroup, ModelListing, NamedModel, add_aliases
from server.apis.openai.responses.conversations import Conversations
from server.apis.openai.responses.endpoint import Responses
from server.apis.openai.responses.events import ResponsesBuilder
from server.apis.openai.responses.request import ResponseRequest
from server.apis.openai.responses.store import ResponseStore
from server.apis.openai.tokenize import PromptEndpoint, prompt_routes, tokenizer_routes
from server.apis.pipeline.decisions import DecisionPipelineEndpoint
from server.apis.pipeline.endpoint import (
    ModelEndpoint,
    PipelineEndpoint,
    PipelineInputParser,
    PipelineModels,
    pipeline_operation,
)
from server.apis.pipeline.predict import PREDICT, PredictParser
from server.core.metrics import metrics
from server.core.settings import Settings, SettingsError, refusing
from server.core.worker_client import WorkerClient
from server.entries import ModelEntry
from server.http.debug import debug_queue, load, reset_prefix_cache
from server.http.fetch import Fetcher
from server.http.health import health, ready, version
from server.http.operation import TEXT, Operation, OperationRoute, routes_of
from server.http.upload import Uploads
from server.openapi.document import openapi_route
from server.web.page import IndexPage, asset, reference
from worker.tasks import SPEECH_TASK

SPEECH = "speech"  # kind of the models of /v1/audio/speech, which are pipelines
METRICS = Operation("GET /metrics", "Prometheus metrics", {TEXT: {"type": "string"}})


def make_routes(
    settings: Settings,
    worker_client: WorkerClient,
    entries: Sequence[ModelEntry],
    models: Mapping[str, Sequence[NamedModel]],
) -> tuple[list[OperationRoute], JobRunner]:
    """Return the routes, and the runner of jobs. `models`: those that a request may name."""
    named = ModelGroup(*models.values())
    routes = pipeline_routes(settings, worker_client, entries)  # tried in this order
    shown = next((entry.settings for entry in entries if entry.kind == "pipeline"), settings)
    routes += routes_of(IndexPage(shown, worker_client).index, health, ready, version)
    routes += routes_of(debug_queue, load, reset_prefix_cache)
    routes.append(OperationRoute(METRICS, metrics))
    jobs = JobRunner(worker_client)
    database = open_database(settings, jobs)
    if chats := models.get("generation"):
        chat = ModelGroup(chats)
        adapters = AdapterControl(settings, chat, named)
        adapters.add_configured()
        max_bytes = int(settings.max_body_mb * 1_000_000)
        fetcher = Fetcher(settings.image_fetch, max_bytes, worker_client.metrics)
        shared = settings, worker_client, chat, MediaLoader(worker_client, fetcher)
        store = open_store(settings, database)
        decisions = DecisionEndpoint(settings, worker_client, chat, DecisionRequest)
        system_one = DecisionEndpoint(settings, worker_client, chat, SystemOneRequest)
        completions = ChatEndpoint(*shared, ChatRequest, ChatBuilder)
        endpoint: Any = partial(GenerationEndpoint, *shared)
        counting = PromptEndpoint(endpoint(CountTokensRequest, MessageBuilder), TokenCount)
        routes += [
            OperationRoute(CHAT, completions),
            OperationRoute(COMPLETIONS, endpoint(CompletionRequest, CompletionBuilder)),
            OperationRoute(INFILL, endpoint(InfillRequest, InfillBuilder)),
            *prompt_routes(completions),
            *Responses(*shared, ResponseRequest, ResponsesBuilder, store, jobs).routes(),
            *Conversations(store, chat).routes(),
            OperationRoute(MESSAGES, endpoint(MessagesRequest, MessageBuilder)),
            OperationRoute(COUNT_TOKENS, counting),
            OperationRoute(DECISIONS, decisions),
            OperationRoute(SYSTEM_ONE, system_one),
            *adapters.routes(),
        ]
    routes += scoring_and_speech_routes(settings, worker_client, models)
    taken = named.models
    pipelines = [
        NamedModel(
            entry.reference, worker_client, entry.served_by, taken, entry.settings.pipeline_task
        )
        for entry in entries
        if entry.kind == "pipeline" and entry.served_by == entry.name and not speaks(entry)
    ]
    classifiers = [model for model in pipelines if model.tasks == ["text-classification"]]
    described = [*models.get("embedding", ()), *models.get("rerank", ()), *classifiers]
    routes += [info_route(settings, model) for model in described[:1]]
    routes += ModelListing(named, pipelines).routes()
    if texts := {kind: models[kind] for kind in models if kind not in ("transcription", SPEECH)}:
        order = sorted(texts, key=lambda kind: kind not in ("embedding", "rerank"))
        groups = ModelGroup(*texts.values()), ModelGroup(*(texts[kind] for kind in order))
        routes += tokenizer_routes(settings, worker_client, *groups)
    routes += routes_of(asset, reference)
    if settings.has_batches:
        by_path: dict[str, Any] = {
            route.path: route.endpoint for route in routes if "POST" in (route.methods or ())
        }
        endpoints = {path: by_path[path] for path in BATCH_ENDPOINTS if path in by_path}
        runner = BatchRunner(jobs, open_batches(settings, database), endpoints)
        uploads = None if database else str(uploads_of(settings.batch_dir))
        routes += Batches(runner, uploads).routes()
    routes.append(openapi_route(settings.has_keys, routes))
    return routes, jobs


def pipeline_routes(
    settings: Settings, worker_client: WorkerClient, entries: Sequence[ModelEntry]
) -> list[OperationRoute]:
    """Return the route `POST /`, if a pipeline is served, and `/predict` of classifiers."""
    endpoints: dict[NamedModel, ModelEndpoint] = {}
    classifiers: dict[NamedModel, ModelEndpoint] = {}
    pipelines = [entry for entry in entries if entry.kind == "pipeline"]
    for entry in pipelines:
        task = entry.settings.pipeline_task
        model = NamedModel(entry.reference, worker_client, entry.name, task=task)
        names = model.names if len(pipelines) > 1 else None
        parser = PipelineInputParser(entry.settings, names)
        if entry.generates:
            served_by = NamedModel(entry.reference, worker_client, entry.served_by, task=task)
            served_by.names.add(None)
            group = ModelGroup([served_by])
            decisions = DecisionEndpoint(entry.settings, worker_client, group, SystemOneRequest)
            endpoints[model] = DecisionPipelineEndpoint(parser, decisions, entry.served_by)
        else:
            endpoints[model] = PipelineEndpoint(parser, worker_client, entry.served_by)
        if task == "text-classification":
            parser = PredictParser(entry.settings, names)
            classifiers[model] = PipelineEndpoint(parser, worker_client, entry.served_by)
    if not endpoints:
        return []
    operation = pipeline_operation(pipelines[0].settings.pipeline_task)
    served = (operation, endpoints), (PREDICT, classifiers)
    shared = settings, worker_client
    return [
        OperationRoute(of, PipelineModels(*shared, ModelGroup([*models]), models))
        for of, models in served
        if models
    ]


def named_models(
    settings: Settings, worker_client: WorkerClient, entries: Sequence[ModelEntry]
) -> dict[str, list[NamedModel]]:
    """Return the models that a request may name, by their kinds. Raises SettingsError for names
    that are taken, and for MODEL_ALIASES."""
    models: dict[str, list[NamedModel]] = {}
    for entry in entries:
        kind, task = (SPEECH, SPEECH_TASK) if speaks(entry) else (entry.kind, "")
        if kind != "pipeline":
            others = [*chain(*models.values())]
            model = NamedModel(entry.reference, worker_client, entry.name, others, task)
            if task and SPEECH not in models:
                model.names |= {None, *ANY_MODEL}
            models.setdefault(kind, []).append(model)
    if SPEECH in models:  # clients choose the first model of a list for chats
        models[SPEECH] = models.pop(SPEECH)
    add_aliases([*chain(*models.values())], settings.model_aliases)
    return models


def scoring_and_speech_routes(
    settings: Settings, worker_client: WorkerClient, models: Mapping[str, Sequence[NamedModel]]
) -> Iterator[OperationRoute]:
    """Yield the routes of embedding, reranking and speech models."""
    if embedders := models.get("embedding"):
        group = ModelGroup(embedders)
        for operation in (*EMBEDDINGS, SIMILARITY):
            app = EmbeddingEndpoint if operation.takes_lines else ScoringEndpoint
            kind: Any = operation.request
            yield OperationRoute(operation, app(settings, worker_client, group, kind))
    if rerankers := models.get("rerank"):
        group = ModelGroup(rerankers)
        rerank = ScoringEndpoint(settings, worker_client, group, RerankRequest)
        yield from (OperationRoute(operation, rerank) for operation in RERANK)
    if scoring := [models[kind] for kind in ("rerank", "embedding") if kind in models]:
        score = ScoringEndpoint(settings, worker_client, ModelGroup(*scoring), ScoreRequest)
        yield from (OperationRoute(operation, score) for operation in SCORE)
    if hearing := [models[kind] for kind in ("transcription", "generation") if kind in models]:
        group, uploads = ModelGroup(*hearing), Uploads(settings.max_audio_mb)
        for kind, operation in OPERATIONS.items():
            endpoint = TranscriptionEndpoint(worker_client, group, uploads, kind)
            yield OperationRoute(operation, endpoint)
    if speakers := models.get(SPEECH):
        speech = SpeechEndpoint(settings, worker_client, ModelGroup(speakers))
        yield from routes_of(speech, speech.voices)


def speaks(entry: ModelEntry) -> bool:
    """Return whether a pipeline's model is also served by /v1/audio/speech."""
    return entry.kind == "pipeline" and entry.settings.pipeline_task == SPEECH_TASK


def open_database(settings: Settings, jobs: JobRunner) -> Database | None:
    """Return the database of STORE, by which servers share the limits of keys, too; None for
    sqlite, where each store has its own."""
    if settings.store == "sqlite":
        return None
    if settings.responses_db != ":memory:" or settings.batch_dir != "none":
        raise SettingsError("STORE: RESPONSES_DB and BATCH_DIR are for sqlite: leave them out")
    try:
        from server.apis.openai.postgres import PostgresDatabase
        from server.apis.openai.shared_limits import SharedLimits
    except ImportError as error:
        raise SettingsError(f"STORE: the extra postgres is not installed ({error})") from None
    try:
        database = PostgresDatabase(settings.store)
        SharedLimits(database, jobs)
        return database
    except DatabaseDown as error:
        raise SettingsError(f"STORE: {error.args[0]}") from None
    except (NewerSchema, ValueError) as error:
        raise SettingsError(f"STORE: {error}") from None


def open_store(settings: Settings, database: Database | None) -> ResponseStore:
    name = "STORE" if database else f"RESPONSES_DB={settings.responses_db!r}"
    with refusing(name, NewerSchema, OSError, sqlite3.Error):
        own = database or SqliteDatabase(settings.responses_db)
        return ResponseStore(own, ttl_s=settings.responses_ttl_s)


def open_batches(settings: Settings, database: Database | None) -> BatchStore:
    max_bytes = int(settings.batch_dir_gb * 1e9)
    of_a_key = max_bytes // 2 if settings.has_keys else max_bytes
    name = "STORE" if database else f"BATCH_DIR={settings.batch_dir!r}"
    with refusing(name, NewerSchema, OSError, sqlite3.Error):
        return BatchStore(database or open_folder(settings.batch_dir), max_bytes, of_a_key)
