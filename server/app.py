"""The ASGI app: `uvicorn server.app:app`.

`create_app` wires settings, queue, worker, engine and routes; the lifespan starts the worker
and drains it on SIGTERM, before uvicorn hears of the signal. One process, one worker thread.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any

from starlette.routing import Route, Router

from batching.breaker import Breaker
from batching.dynamic import DynamicBatcher
from batching.request_queue import RequestQueue
from server import health, logs, models, openapi
from server.chat_completions import ChatCompletions
from server.completions import Completions
from server.detokenize import Detokenize
from server.front import Front
from server.load_model import LoadModel
from server.metrics import Metrics, metrics
from server.protocol import APP, bound_connections
from server.response_lookup import ResponseLookup
from server.response_store import ResponseStore
from server.responses import Responses
from server.root import Root
from server.settings import Settings, SettingsError, load_settings
from server.tokenize import Tokenize
from worker.engine import Engine
from worker.payloads import Generator, Models, Runner
from worker.tasks import UnservedTask, resolve_task
from worker.worker import Worker

log = logging.getLogger("onequeue.app")

# How long a thread keeps the interpreter while another waits for it. Python's own 5 ms is as long
# as a small forward pass, and each pass changes hands several times on its way.
SWITCH_S = 0.001
STARTUP_FAILURE = 3  # the exit status at which uvicorn's supervisor does not start another


def create_app(
    settings: Settings,
    load: Callable[[], Runner] | None = None,
    load_chat: Callable[[], Generator] | None = None,
) -> Front:
    """`load` and `load_chat` make the models, on the worker thread; by default from the settings,
    where `none` means that there is none."""
    try:
        task = resolve_task(settings.pipeline_task)
    except UnservedTask as error:
        raise SettingsError(f"PIPELINE_TASK: {error}") from None
    if settings.pipeline_model == settings.chat_model == "none":
        raise SettingsError("PIPELINE_MODEL=none and CHAT_MODEL=none: there is nothing to serve")
    pool_threads = max(2, min(8, (os.cpu_count() or 2) // 2))
    queue = RequestQueue(settings.max_queue_size, time.monotonic)
    batcher = DynamicBatcher(
        settings.max_batch_size, settings.max_batch_tokens, settings.max_batch_wait_ms / 1000
    )
    loading = loader(settings, pool_threads, load, load_chat)
    worker = Worker(loading, batcher, Breaker())
    observer = Metrics(lambda: queue.pending, settings.max_batch_size)
    engine = Engine(worker, queue, observer, pool_threads, settings.stuck_after_s)
    routes = [
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/metrics", metrics),
    ]
    if settings.pipeline_model != "none":
        routes.append(Route("/", Root(settings, engine, task), methods=["POST"]))
    closing: list[Callable[[], Awaitable[None]]] = []
    if settings.chat_model != "none":
        names = models.ModelNames(settings.chat_model, engine)
        responses = Responses(settings, engine, observer, names, open_store(settings))
        closing.append(responses.close)
        routes += generation_routes(settings, engine, observer, names, responses)
    routes.append(openapi.route(settings, task, routes))
    paths = {route.path_format for route in routes}
    router = Router(routes, lifespan=partial(lifespan, closing=closing))
    return Front(router, paths, settings, engine, observer)


def open_store(settings: Settings) -> ResponseStore:
    try:
        return ResponseStore(settings.responses_db)
    except sqlite3.Error as error:
        raise SettingsError(f"RESPONSES_DB={settings.responses_db!r}: {error}") from None


def generation_routes(
    settings: Settings,
    engine: Engine,
    observer: Metrics,
    names: models.ModelNames,
    responses: Responses,
) -> list[Route]:
    post = ["POST"]
    return [
        Route(
            "/v1/chat/completions", ChatCompletions(settings, engine, observer, names), methods=post
        ),
        Route("/v1/completions", Completions(settings, engine, observer, names), methods=post),
        Route("/v1/responses", responses, methods=post),
        *ResponseLookup(responses).routes(),
        Route(models.PATH, names.list),
        Route(models.ONE_PATH, names.one),
        Route("/tokenize", Tokenize(settings, engine, names), methods=post),
        Route("/detokenize", Detokenize(settings, engine, names), methods=post),
        Route("/load_model", LoadModel(settings, names).answer, methods=post),
    ]


def loader(
    settings: Settings,
    pool_threads: int,
    load: Callable[[], Runner] | None,
    load_chat: Callable[[], Generator] | None,
) -> Callable[[], Models]:
    """Loads what the settings name, on the worker's thread: torch and transformers take seconds."""

    def load_all() -> Models:
        pipeline = generator = None
        if settings.pipeline_model != "none":
            pipeline = load() if load else _load_pipeline(settings, pool_threads)
        if settings.chat_model != "none":
            generator = load_chat() if load_chat else _load_chat(settings)
        return Models(pipeline, generator)

    return load_all


