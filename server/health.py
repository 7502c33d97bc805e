"""`GET /health`: is the process worth keeping. `GET /ready`: should it get traffic.

It should as long as one of its models answers; those that keep failing are named.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from server.engine import Engine
from server.http.errors import HttpError
from worker.protocol import Served

SERVED: tuple[Served, ...] = ("pipeline", "generation")


class Health(Struct):
    status: Literal["ok"]


class Ready(Struct):
    status: Literal["ready"]
    compile: Literal["running", "done", "off"]
    task: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    chat_model: str | UnsetType = UNSET
    failing: list[Served] | UnsetType = UNSET


async def health(request: Request) -> Health:
    engine: Engine = request.app.engine
    if engine.worker.state == "dead":
        raise unavailable("the worker is dead", "worker_down")
    if engine.stuck:
        long = f"a forward has been running for over {engine.stuck_after_s:g} s"
        raise unavailable(long, "worker_stuck")
    return Health("ok")


async def ready(request: Request) -> Ready:
    engine: Engine = request.app.engine
    if engine.failure is not None:
        raise unavailable(str(engine.failure), "worker_down")
    if (down := engine.down()) is not None:
        raise unavailable(str(down))
    models = engine.worker.models
    served = [each for each in SERVED if models.of(each) is not None]
    failing = [each for each in served if engine.refusal(each)]
    if failing == served:
        raise unavailable("the models keep failing; they are tried again shortly")
    pipeline, generator = models.pipeline, models.generator
    return Ready(
        "ready",
        generator.compile_state if generator else "off",
        task=pipeline.info.task if pipeline else UNSET,
        model=pipeline.info.model if pipeline else UNSET,
        chat_model=generator.info.model if generator else UNSET,
        failing=failing or UNSET,
    )


def unavailable(message: str, code: str = "not_ready") -> HttpError:
    """What a probe is told; no request has failed by it."""
    return HttpError(503, message, headers=[(b"retry-after", b"5")], code=code, kind="")
