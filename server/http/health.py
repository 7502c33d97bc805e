"""`GET /health`, whether the process works; `GET /ready` or `/ping`, whether it should get traffic;
`GET /version`.

The server is ready while at least one of its models serves; the response names failing ones.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from batching.errors import NotReady
from server import __version__
from server.core.worker_client import WorkerClient
from server.http.errors import HttpError
from server.http.operation import Operation
from worker.messages.protocol import Fallback
from worker.tasks import TASKS, Kind


class Health(Struct):
    status: Literal["ok"]


class Ready(Struct):
    status: Literal["ready"]
    compile: Literal["running", "done", "off"]
    task: str | UnsetType = UNSET
    takes: Kind | UnsetType = UNSET  # kind of the pipeline's input
    mask_token: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    chat_model: str | UnsetType = UNSET
    embedding_model: str | UnsetType = UNSET
    rerank_model: str | UnsetType = UNSET
    transcription_model: str | UnsetType = UNSET
    failing: list[str] | UnsetType = UNSET
    # By model: the checks that failed at load, and the build or compilation that still runs.
    fallbacks: dict[str, list[Fallback]] | UnsetType = UNSET
    stages: dict[str, str] | UnsetType = UNSET


class Version(Struct):
    version: str


@Operation("GET /version", "The version of the server", Version)
async def version(request: Request) -> Version:
    return Version(__version__)


@Operation("GET /health", "Liveness", Health, errors=[503])
async def health(request: Request) -> Health:
    worker_client: WorkerClient = request.app.worker_client
    if worker_client.failure:
        raise unavailable("the worker is dead", "worker_down")
    if worker_client.stuck:
        message = f"a forward pass has been running for over {worker_client.stuck_after_s:g} s"
        raise unavailable(message, "worker_stuck")
    return Health("ok")


@Operation("GET /ready", "Readiness", Ready, errors=[503])
@Operation("GET /ping", "Readiness, the same as /ready", Ready, errors=[503])
async def ready(request: Request) -> Ready:
    worker_client: WorkerClient = request.app.worker_client
    if worker_client.failure is not None:
        # the reason may name folders, and no key is needed here
        raise unavailable("the worker is down: the server's log has the reason", "worker_down")
    if worker_client.terminating:
        raise unavailable("the server is stopping")
    refusal = worker_client.refusal()
    if refusal is not None and not isinstance(refusal, NotReady):
        raise unavailable(str(refusal))
    if not worker_client.worker.started:
        models = worker_client.models.values()
        waiting = [model for model in models if model.at_start and model.state != "ready"]
        states = (f"the {m.kind} model {m.title!r} is {m.state} ({m.progress})" for m in waiting)
        raise unavailable(", ".join(states))
    failing = [name for name in worker_client.models if worker_client.refusal(name)]
    if len(failing) == len(worker_client.models):
        raise unavailable("all models keep failing; they are tried again shortly")
    fallbacks = {n: [*m.fallbacks] for n, m in worker_client.models.items() if m.fallbacks}
    response = Ready("ready", "off", failing=failing or UNSET, fallbacks=fallbacks or UNSET)
    response.stages = {n: m.stage for n, m in worker_client.models.items() if m.stage} or UNSET
    for name, model in worker_client.models.items():
        if model.kind != name or (info := model.info) is None:
            continue
        if model.has_cache:
            response.compile = model.compile_state
        if name == "pipeline":
            response.task = "decision" if model.generates else info.task
            response.model = info.model
            response.takes, response.mask_token = TASKS[response.task].kind, info.mask or UNSET
        else:
            setattr(response, "chat_model" if model.generates else f"{name}_model", info.model)
    return response


def unavailable(message: str, code: str = "not_ready") -> HttpError:
    """Return the 503 of a probe, which is not counted as an error."""
    return HttpError(503, message, headers=[(b"retry-after", b"5")], code=code, kind="")
