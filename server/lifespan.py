"""The lifespan of the app: startup, the log line at readiness, and the drain.

    lifespan: start the worker → serve → drain on a signal, or on a failed load → stop

An app that is mounted in another one leaves signals, thread switching, garbage collection and the
web server to its host. In a server that runs off the main thread, signals stay with the program.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import shlex
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import FrameType

import anyio.to_thread
import uvicorn

from server.apis.openai.jobs import JobRunner
from server.core.api_keys import Keyring
from server.core.log import configure_log, silence_libraries
from server.core.settings import SettingsError
from server.core.worker_client import WorkerClient
from server.http.access_log import replace_access_log
from server.http.connections import APP_STATE, limit_connections
from server.http.request import Application
from worker.compilers import end_compilers
from worker.task_detection import load_error
from worker.worker import Worker

log = logging.getLogger("onequeue.lifespan")

# How long a thread keeps the interpreter while another waits for it. A forward pass takes it back
# hundreds of times: while a thread compiled a model, an eager step of 24 layers took 1.8 s at 1 ms,
# and at most 0.3 s at 0.1 ms.
SWITCH_INTERVAL_S = 0.0001
# Objects after which the youngest are collected, and collections of each generation after which the
# next one is. A step of 1,024 streams makes thousands of objects: Python's thresholds, 700, 10 and
# 10, take 40 % of its time.
GC_THRESHOLDS = 20_000, 20, 20
READY_POLL_S = 0.05
THREAD_END_S = 10.0  # the longest wait for the worker's last step


@contextlib.asynccontextmanager
async def lifespan(
    app: Application, jobs: JobRunner, owns_process: bool
) -> AsyncIterator[dict[str, Application]]:
    """Start the worker and the jobs, drain it at the end, and close these after all accepted work.

    `owns_process`: the app is not mounted in another one."""
    worker_client, grace_s = app.worker_client, app.settings.shutdown_grace_s
    server = running_server() if owns_process else None
    configure_log(app.settings.log_format)
    if server:
        limit_connections(server.config)
        app.logs_requests = replace_access_log()
    if owns_process:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is a file
    worker_client.start()
    jobs.start(app)
    worker_client.loaded.add_done_callback(partial(on_loaded, app, server, time.monotonic()))
    delay_s = app.settings.drain_delay_s
    restore_signals = drain_on_signal(worker_client, delay_s, grace_s) if owns_process else None
    reloading = asyncio.create_task(reload_on_signal(app.keyring)) if owns_process else None
    try:
        yield {APP_STATE: app}
    finally:
        if reloading:
            reloading.cancel()
        if restore_signals:
            restore_signals()
            gc.unfreeze()  # so that libraries can collect their objects at exit
        if not worker_client.draining:
            await drain(worker_client, grace_s)
        worker_client.stop()
        await anyio.to_thread.run_sync(flush, worker_client.worker)
        await jobs.close()
        if app.telemetry:
            await anyio.to_thread.run_sync(app.telemetry.shutdown)
        if server:
            await anyio.to_thread.run_sync(end_compilers)
        log.info("stopped")
        if server and load_failure(worker_client.loaded):
            server.started = False  # uvicorn then exits with the status of a failed start, 3


def flush(worker: Worker) -> None:
    """Wait until what outlives the models is on disk, once the worker's thread has ended."""
    worker.thread.join(THREAD_END_S)
    for model in worker.models.values():
        if model.is_loaded and model.generator and not worker.thread.is_alive():
            model.generator.flush()


async def reload_on_signal(keyring: Keyring) -> None:
    """Read API_KEYS_FILE again on each SIGHUP; those during a reload cause one more.

    Without a file, SIGHUP ends a server whose terminal is closed, and no other one."""
    if not keyring.file and os.isatty(0):
        return
    wanted, loop = asyncio.Event(), asyncio.get_running_loop()
    with contextlib.suppress(RuntimeError, ValueError):  # off the main thread there are no signals
        loop.add_signal_handler(signal.SIGHUP, wanted.set)
    try:
        while await wanted.wait():
            wanted.clear()
            if not keyring.file:
                log.warning("nothing is reloaded: API_KEYS_FILE is not set")
                continue
            try:
                await anyio.to_thread.run_sync(keyring.reload)
            except SettingsError as error:
                log.error("keys not reloaded, those before are still valid: %s", error)
            else:
                log.info("keys reloaded count=%d", len(list(keyring)))
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGHUP)


