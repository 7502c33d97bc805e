"""The ASGI app: `uvicorn server.app:app`.

`create_app` wires settings, queue, worker, engine and routes; lifespan.py starts the worker and
drains it on SIGTERM, before uvicorn hears of the signal. One process, one worker thread.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from starlette.routing import Route, Router

from batching.batcher import DynamicBatcher
from batching.request_queue import RequestQueue
from server import openapi
from server.engine import Engine
from server.health import health, ready
from server.http.request import JsonEndpoint, Middleware
from server.lifespan import lifespan
from server.metrics import Metrics, metrics
from server.openai.chat import ChatCompletions
from server.openai.completions import Completions
from server.openai.decisions.endpoint import DecisionEndpoint
from server.openai.decisions.request import DecisionRequest
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.models import ModelNames
from server.openai.responses.endpoint import Responses
from server.openai.responses.store import ResponseStore
from server.openai.tokenize import tokenizer_routes
from server.pipeline import Root
from server.preflight import asked_threads, check_models, check_workers, put_openmp, refuse
from server.settings import Settings, SettingsError, load_settings
from worker.cores import find_cores
from worker.models import GenerationModel, PipelineModel
from worker.protocol import Generator, Runner
from worker.worker import Model, Worker


def create_app(
    settings: Settings,
    load: Callable[[], Runner] | None = None,
    load_chat: Callable[[], Generator] | None = None,
) -> Middleware:
    """`load` and `load_chat` make the models, on the worker thread; by default from the settings,
    where `none` means that there is none. Raises SettingsError for what cannot be served."""
    settings = check_models(settings, pipeline=load is None, chat=load_chat is None)
    cores = find_cores(settings.pin_worker, asked_threads())
    pool_threads = max(2, min(8, cores.threads if cores else 2))
    queue = RequestQueue(settings.max_queue_size, time.monotonic)
    worker = Worker(served_models(settings, load, load_chat), cores=cores)
    observed = Metrics(lambda: queue.pending, settings.max_batch_size)
    engine = Engine(worker, queue, observed, pool_threads, settings.stuck_after_s)
    routes = [
        Route("/health", JsonEndpoint(health), methods=["GET"]),
        Route("/ready", JsonEndpoint(ready), methods=["GET"]),
        Route("/metrics", metrics),
    ]
    responses: Responses | None = None
    if settings.pipeline_model != "none":
        routes.append(Route("/", Root(settings, engine), methods=["POST"]))
    if settings.chat_model != "none":
        names = ModelNames(settings, engine)
        shared = settings, engine, names
        responses = Responses(*shared, open_store(settings))
        decisions = DecisionEndpoint(engine, names, DecisionRequest)
        systemone = DecisionEndpoint(engine, names, SystemOneRequest)
        routes += [
            Route("/v1/chat/completions", ChatCompletions(*shared), methods=["POST"]),
            Route("/v1/completions", Completions(*shared), methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            *responses.routes(),
            Route("/v1/decisions", decisions, methods=["POST"]),
            Route("/v1/systemone", systemone, methods=["POST"]),
            *names.routes(),
            *tokenizer_routes(engine, names),
        ]
    routes.append(openapi.route(settings, routes))
    router = Router(routes, lifespan=partial(lifespan, responses=responses))
    return Middleware(router, {route.path_format for route in routes}, settings, engine)


def open_store(settings: Settings) -> ResponseStore:
    try:
        return ResponseStore(settings.responses_db)
    except sqlite3.Error as error:
        raise SettingsError(f"RESPONSES_DB={settings.responses_db!r}: {error}") from None


def served_models(
    settings: Settings,
    load: Callable[[], Runner] | None,
    load_chat: Callable[[], Generator] | None,
) -> list[Model]:
    """What the settings name, to be loaded on the worker's thread: torch takes seconds."""
    models: list[Model] = []
    places, wait_s = settings.max_queue_size, settings.max_batch_wait_ms / 1000
    if settings.pipeline_model != "none":
        batcher = DynamicBatcher(settings.max_batch_size, settings.max_batch_tokens, wait_s)
        load = load or partial(_load_pipeline, settings)
        models.append(PipelineModel("pipeline", load, places, batcher))
    if settings.chat_model != "none":
        load_chat = load_chat or partial(_load_chat, settings)
        models.append(GenerationModel("generation", load_chat, places))
    return models


def _load_pipeline(settings: Settings) -> Runner:
    from worker.model.loading import LoadOptions
    from worker.pipeline.load import load_runner

    task, model = settings.pipeline_task, settings.pipeline_model
    return load_runner(
        _chosen(LoadOptions, settings, task=task, model=model), settings.max_batch_size
    )


def _load_chat(settings: Settings) -> Generator:
    from worker.generation.loading import load_generator
    from worker.model.language_model import GeneratorOptions

    return load_generator(_chosen(GeneratorOptions, settings, model=settings.chat_model))


def _chosen(options: Any, settings: Settings, **chosen: str) -> Any:
    """A loader's options: what is not chosen here is a setting of the same name."""
    chosen["attention"] = settings.attn_implementation
    names = {each.name for each in fields(options)} - set(chosen)
    return options(**chosen, **{name: getattr(settings, name) for name in names})


def __getattr__(name: str) -> Any:
    """`app`, made from the environment when it is first asked for (tests make their own)."""
    if name != "app":
        raise AttributeError(name)
    try:
        check_workers()
        made = create_app(load_settings())
        if cores := made.engine.worker.cores:
            put_openmp(cores)
    except SettingsError as error:
        refuse(error)
    globals()["app"] = made
    return made
