"""The ASGI app: `uvicorn server.app:app`, or mounted in another app.

`create_app` wires settings, queue, worker, worker client and routes (routes.py). lifespan.py starts
the worker and drains it on SIGTERM, before uvicorn handles the signal. One process, one worker
thread.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.routing import Router

from batching.batcher import WINDOW_BATCHES, DynamicBatcher
from batching.request_queue import RequestQueue
from server.core.metrics import Metrics
from server.core.request_context import SECRET
from server.core.settings import Settings, SettingsError, load_settings
from server.core.worker_client import WorkerClient, size_of
from server.entries import ModelEntry, model_entries, shares_recognizer
from server.http.request import Application
from server.lifespan import lifespan
from server.preflight import (
    KINDS,
    MODELS,
    check_hub,
    check_models,
    check_workers,
    exit_with_error,
    forbid_conversion,
    has_cache_folder,
    limit_kernel_caches,
    open_stored_prefixes,
    openmp_threads,
    set_openmp_variables,
    telemetry_is_configured,
)
from server.routes import make_routes, named_models
from worker.cores import find_cores
from worker.messages.protocol import Engine, Generator, Runner
from worker.registry import ServedModel
from worker.worker import Worker

if TYPE_CHECKING:
    from server.core.telemetry import Telemetry

Options = TypeVar("Options")
Loaders = Mapping[str, Callable[[], Any]]  # of models that are not the settings', by kind
# Folders of the demo models.
DEMOS = {
    "pipeline": "fill-mask", "generation": "chat", "embedding": "embedding",
    "rerank": "embedding", "transcription": "speech",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Make `app` from the environment when it is first used; tests call `create_app`."""
    if name != "app":
        raise AttributeError(name)
    try:
        return make_app()
    except SettingsError as error:
        exit_with_error(error)


def make_app() -> Application:
    """Make `app` from the environment. Raises SettingsError for settings that cannot be served."""
    check_workers()
    settings = load_settings()
    check_hub(settings)
    app = create_app(settings)
    limit_kernel_caches()
    if cores := app.worker_client.worker.cores:
        set_openmp_variables(cores)
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
    """Return the app. Raises SettingsError for settings that cannot be served. An app that it is
    mounted in runs its `lifespan`.

    The loaders run on the worker thread. By default they load the models that the settings name;
    a model named `none` is not served."""
    given = load, load_chat, load_embedder, load_reranker, load_transcriber
    loaders: Loaders = {kind: own for kind, own in zip(KINDS, given, strict=True) if own}
    with_loader = {name for name, kind in MODELS.items() if kind in loaders}
    settings = check_models(settings, with_loader)
    entries = model_entries(settings, with_loader)
    if store := open_stored_prefixes(settings):
        SECRET[:] = store.secret
    cores = find_cores(settings.pin_worker, openmp_threads())
    pool_threads = max(2, min(8, cores.threads if cores else 2))
    queue = RequestQueue(settings.max_queue_size, time.monotonic, size_of)
    limit = None if settings.models_gb is None else int(settings.models_gb * 1e9)
    worker = Worker(served_models(settings, entries, loaders), cores=cores, limit_bytes=limit)
    metrics = Metrics(
        lambda: queue.pending,
        lambda: sum(model.queue.not_started for model in worker.models.values()),
    )
    worker_client = WorkerClient(worker, queue, metrics, settings, pool_threads)
    models = named_models(settings, worker_client, entries)
    routes, jobs = make_routes(settings, worker_client, entries, models)
    if settings.models_from_cache:
        from server.cached_models import CachedModels

        make = partial(served_models, settings, loaders=loaders)
        cached = CachedModels(settings, entries, models, worker_client, make)
        cached.add(cached.find())
        worker_client.manager.rescan = cached.rescan
    run = partial(lifespan, jobs=jobs)
    router = Router(routes, redirect_slashes=False, lifespan=partial(run, owns_process=True))
    app = Application(router, routes, settings, worker_client, partial(run, owns_process=False))
    if telemetry_is_configured():
        app.telemetry = make_telemetry(app)
    return app


