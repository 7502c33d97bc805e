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
from worker.models import GenerationModel, PipelineModel


class Health(Struct):
    status: Literal["ok"] = "ok"


class Ready(Struct, kw_only=True):
    status: Literal["ready"] = "ready"
    compile: Literal["running", "done", "off"]
    task: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    chat_model: str | UnsetType = UNSET
    failing: list[str] | UnsetType = UNSET


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
    failing = [name for name in engine.models if engine.refusal(name)]
    if len(failing) == len(engine.models):
        raise unavailable("the models keep failing; they are tried again shortly")
    answer = Ready(compile="off", failing=failing or UNSET)
    for model in engine.models.values():
        if isinstance(model, GenerationModel):
            answer.chat_model = model.loaded.info.model
            answer.compile = model.loaded.compile_state
        elif isinstance(model, PipelineModel):
            answer.task, answer.model = model.loaded.info.task, model.loaded.info.model
    return answer


def unavailable(message: str, code: str = "not_ready") -> HttpError:
    return HttpError(503, message, headers=[(b"retry-after", b"5")], code=code)