def running_server() -> uvicorn.Server | None:
    """Return uvicorn's server, by its signal handler; None if uvicorn does not handle signals."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return handler if isinstance(handler, uvicorn.Server) else None


def load_failure(loaded: "asyncio.Future[None]") -> BaseException | None:
    return loaded.exception() if loaded.done() and not loaded.cancelled() else None


def on_loaded(
    app: Application, server: uvicorn.Server | None, started: float, loaded: "asyncio.Future[None]"
) -> None:
    """Log that the models are ready, or end the server because one could not be loaded."""
    if error := load_failure(loaded):
        print(f"onequeue: {with_cause(error)}", file=sys.stderr)
        if app.settings.debug:
            traceback.print_exception(error)
        if server:
            server.should_exit = True  # after it has sent its responses
        return
    silence_libraries()
    if server and not loaded.cancelled():
        gc.freeze()  # the loaded objects stay: later collections skip them
        gc.set_threshold(*GC_THRESHOLDS)
        log_ready(app, server, time.monotonic() - started)


def log_ready(app: Application, server: uvicorn.Server, seconds: float) -> None:
    """Log the address as soon as the server listens; the models may be ready before that.

    `seconds`: from the start of the lifespan until the models were ready."""
    if server.started:
        log.info("ready seconds=%.1f: try %s, or a browser", seconds, curl_command(server))
    elif not server.should_exit:
        app.worker_client.loop.call_later(READY_POLL_S, log_ready, app, server, seconds)


def curl_command(server: uvicorn.Server) -> str:
    """Return a command for `GET /`; a wildcard address becomes localhost."""
    config, scheme = server.config, "https" if server.config.is_ssl else "http"
    if config.uds:
        return shlex.join(["curl", "--unix-socket", config.uds, "http://localhost/"])
    port = config.port or server.servers[0].sockets[0].getsockname()[1]
    host = "localhost" if config.host in ("0.0.0.0", "::") else config.host
    return f"curl {scheme}://{f'[{host}]' if ':' in host else host}:{port}/"


def with_cause(error: BaseException) -> str:
    """Return the message on one line, with the reason of its cause if it adds something."""
    reason = load_error(error.__cause__) if error.__cause__ else ""
    return str(error) if reason in str(error) else f"{error}: {reason}"


async def drain(worker_client: WorkerClient, grace_s: float) -> None:
    """Refuse new requests, wait for accepted ones, and fail the rest with 503 after `grace_s`."""
    worker_client.start_draining()
    try:
        async with asyncio.timeout(grace_s):
            await worker_client.queue.drained.wait()
    except TimeoutError:
        log.warning("drain incomplete unanswered=%d", worker_client.queue.pending)
    worker_client.cancel_all()


def drain_on_signal(
    worker_client: WorkerClient, delay_s: float, grace_s: float
) -> Callable[[], None]:
    """On SIGTERM or SIGINT drain after `delay_s`, in which load balancers notice that /ready is
    503, then call the previous handler.

    uvicorn would close its listeners and wait, while accepted requests still wait for a model.
    A second signal ends the wait at once. Returns a function that restores the handlers."""
    previous: dict[int, Callable[[int, FrameType | None], object]] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def call_previous(number: int, frame: FrameType | None) -> None:
        restore()  # from here on uvicorn handles signals
        previous[number](number, frame)

    async def drain_first(number: int, frame: FrameType | None) -> None:
        log.info(
            "draining unanswered=%d delay_s=%g grace_s=%g: a second signal, or Ctrl-C, ends the "
            "wait at once",
            worker_client.queue.pending,
            delay_s,
            grace_s,
        )
        if delay_s:
            await asyncio.sleep(delay_s)
        await drain(worker_client, grace_s)
        if signal.getsignal(number) is on_signal:
            call_previous(number, frame)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if worker_client.terminating:
            worker_client.loop.call_soon_threadsafe(worker_client.cancel_all)
            call_previous(number, frame)
        else:
            worker_client.terminating = True
            worker_client.draining = not delay_s  # at once
            asyncio.run_coroutine_threadsafe(drain_first(number, frame), worker_client.loop)

    with contextlib.suppress(ValueError):  # off the main thread there are no signal handlers
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, on_signal)
                previous[number] = handler
    return restore