def make_telemetry(app: Application) -> "Telemetry":
    """Return telemetry by OpenTelemetry's variables; `lifespan` shuts it down.

    It is made with the app, not when that starts: the SDK refuses wrong variables when its
    exporters are made, and these end the start like other wrong settings."""
    try:
        from server.core.telemetry import telemetry_from_environment

        return telemetry_from_environment(app.metrics)
    except ImportError as error:
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT: the extra otel is not installed ({error})"
        ) from None
    except Exception as error:  # of the SDK, about one of its variables
        raise SettingsError(f"OTEL variables: {error}") from None


def served_models(
    settings: Settings, entries: Sequence[ModelEntry], loaders: Loaders
) -> list[ServedModel]:
    """Return the models of the entries. The default model of each kind is loaded at the start."""
    models: dict[str, ServedModel] = {}
    pipelines: dict[str, ModelEntry] = {}  # by name
    for entry in entries:
        if entry.served_by != entry.name:
            continue
        model: ServedModel
        later_caches = partial(count_later_caches, models, entry)
        if entry.generates:
            given = loaders.get(entry.kind) if entry.kind == "generation" else None
            load_chat = given or partial(load_language_model, entry, later_caches)
            model = ServedModel(entry.name, load_chat, entry.settings.max_running, generates=True)
        elif entry.kind == "transcription":
            shared = [name for name, pipe in pipelines.items() if shares_recognizer(pipe, entry)]
            recognizer = models[shared[0]] if shared and not loaders else None
            own = partial(load_transcriber, entry, recognizer)
            model = ServedModel(entry.name, loaders.get(entry.kind, own), settings.max_batch_size)
            if recognizer:  # one holds the other's weights
                for sharing in (recognizer, model):
                    sharing.pin = True
                    sharing.load_at_start()
        elif entry.kind == "pipeline" and entry.generates_text and entry.kind not in loaders:
            batcher = new_batcher(entry.settings)  # of what runs `generate`, together
            load_text = partial(load_text_pipeline, entry, batcher, later_caches)
            model = ServedModel(entry.name, load_text, entry.settings.max_running)
            model.has_cache = True
        else:
            load = partial(load_pipeline if entry.kind == "pipeline" else load_scoring, entry)
            if given := loaders.get(entry.kind):
                load = partial(load_given, given)
            model = batched_model(entry.name, load, settings)
        if entry.kind == "pipeline":
            pipelines[entry.name] = entry
        models[entry.name] = model
        model.title, model.path = entry.reference.name, entry.reference.path
        model.pin = model.pin or entry.reference.pin
        if not loaders:
            model.measure = partial(measure_model, entry)
        if entry.name == entry.kind:
            model.load_at_start()
    return [*models.values()]


def count_later_caches(models: Mapping[str, ServedModel], entry: ModelEntry) -> int:
    """Return how many other models may still make a KV cache: one of all those of the hub cache."""
    later = sum(m.has_cache and not m.is_loaded for m in models.values() if m.name != entry.name)
    return later + entry.settings.models_from_cache


def batched_model(
    name: str, load: Callable[[DynamicBatcher], Engine], settings: Settings
) -> ServedModel:
    """Return the entry of a model whose requests are batched. The queue dispatches as many inputs
    of a pipeline as the batcher chooses from, and two batches of other texts."""
    rows, batcher = settings.max_batch_size, new_batcher(settings)
    capacity = WINDOW_BATCHES * rows // 2 if name.startswith("pipeline") else rows
    return ServedModel(name, partial(load, batcher), capacity)


def new_batcher(settings: Settings) -> DynamicBatcher:
    wait_s = settings.max_batch_wait_ms / 1000
    return DynamicBatcher(settings.max_batch_size, settings.max_batch_tokens, wait_s)


# ── loaders, on the loader thread: importing torch takes seconds ──


def load_given(load: Callable[[], Runner], batcher: DynamicBatcher) -> Engine:
    from worker.engines.pipeline.engine import PipelineEngine

    return PipelineEngine(load(), batcher)


