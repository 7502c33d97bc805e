"""How a serving process lives: its log, its worker, what it says when it is ready, and its end.

It ends drained on a signal, or because a model could not be loaded. Whoever embeds the app off
the main thread has signals and the process to itself.
"""

import asyncio
import contextlib
import gc
import logging
import shlex
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from server.core.log import configure_log
from server.core.worker_client import WorkerClient
from server.http.connections import APP, limit_connections
from server.http.request import Application
from server.openai.responses.endpoint import Responses

log = logging.getLogger("onequeue.lifespan")

# How long a thread keeps the interpreter while another waits for it. Python's own 5 ms is as long
# as a small forward pass, and each pass changes hands several times on its way.
SWITCH_S = 0.001


@contextlib.asynccontextmanager
async def lifespan(
    app: Application, responses: Responses | None
) -> AsyncIterator[dict[str, Application]]:
    """Responses are closed once everything accepted has its answer."""
    worker_client, grace_s = app.worker_client, app.settings.shutdown_grace_s
    configure_log()
    limit_connections()
    sys.setswitchinterval(SWITCH_S)
    # uvicorn's server, by its signal handler; None where somebody embeds us
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    server = handler if isinstance(handler, uvicorn.Server) else None
    worker_client.start()
    worker_client.loaded.add_done_callback(partial(settle, app, server, time.monotonic()))
    restore_signals = drain_on_signal(worker_client, grace_s)
    try:
        yield {APP: app}
    finally:
        restore_signals()
        gc.unfreeze()  # so that libraries find all of theirs at the end
        if not worker_client.draining:
            await drain(worker_client, grace_s)
        worker_client.stop()
        if responses:
            await responses.close()
        log.info("stopped")
        if server and load_failure(worker_client.loaded):
            server.started = False  # so that uvicorn ends with its status for a failed start, 3


def load_failure(loaded: "asyncio.Future[None]") -> BaseException | None:
    return loaded.exception() if loaded.done() and not loaded.cancelled() else None


def settle(
    app: Application, server: uvicorn.Server | None, began: float, loaded: "asyncio.Future[None]"
) -> None:
    """The models are there, or one could not be loaded."""
    if error := load_failure(loaded):
        end_unloaded(error, app.settings.debug, server)
    elif server and not loaded.cancelled():
        gc.freeze()  # what is there stays: later collections leave it out
        welcome(app, server, time.monotonic() - began)


def welcome(app: Application, server: uvicorn.Server, seconds: float) -> None:
    """Say where lines to try and the page are, as soon as it listens: the models may have been
    there before. `seconds` since the process began to serve."""
    if server.started:
        log.info("ready seconds=%.1f: try %s, or a browser", seconds, curl(server))
    elif not server.should_exit:
        app.worker_client.loop.call_later(0.05, welcome, app, server, seconds)


def curl(server: uvicorn.Server) -> str:
    """A command that asks for `GET /`, of this machine where all of its addresses are listened
    on."""
    config, scheme = server.config, "https" if server.config.is_ssl else "http"
    if config.uds:
        return shlex.join(["curl", "--unix-socket", config.uds, "http://localhost/"])
    port = config.port or server.servers[0].sockets[0].getsockname()[1]
    host = "localhost" if config.host in ("0.0.0.0", "::") else config.host
    return f"curl {scheme}://{f'[{host}]' if ':' in host else host}:{port}/"


def end_unloaded(error: BaseException, debug: bool, server: uvicorn.Server | None) -> None:
    """Says why there is no model; the server ends as soon as everybody has an answer."""
    print(f"onequeue: {with_cause(error)}", file=sys.stderr)
    if debug:
        traceback.print_exception(error)
    if server:
        server.should_exit = True


def with_cause(error: BaseException) -> str:
    """On one line: what happened, and why if that does not say it."""
    cause = error.__cause__
    reason = str(cause).strip().partition("\n")[0] or repr(cause)
    known = cause is None or reason in str(error)
    return str(error) if known else f"{error}: {reason}"


async def drain(worker_client: WorkerClient, grace_s: float) -> None:
    """Refuse what is new, wait for what was accepted, answer 503 to what is left."""
    worker_client.draining = True
    try:
        async with asyncio.timeout(grace_s):
            await worker_client.queue.settled.wait()
    except TimeoutError:
        log.warning("drain incomplete unanswered=%d", worker_client.queue.pending)
    worker_client.give_up()


def drain_on_signal(worker_client: WorkerClient, grace_s: float) -> Callable[[], None]:
    """On SIGTERM or SIGINT drain first, then hand on to the handler that was there.

    uvicorn would close its listeners and wait, while clients already inside still wait for a
    model. A second signal ends the wait at once. Returns a function that undoes it.
    """
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hand_on(number: int, frame: FrameType | None) -> None:
        restore()  # from here on uvicorn handles signals
        before[number](number, frame)

    async def drain_first(number: int, frame: FrameType | None) -> None:
        log.info(
            "draining unanswered=%d grace_s=%g: a second signal, or Ctrl-C, ends the wait at once",
            worker_client.queue.pending,
            grace_s,
        )
        await drain(worker_client, grace_s)
        if signal.getsignal(number) is on_signal:
            hand_on(number, frame)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if worker_client.draining:
            worker_client.loop.call_soon_threadsafe(worker_client.give_up)
            hand_on(number, frame)
        else:
            worker_client.draining = True
            asyncio.run_coroutine_threadsafe(drain_first(number, frame), worker_client.loop)

    with contextlib.suppress(ValueError):  # off the main thread, whoever embeds us has signals
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, on_signal)
                before[number] = handler
    return restore
