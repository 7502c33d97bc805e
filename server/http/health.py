"""`GET /health`: is the process worth keeping. `GET /ready`, or `/ping`: should it get traffic.
`GET /version`: which server this is.

It should as long as one of its models answers; those that keep failing are named.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from server import __version__
from server.core.worker_client import WorkerClient
from server.http.errors import HttpError
from worker.tasks import TASKS, Kind


class Health(Struct):
    status: Literal["ok"]


class Ready(Struct):
    status: Literal["ready"]
    compile: Literal["running", "done", "off"]
    task: str | UnsetType = UNSET
    takes: Kind | UnsetType = UNSET  # what the pipeline's input is
    mask_token: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    chat_model: str | UnsetType = UNSET
    embedding_model: str | UnsetType = UNSET
    rerank_model: str | UnsetType = UNSET
    transcription_model: str | UnsetType = UNSET
    failing: list[str] | UnsetType = UNSET


class Version(Struct):
    version: str


async def version(request: Request) -> Version:
    return Version(__version__)


async def health(request: Request) -> Health:
    worker_client: WorkerClient = request.app.worker_client
    if worker_client.worker.state == "dead":
        raise unavailable("the worker is dead", "worker_down")
    if worker_client.stuck:
        long = f"a forward has been running for over {worker_client.stuck_after_s:g} s"
        raise unavailable(long, "worker_stuck")
    return Health("ok")


async def ready(request: Request) -> Ready:
    worker_client: WorkerClient = request.app.worker_client
    if worker_client.failure is not None:
        raise unavailable(str(worker_client.failure), "worker_down")
    if (down := worker_client.refusal()) is not None:
        raise unavailable(str(down))
    failing = [name for name in worker_client.models if worker_client.refusal(name)]
    if len(failing) == len(worker_client.models):
        raise unavailable("the models keep failing; they are tried again shortly")
    answer = Ready("ready", "off", failing=failing or UNSET)
    for name, model in worker_client.models.items():
        info, generates = model.engine.info, model.generator is not None
        if model.generator:
            answer.compile = model.generator.compile_state
        if name == "pipeline":
            answer.task, answer.model = "decision" if generates else info.task, info.model
            answer.takes, answer.mask_token = TASKS[answer.task].kind, info.mask or UNSET
        else:
            setattr(answer, "chat_model" if generates else f"{name}_model", info.model)
    return answer


def unavailable(message: str, code: str = "not_ready") -> HttpError:
    """What a probe is told; no request has failed by it."""
    return HttpError(503, message, headers=[(b"retry-after", b"5")], code=code, kind="")