def _load_pipeline(settings: Settings, pool_threads: int) -> Runner:
    from worker.loading import LoadOptions
    from worker.pipelines import load_runner

    options = LoadOptions(
        settings.pipeline_task,
        settings.pipeline_model,
        settings.device,
        settings.dtype,
        settings.attn_implementation,
    )
    return load_runner(options, settings.max_batch_size, pool_threads)


def _load_chat(settings: Settings) -> Generator:
    from worker.generation import load_generator
    from worker.language_model import GeneratorOptions

    options = GeneratorOptions(
        settings.chat_model,
        settings.device,
        settings.dtype,
        settings.attn_implementation,
        settings.quantization,
        settings.compile,
        settings.speculation,
        settings.max_model_len,
        settings.kv_cache_gb,
        settings.max_running,
    )
    return load_generator(options)


@asynccontextmanager
async def lifespan(
    app: Front, closing: Sequence[Callable[[], Awaitable[None]]]
) -> AsyncIterator[dict[str, Front]]:
    """`closing` is awaited once everything accepted has its answer."""
    engine, grace_s = app.engine, app.settings.shutdown_grace_s
    logs.configure()
    bound_connections()
    sys.setswitchinterval(SWITCH_S)
    engine.start()
    restore = drain_on_signal(engine, grace_s)
    try:
        yield {APP: app}
    finally:
        restore()
        if not engine.draining:
            await engine.drain(grace_s)
        await engine.stop()
        for close in closing:
            await close()
        log.info("stopped")


def drain_on_signal(engine: Engine, grace_s: float) -> Callable[[], None]:
    """On SIGTERM or SIGINT drain first, then hand on to the handler that was there.

    uvicorn would close its listeners and wait, while clients already inside still wait for a
    model. A second signal ends the wait at once. Returns a function that undoes it.
    """
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}
    drains: list[asyncio.Task[None]] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hand_on(number: int, frame: FrameType | None) -> None:
        restore()  # from here on signals are the server's own affair
        before[number](number, frame)

    async def drain(number: int, frame: FrameType | None) -> None:
        log.info("draining unanswered=%d grace_s=%g", engine.queue.pending, grace_s)
        await engine.drain(grace_s)
        if signal.getsignal(number) is on_signal:
            hand_on(number, frame)

    def on_first(number: int, frame: FrameType | None) -> None:
        if not drains:
            drains.append(loop.create_task(drain(number, frame)))

    def on_signal(number: int, frame: FrameType | None) -> None:
        if engine.draining:
            loop.call_soon_threadsafe(engine.give_up)
            hand_on(number, frame)
        else:
            loop.call_soon_threadsafe(on_first, number, frame)

    with contextlib.suppress(ValueError):  # off the main thread, whoever embeds us has signals
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, on_signal)
                before[number] = handler
    return restore


def refuse_several_workers() -> None:
    """Each process would load its own model and keep its own queue, batcher and metrics."""
    words = sys.argv[1:]
    asked = os.environ.get("WEB_CONCURRENCY", "1")
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--workers":
            asked = following
        elif word.startswith("--workers="):
            asked = word.partition("=")[2]
    if asked.isdigit() and int(asked) > 1:
        raise SettingsError(
            f"--workers {asked}: one process serves the model, with one queue and one worker "
            "thread; run more of them on ports of their own behind a load balancer"
        )


def __getattr__(name: str) -> Any:
    """`app`, made from the environment when it is first asked for (tests make their own)."""
    if name != "app":
        raise AttributeError(name)
    try:
        refuse_several_workers()
        made = create_app(load_settings())
    except SettingsError as error:
        print(f"onequeue: {error}", file=sys.stderr)
        raise SystemExit(STARTUP_FAILURE) from None
    globals()["app"] = made
    return made
