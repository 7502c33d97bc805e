"""The ASGI app: `uvicorn server.app:app`.

`create_app` wires settings, queue, worker, worker client and routes (routes.py). lifespan.py starts
the worker and drains it on SIGTERM, before uvicorn handles the signal. One process, one worker
thread.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from starlette.routing import Router

from batching.batcher import DynamicBatcher
from batching.request_queue import BatchLane, RequestQueue, StepLane, WorkItem
from batching.round_robin import RoundRobin
from server.core.metrics import Metrics
from server.core.settings import Settings, SettingsError, load_settings
from server.core.worker_client import WorkerClient
from server.http.request import Application
from server.lifespan import lifespan
from server.openai.decisions.endpoint import decides_in_steps
from server.preflight import (
    MODELS,
    check_models,
    check_workers,
    has_cache_folder,
    openmp_threads,
    put_openmp,
    refuse,
)
from server.routes import make_routes
from worker.cores import find_cores
from worker.messages.protocol import Engine, Generator, Runner
from worker.messages.scoring import MAX_PART_INPUTS
from worker.registry import ServedModel, language_model
from worker.tasks import resolve_task
from worker.worker import Worker

Options = TypeVar("Options")


def __getattr__(name: str) -> Any:
    """Make `app` from the environment when it is first used; tests call `create_app`."""
    if name != "app":
        raise AttributeError(name)
    try:
        return make_app()
    except SettingsError as error:
        refuse(error)


def make_app() -> Application:
    """Make `app` from the environment. Raises SettingsError for settings that cannot be served."""
    check_workers()
    app = create_app(load_settings())
    if cores := app.worker_client.worker.cores:
        put_openmp(cores)
    globals()["app"] = app
    return app


def create_app(
    settings: Settings,
    load: Callable[[], Runner] | None = None,
    load_chat: Callable[[], Generator] | None = None,
    load_embedder: Callable[[], Runner] | None = None,
    load_reranker: Callable[[], Runner] | None = None,
    load_transcriber: Callable[[], Engine] | None = None,
) -> Application:
    """Return the app. Raises SettingsError for settings that cannot be served.

    The loaders run on the worker thread. By default they load the models that the settings name;
    a model named `none` is not served."""
    functions = load, load_chat, load_embedder, load_reranker, load_transcriber
    loaders = dict(zip(MODELS, functions, strict=True))
    settings = check_models(settings, {name for name, loader in loaders.items() if loader})
    cores = find_cores(settings.pin_worker, openmp_threads())
    pool_threads = max(2, min(8, cores.threads if cores else 2))
    queue = RequestQueue(settings.max_queue_size, time.monotonic)
    decides = not loaders["pipeline_model"] and decides_in_steps(settings)
    worker = Worker(served_models(settings, loaders, decides), cores=cores)
    metrics = Metrics(lambda: queue.pending)
    worker_client = WorkerClient(worker, queue, metrics, pool_threads, settings.stuck_after_s)
    routes, responses = make_routes(settings, worker_client, decides)
    router = Router(routes, lifespan=partial(lifespan, responses=responses))
    return Application(router, routes, settings, worker_client)


def served_models(
    settings: Settings, loaders: Mapping[str, Callable[[], Any] | None], decides: bool
) -> list[ServedModel]:
    """Return the models that the settings name; the worker thread loads them.

    `decides`: the task of `POST /` is decision, which a language model serves: the chat model if
    both settings name the same one."""
    models: list[ServedModel] = []
    queue_size, wait_s = settings.max_queue_size, settings.max_batch_wait_ms / 1000
    for setting, serves in MODELS.items():
        if getattr(settings, setting) == "none":
            continue
        load: Callable[[], Any] = loaders[setting] or partial(load_model, setting, settings)
        if serves == "pipeline" and decides:
            if settings.pipeline_model != settings.chat_model:
                chat_settings = replace(settings, chat_model=settings.pipeline_model)
                load = partial(load_model, "chat_model", chat_settings)
                models.append(language_model(serves, load, queue_size))
        elif serves == "generation":
            models.append(language_model(serves, load, queue_size))
        elif serves == "transcription":
            if not any(loaders.values()) and shares_speech_model(settings):
                load = partial(load_model, setting, settings, models[0])
            models.append(ServedModel(serves, load, StepLane(serves, queue_size)))
        else:
            rows = settings.max_batch_size
            batcher = DynamicBatcher(rows, settings.max_batch_tokens, wait_s)
            round_robin = None if serves == "pipeline" else make_round_robin(rows)
            lane = BatchLane(serves, queue_size, round_robin)
            models.append(ServedModel(serves, partial(load_engine, load, batcher), lane))
    return models


def shares_speech_model(settings: Settings) -> bool:
    """Return whether POST / and /v1/audio use the same model, which is then loaded once."""
    if settings.pipeline_model != settings.transcription_model:
        return False
    return resolve_task(settings.pipeline_task) == "automatic-speech-recognition"


def make_round_robin(batch_rows: int) -> RoundRobin[WorkItem]:
    """Return a round robin between lists, which runs the pieces of two batches at a time."""
    return RoundRobin(max(2, 2 * batch_rows // min(MAX_PART_INPUTS, batch_rows)))


def load_engine(load: Callable[[], Runner], batcher: DynamicBatcher) -> Engine:
    """Load a runner and return its engine, on the worker thread."""
    from worker.pipeline.engine import PipelineEngine

    return PipelineEngine(load(), batcher)


def load_model(setting: str, settings: Settings, recognizer: ServedModel | None = None) -> Any:
    """Load the model that a setting names.

    `recognizer`: the model of `POST /` whose loaded pipeline the transcription model shares."""
    if not has_cache_folder():
        settings = replace(settings, compile="off")
    import_torch()
    match setting:
        case "pipeline_model":
            from worker.pipeline.loading import PipelineOptions, load_runner

            options = loader_options(PipelineOptions, setting, settings)
            return load_runner(options, settings.max_batch_size)
        case "chat_model":
            from worker.generation.loading import load_generator
            from worker.model.language_model import GeneratorOptions

            return load_generator(loader_options(GeneratorOptions, setting, settings))
        case "transcription_model":
            from worker.speech.loading import SpeechOptions, load_speech

            engine: Any = recognizer and recognizer.engine
            speech_options = loader_options(SpeechOptions, setting, settings)
            return load_speech(speech_options, engine and engine.runner.pipe)
        case _:
            from worker.embedding.loading import ScoringOptions, load_embedder, load_reranker

            load = load_embedder if setting == "embedding_model" else load_reranker
            return load(loader_options(ScoringOptions, setting, settings))


def import_torch() -> None:
    """Import torch and transformers without garbage collection, which takes a fifth of the time:
    the objects of an import stay."""
    gc.disable()
    try:
        import worker.model.loading  # noqa: F401
        from worker.model.loading import install_progress_log
    finally:
        gc.enable()
    install_progress_log()


def loader_options(kind: type[Options], setting: str, settings: Settings) -> Options:
    """Return a loader's options; each field but these three is the setting of the same name."""
    renamed = {
        "task": settings.pipeline_task,
        "model": getattr(settings, setting),
        "attention": settings.attn_implementation,
    }
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return kind(
        **{name: renamed[name] if name in renamed else getattr(settings, name) for name in names}
    )
