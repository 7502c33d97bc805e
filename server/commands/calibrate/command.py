"""`python -m server calibrate --p95-ms 250`: which rate can be had, and the settings for it.

The models that the settings name are loaded, one of them is put under load, and the search's stages
are told as they end. Requests come over HTTP, from this process: the client's work is a part of
what is measured. A rate is of this machine, as quiet as it is now.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from server.commands.calibrate.load import MOST_CLIENTS, Load
from server.commands.calibrate.requests import requests_for
from server.commands.calibrate.search import CAPS, BatchLimits, Search, Stage
from server.core.log import configure_log
from server.core.settings import SettingsError
from server.http.request import Application
from server.lifespan import with_cause

SERVES = {
    "pipeline": "pipeline",
    "chat": "generation",
    "embedding": "embedding",
    "rerank": "rerank",
    "speech": "transcription",
}
STEPPED = {"generation", "transcription"}  # their batches form by themselves, step by step
LEAST_S, LIMITS = 3.0, 8  # a stage's seconds: at least so many, and so many times the percentile
LEAST_REQUESTS = 100  # that a stage is to have, for a 95th percentile to mean something
MOST_S = 30.0
HEADER = (
    f"{'batch':>5} {'wait ms':>8} {'offered/s':>10} {'answered/s':>10} {'p50 ms':>9} {'p95 ms':>9}"
)


@dataclass(frozen=True, slots=True)
class Options:
    p95_ms: float
    serves: str | None = None
    words: tuple[int, int] = (4, 20)
    tokens: int = 32
    file: bytes | None = None


def calibrate(app: Application, options: Options, say: Callable[[str], None]) -> Stage | None:
    """What was found, told by `say`; None if nothing holds the percentile. SettingsError for what
    cannot be measured, or loaded."""
    configure_log()
    logging.getLogger("onequeue.worker_client").setLevel(logging.WARNING)
    return asyncio.run(_calibrate(app, options, say))


class Server(uvicorn.Server):
    """Ctrl-C ends the calibration, whose server it is."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _calibrate(
    app: Application, options: Options, say: Callable[[str], None]
) -> Stage | None:
    worker_client = app.worker_client
    wanted = options.serves or next(name for name in SERVES if SERVES[name] in worker_client.models)
    if (serves := SERVES[wanted]) not in worker_client.models:
        raise SettingsError(f"--serves {wanted}: no such model is served")
    quiet = {"log_config": None, "access_log": False}
    # connections rest while a rate needs fewer of them
    config = uvicorn.Config(app, lifespan="off", timeout_keep_alive=3600, **quiet)  # type: ignore[arg-type]
    server = Server(config)
    worker_client.start()
    with socket.create_server(("127.0.0.1", 0), backlog=config.backlog) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            try:
                await worker_client.loaded
            except Exception as error:
                raise SettingsError(with_cause(error)) from error
            requests = requests_for(
                worker_client, serves, options.words, options.tokens, options.file
            )
            model = worker_client.models[serves]
            queue, lane = worker_client.queue, model.lane  # refusals are not what is to be measured
            queue.capacity = max(queue.capacity, 2 * MOST_CLIENTS)
            lane.places = max(lane.places, 2 * MOST_CLIENTS)
            name = model.loaded.info.model
            say(f"{requests.path} of {name}: which rate keeps 95 % within {options.p95_ms:g} ms?")
            load = Load(app, requests, listener.getsockname()[1])
            return await _search(load, options.p95_ms, say)
        finally:
            server.should_exit = server.force_exit = True
            await serving
            worker_client.stop()


async def _search(load: Load, limit_ms: float, say: Callable[[str], None]) -> Stage | None:
    generates = load.requests.serves in STEPPED
    most = load.app.settings.max_running if generates else max(CAPS)
    knobs = BatchLimits(min(4, most))
    await load(knobs, 0, 1.0)  # nothing is as slow as the first time
    first = await load(knobs, 0, 1.0)
    if first.failed:
        raise SettingsError(f"{first.failed} requests failed: is the input one that it takes?")
    seconds = max(LEAST_S, LIMITS * limit_ms / 1000, LEAST_REQUESTS / max(first.served, 0.1))
    search = Search(load, limit_ms, min(MOST_S, seconds), tell=lambda stage: say(line(stage)))
    if generates:
        search.caps, search.waits_ms = [most], [knobs.wait_ms]
    say(HEADER)
    if (found := await search.run()) is None:
        say(f"no rate keeps 95 % of the answers within {limit_ms:g} ms here")
        return None
    say(
        f"\n{found.rate:.1f} requests/s can be sustained: 95 % of their answers come within "
        f"{found.p95_ms:.1f} ms, of {limit_ms:g}. As settings:\n"
    )
    for each in settings(found, limit_ms, generates):
        say(each)
    return found


def line(stage: Stage) -> str:
    """Under HEADER; what is offered is empty where it was as fast as it can."""
    offered = f"{stage.rate:.1f}" if stage.rate else ""
    failed = f"  {stage.failed} failed" if stage.failed else ""
    return (
        f"{stage.knobs.cap:5d} {stage.knobs.wait_ms:8g} {offered:>10} {stage.served:10.1f}"
        f" {stage.p50_ms:9.1f} {stage.p95_ms:9.1f}{failed}"
    )


def settings(found: Stage, limit_ms: float, generates: bool) -> list[str]:
    """As lines of a .env file. What waits longer than the limit twice over is refused at once."""
    places = max(16, math.ceil(2 * found.rate * limit_ms / 1000))
    if generates:
        return [f"MAX_QUEUE_SIZE={places}"]
    cap, wait_ms = found.knobs.cap, found.knobs.wait_ms
    places = max(places, 2 * cap)  # one batch runs while the next fills
    return [f"MAX_BATCH_SIZE={cap}", f"MAX_BATCH_WAIT_MS={wait_ms:g}", f"MAX_QUEUE_SIZE={places}"]
