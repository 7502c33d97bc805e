"""How a serving process ends: drained on a signal, or because its model could not be loaded.

The lifespan in app.py uses these; whoever embeds the app off the main thread has signals and the
process to itself.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn

from server.engine import Engine

log = logging.getLogger("onequeue.stopping")


def serving_uvicorn() -> uvicorn.Server | None:
    """The server of this process, by its signal handler; None where somebody embeds us."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, uvicorn.Server) else None


def load_failure(loaded: "asyncio.Future[None]") -> BaseException | None:
    return loaded.exception() if loaded.done() and not loaded.cancelled() else None


def end_unloaded(
    debug: bool, server: uvicorn.Server | None, loaded: "asyncio.Future[None]"
) -> None:
    """Says why there is no model; the server ends as soon as everybody has an answer."""
    if (error := load_failure(loaded)) is None:
        return
    cause = error.__cause__
    reason = str(cause).strip().partition("\n")[0] or repr(cause)
    known = cause is None or reason in str(error)
    print(f"onequeue: {error}" + ("" if known else f": {reason}"), file=sys.stderr)
    if debug:
        traceback.print_exception(error)
    if server:
        server.should_exit = True


def drain_on_signal(engine: Engine, grace_s: float) -> Callable[[], None]:
    """On SIGTERM or SIGINT drain first, then hand on to the handler that was there.

    uvicorn would close its listeners and wait, while clients already inside still wait for a
    model. A second signal ends the wait at once. Returns a function that undoes it.
    """
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}
    drains: list[Future[None]] = []

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

    def on_signal(number: int, frame: FrameType | None) -> None:
        if engine.draining:
            loop.call_soon_threadsafe(engine.give_up)
            hand_on(number, frame)
        elif not drains:
            drains.append(asyncio.run_coroutine_threadsafe(drain(number, frame), loop))

    with contextlib.suppress(ValueError):  # off the main thread, whoever embeds us has signals
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, on_signal)
                before[number] = handler
    return restore
