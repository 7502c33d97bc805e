"""The routes: a path for each endpoint whose model is served.

app.py makes them once, from the settings, before any model is loaded.
"""

import sqlite3
from collections.abc import Iterator, Mapping

from starlette.routing import Route
from starlette.types import ASGIApp

from server.core.metrics import metrics
from server.core.settings import Settings, SettingsError
from server.core.worker_client import WorkerClient
from server.http.fetch import Fetcher
from server.http.health import health, ready, version
from server.http.request import JsonEndpoint
from server.http.upload import Uploads
from server.openai.audio.endpoint import AUDIO_PATHS, SpeechEndpoint
from server.openai.audio.request import TranscriptionRequest, TranslationRequest
from server.openai.chat import ChatCompletions
from server.openai.completions import Completions
from server.openai.decisions.endpoint import DecisionEndpoint
from server.openai.decisions.request import DecisionRequest
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.embedding.embeddings import EMBEDDING_PATHS, EmbeddingEndpoint, EmbeddingRequest
from server.openai.embedding.endpoint import ScoringEndpoint
from server.openai.embedding.rerank import RERANK_PATHS, RerankRequest
from server.openai.embedding.score import ScoreRequest
from server.openai.images import ImageLoader
from server.openai.models import ModelListing, NamedModel, add_aliases
from server.openai.responses.endpoint import Responses
from server.openai.responses.store import ResponseStore
from server.openai.tokenize import tokenizer_routes
from server.openapi.document import openapi_route
from server.pipeline import DecisionPipelineEndpoint, PipelineEndpoint
from server.preflight import MODELS
from server.web.page import ASSETS_PATH, Assets, IndexPage

STATUS_ROUTES = [
    Route("/health", JsonEndpoint(health), methods=["GET"]),
    Route("/ready", JsonEndpoint(ready), methods=["GET"]),
    Route("/ping", JsonEndpoint(ready), methods=["GET"]),
    Route("/version", JsonEndpoint(version), methods=["GET"]),
    Route("/metrics", metrics),
]


def make_routes(
    settings: Settings, worker_client: WorkerClient, pipeline_is_language_model: bool
) -> tuple[list[Route], Responses | None]:
    """Return the routes, and the endpoint of responses, which is closed at shutdown.

    `pipeline_is_language_model`: `POST /` serves the task decision by a language model."""
    assets, models = Assets(), named_models(settings, worker_client)
    page = IndexPage(settings, worker_client, assets.files["index.html"])
    root = root_endpoint(settings, worker_client, page, pipeline_is_language_model)
    methods = ["GET"] if root is page else ["GET", "POST"]
    routes = [Route("/", root, methods=methods), *STATUS_ROUTES]  # tried in this order
    responses: Responses | None = None
    if chat := models.get("generation"):
        max_bytes = int(settings.max_body_mb * 1_000_000)
        fetcher = Fetcher(settings.image_fetch, max_bytes, worker_client.metrics)
        shared = settings, worker_client, chat, ImageLoader(worker_client, fetcher)
        responses = Responses(*shared, open_store(settings))
        routes += [
            post("/v1/chat/completions", ChatCompletions(*shared)),
            post("/v1/completions", Completions(*shared)),
            post("/v1/responses", responses),
            *responses.routes(),
            post("/v1/decisions", DecisionEndpoint(worker_client, chat, DecisionRequest)),
            post("/v1/systemone", DecisionEndpoint(worker_client, chat, SystemOneRequest)),
        ]
    routes += scoring_and_speech_routes(settings, worker_client, models)
    if models:
        routes += ModelListing([*models.values()]).routes()
    if text_models := [model for name, model in models.items() if name != "transcription"]:
        routes += tokenizer_routes(text_models)
    routes += [Route(path, assets, methods=["GET"]) for path in (ASSETS_PATH, "/favicon.ico")]
    routes.append(openapi_route(settings, routes))
    return routes, responses


def root_endpoint(
    settings: Settings,
    worker_client: WorkerClient,
    page: IndexPage,
    pipeline_is_language_model: bool,
) -> ASGIApp:
    """Return the endpoint of `/`: the pipeline's if one is served, else the page."""
    if settings.pipeline_model == "none":
        return page
    if not pipeline_is_language_model:
        return PipelineEndpoint(settings, worker_client, page)
    name = "pipeline" if "pipeline" in worker_client.models else "generation"
    model = NamedModel(settings.pipeline_model, worker_client, name)
    decisions = DecisionEndpoint(worker_client, model, SystemOneRequest)
    return DecisionPipelineEndpoint(settings, worker_client, page, decisions)


def named_models(settings: Settings, worker_client: WorkerClient) -> dict[str, NamedModel]:
    """Return the models that a request may name, by their names in the registry. Raises
    SettingsError for MODEL_ALIASES."""
    models: dict[str, NamedModel] = {}
    for setting, name in MODELS.items():
        if name != "pipeline" and (value := getattr(settings, setting)) != "none":
            models[name] = NamedModel(value, worker_client, name, [*models.values()])
    add_aliases([*models.values()], settings.model_aliases)
    return models


def scoring_and_speech_routes(
    settings: Settings, worker_client: WorkerClient, models: Mapping[str, NamedModel]
) -> Iterator[Route]:
    """Yield the routes of embedding, reranking and speech models."""
    if model := models.get("embedding"):
        embeddings = EmbeddingEndpoint(settings, worker_client, [model], EmbeddingRequest)
        yield from (post(path, embeddings) for path in EMBEDDING_PATHS)
    if model := models.get("rerank"):
        rerank = ScoringEndpoint(settings, worker_client, [model], RerankRequest)
        yield from (post(path, rerank) for path in RERANK_PATHS)
    if scoring := [models[name] for name in ("rerank", "embedding") if name in models]:
        yield post("/v1/score", ScoringEndpoint(settings, worker_client, scoring, ScoreRequest))
    if model := models.get("transcription"):
        uploads, kinds = Uploads(settings.max_audio_mb), (TranscriptionRequest, TranslationRequest)
        for path, kind in zip(AUDIO_PATHS, kinds, strict=True):
            yield post(path, SpeechEndpoint(settings, worker_client, model, uploads, kind))


def post(path: str, endpoint: ASGIApp) -> Route:
    return Route(path, endpoint, methods=["POST"])


def open_store(settings: Settings) -> ResponseStore:
    try:
        return ResponseStore(settings.responses_db)
    except sqlite3.Error as error:
        raise SettingsError(f"RESPONSES_DB={settings.responses_db!r}: {error}") from None