def load_pipeline(entry: ModelEntry, batcher: DynamicBatcher) -> Engine:
    import_torch()
    from worker.engines.pipeline.loading import PipelineOptions, load_runner

    options = loader_options(PipelineOptions, entry)
    return load_given(partial(load_runner, options, entry.settings.max_batch_size), batcher)


def load_text_pipeline(
    entry: ModelEntry, batcher: DynamicBatcher, later_caches: Callable[[], int]
) -> Engine:
    import_torch()
    from worker.engines.generation.text_pipeline import load_text_generation
    from worker.engines.pipeline.loading import PipelineOptions
    from worker.model.language_model import GeneratorOptions

    # a pipeline's weights are never quantized
    caches, weights = later_caches(), "none"
    generation = loader_options(GeneratorOptions, entry, later_caches=caches, quantization=weights)
    options = loader_options(PipelineOptions, entry)
    return load_text_generation(options, generation, batcher, entry.settings.max_batch_size)


def load_language_model(entry: ModelEntry, later_caches: Callable[[], int]) -> Generator:
    """`later_caches` returns the number of caches that may be made after this model's."""
    import_torch()
    from worker.engines.generation.loading import load_generator
    from worker.model.language_model import GeneratorOptions

    return load_generator(loader_options(GeneratorOptions, entry, later_caches=later_caches()))


def load_scoring(entry: ModelEntry, batcher: DynamicBatcher) -> Engine:
    import_torch()
    from worker.engines.embedding.loading import (
        ScoringOptions,
        load_embedder,
        load_reranker,
        new_engine,
    )

    options = loader_options(ScoringOptions, entry)
    scorer = load_embedder(options) if entry.kind == "embedding" else load_reranker(options)
    return new_engine(scorer, batcher)


def load_transcriber(entry: ModelEntry, recognizer: ServedModel | None) -> Engine:
    """`recognizer`: the model of `POST /`, loaded before, whose weights are shared."""
    import_torch()
    from worker.engines.pipeline.engine import PipelineEngine
    from worker.engines.pipeline.runner import PipelineRunner
    from worker.engines.speech.loading import SpeechOptions, load_speech

    pipe = None
    if recognizer:
        assert isinstance(recognizer.engine, PipelineEngine)
        assert isinstance(recognizer.engine.runner, PipelineRunner)
        pipe = recognizer.engine.runner.pipe
    return load_speech(loader_options(SpeechOptions, entry), pipe)


def measure_model(entry: ModelEntry) -> tuple[int, int]:
    """Return the bytes that loading a model takes at least, and those that are free."""
    import_torch()
    from worker.device.device import choose_device, unreserved_bytes
    from worker.model.loading import local_path, needed_bytes

    device = choose_device(entry.settings.device)
    path = local_path(entry.reference.path, DEMOS[entry.kind])
    needed = needed_bytes(path, entry.settings.dtype, device)
    return needed, unreserved_bytes(device)


def import_torch() -> None:
    """Import torch and transformers, in a process of our own without garbage collection, which
    takes a fifth of the time: the objects of an import stay."""
    has_cache_folder()  # before: the import creates the folder that the environment names
    forbid_conversion()
    owns_process = "app" in globals()
    if owns_process:
        gc.disable()
    try:
        import worker.model.loading  # noqa: F401
        from worker.model.loading import install_progress_log
    finally:
        if owns_process:
            gc.enable()
    install_progress_log()


def loader_options(kind: type[Options], entry: ModelEntry, **given: Any) -> Options:
    """Return a loader's options; each field but these is the setting of the same name."""
    settings = entry.settings
    values = {
        "task": settings.pipeline_task,
        "model": entry.reference.path,
        "served_name": entry.reference.name,
        "attention": settings.attn_implementation,
        "compile": settings.compile if has_cache_folder() else "off",
        **given,
    }
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return kind(
        **{name: values[name] if name in values else getattr(settings, name) for name in names}
    )
