"""`GET /health`: is the process worth keeping. `GET /ready`: should it get traffic.

It should as long as one of its models answers; those that keep failing are named.
"""

from collections.abc import Callable
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from server.engine import Engine
from server.http.errors import HttpError
from server.http.json import send_json
from worker.protocol import Served

SERVED: tuple[Served, ...] = ("pipeline", "generation")


class Health(Struct):
    status: Literal["ok"] = "ok"


class Ready(Struct, kw_only=True):
    status: Literal["ready"] = "ready"
    compile: Literal["running", "done", "off"]
    task: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    chat_model: str | UnsetType = UNSET
    failing: list[Served] | UnsetType = UNSET


class Probe:
    """An endpoint: 200 with what `look` finds, or the HttpError that it raises.

    Metrics count no error for it: nothing was asked of a model."""

    def __init__(self, look: Callable[[Engine], Health | Ready], engine: Engine) -> None:
        self.look = look
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = self.look(self.engine)
        except HttpError as error:
            await error.send(send)
        else:
            await send_json(send, found)


def health(engine: Engine) -> Health:
    if engine.worker.state == "dead":
        raise unavailable("the worker is dead", "worker_down")
    if engine.stuck:
        long = f"a forward has been running for over {engine.stuck_after_s:g} s"
        raise unavailable(long, "worker_stuck")
    return Health()


def ready(engine: Engine) -> Ready:
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
        compile=generator.compile_state if generator else "off",
        task=pipeline.info.task if pipeline else UNSET,
        model=pipeline.info.model if pipeline else UNSET,
        chat_model=generator.info.model if generator else UNSET,
        failing=failing or UNSET,
    )


def unavailable(message: str, code: str = "not_ready") -> HttpError:
    return HttpError(503, message, headers=[(b"retry-after", b"5")], code=code)
