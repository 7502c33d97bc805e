"""The ASGI app: `uvicorn server.app:app`.

`create_app` wires settings, queue, worker, worker client and routes (routes.py); lifespan.py
starts the worker and drains it on SIGTERM, before uvicorn hears of the signal. One process, one
worker thread.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from starlette.routing import Router

from batching.batcher import DynamicBatcher
from batching.request_queue import RequestQueue, WorkItem
from batching.round_robin import RoundRobin
from server.core.metrics import Metrics
from server.core.settings import Settings, SettingsError, load_settings
from server.core.worker_client import WorkerClient
from server.http.request import Application
from server.lifespan import lifespan
from server.openai.decisions.endpoint import decides_in_steps
from server.preflight import (
    MODELS,
    asked_threads,
    check_models,
    check_workers,
    has_code_folder,
    put_openmp,
    refuse,
)
from server.routes import make_routes
from worker.cores import find_cores
from worker.messages.protocol import Generator, Runner, Stepped
from worker.messages.scoring import PIECE
from worker.registry import GenerationModel, PipelineModel, SteppedModel
from worker.tasks import resolve_task
from worker.worker import Model, Worker


def create_app(
    settings: Settings,
    load: Callable[[], Runner] | None = None,
    load_chat: Callable[[], Generator] | None = None,
    load_embedder: Callable[[], Runner] | None = None,
    load_reranker: Callable[[], Runner] | None = None,
    load_transcriber: Callable[[], Stepped] | None = None,
) -> Application:
    """The loaders make the models, on the worker thread; by default from the settings, where `none`
    means that there is none. Raises SettingsError for what cannot be served."""
    given = load, load_chat, load_embedder, load_reranker, load_transcriber
    loaders = dict(zip(MODELS, given, strict=True))
    settings = check_models(settings, {name for name, each in loaders.items() if each})
    cores = find_cores(settings.pin_worker, asked_threads())
    pool_threads = max(2, min(8, cores.threads if cores else 2))
    queue = RequestQueue(settings.max_queue_size, time.monotonic)
    decides = not loaders["pipeline_model"] and decides_in_steps(settings)
    worker = Worker(served_models(settings, loaders, decides), cores=cores)
    observed = Metrics(lambda: queue.pending)
    worker_client = WorkerClient(worker, queue, observed, pool_threads, settings.stuck_after_s)
    routes, responses = make_routes(settings, worker_client, decides)
    router = Router(routes, lifespan=partial(lifespan, responses=responses))
    return Application(router, routes, settings, worker_client)


def served_models(
    settings: Settings, loaders: Mapping[str, Callable[[], Any] | None], decides: bool
) -> list[Model]:
    """What the settings name, to be loaded on the worker's thread: torch takes seconds. Where
    `POST /` `decides`, it does so by a language model, the chat model if that is the same."""
    models: list[Model] = []
    places, wait_s = settings.max_queue_size, settings.max_batch_wait_ms / 1000
    for setting, serves in MODELS.items():
        if getattr(settings, setting) == "none":
            continue
        load: Callable[[], Any] = loaders[setting] or partial(_load, setting, settings)
        if serves == "pipeline" and decides:
            if settings.pipeline_model != settings.chat_model:
                other = replace(settings, chat_model=settings.pipeline_model)
                load = partial(_load, "chat_model", other)
                models.append(GenerationModel(serves, load, places))
        elif serves == "generation":
            models.append(GenerationModel(serves, load, places))
        elif serves == "transcription":
            if not any(loaders.values()) and shares_speech(settings):
                load = partial(_load, setting, settings, models[0])
            models.append(SteppedModel(serves, load, places))
        else:
            batcher = DynamicBatcher(settings.max_batch_size, settings.max_batch_tokens, wait_s)
            turns = None if serves == "pipeline" else turns_of(settings.max_batch_size)
            models.append(PipelineModel(serves, load, places, batcher, turns))
    return models


def shares_speech(settings: Settings) -> bool:
    """Whether POST / recognizes speech with the model that transcribes: it is loaded once."""
    if settings.pipeline_model != settings.transcription_model:
        return False
    return resolve_task(settings.pipeline_task) == "automatic-speech-recognition"


def turns_of(batch_rows: int) -> RoundRobin[WorkItem]:
    """Of long lists, as many pieces are under way as two batches hold: one runs, one is ready."""
    return RoundRobin(max(2, 2 * batch_rows // min(PIECE, batch_rows)))


def _load(setting: str, settings: Settings, recognizer: Model | None = None) -> Any:
    """The model that a setting names; `recognizer` has that of speech loaded already."""
    if not has_code_folder():
        settings = replace(settings, compile="off")
    _import()
    match setting:
        case "pipeline_model":
            from worker.pipeline.loading import PipelineOptions, load_runner

            options = _options(PipelineOptions, setting, settings)
            return load_runner(options, settings.max_batch_size)
        case "chat_model":
            from worker.generation.loading import load_generator
            from worker.model.language_model import GeneratorOptions

            return load_generator(_options(GeneratorOptions, setting, settings))
        case "transcription_model":
            from worker.speech.loading import SpeechOptions, load_speech

            loaded: Any = recognizer and recognizer.loaded
            return load_speech(_options(SpeechOptions, setting, settings), loaded and loaded.pipe)
        case _:
            from worker.embedding.loading import ScoringOptions, load_embedder, load_reranker

            load = load_embedder if setting == "embedding_model" else load_reranker
            return load(_options(ScoringOptions, setting, settings))


def _import() -> None:
    """What is made meanwhile stays, and to look for garbage in it takes a fifth of the time."""
    gc.disable()
    try:
        import worker.model.loading  # noqa: F401
        from worker.model.loading import install_progress_log
    finally:
        gc.enable()
    install_progress_log()


def _options(kind: Any, setting: str, settings: Settings) -> Any:
    """A loader's options: but for these, each is the setting of its name."""
    chosen = {
        "task": settings.pipeline_task,
        "model": getattr(settings, setting),
        "attention": settings.attn_implementation,
    }
    names = {each.name for each in fields(kind)}
    others = {name: getattr(settings, name) for name in names - set(chosen)}
    return kind(**others, **{name: chosen[name] for name in names & set(chosen)})


def make_app() -> Application:
    """`app`, from the environment; SettingsError for what cannot be served."""
    check_workers()
    made = create_app(load_settings())
    if cores := made.worker_client.worker.cores:
        put_openmp(cores)
    globals()["app"] = made
    return made


def __getattr__(name: str) -> Any:
    """`app`, made from the environment when it is first asked for (tests make their own)."""
    if name != "app":
        raise AttributeError(name)
    try:
        return make_app()
    except SettingsError as error:
        refuse(error)
