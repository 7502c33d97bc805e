"""`GET /health`: is the process worth keeping. `GET /ready`: should it get traffic.

It should as long as one of its models answers; those that keep failing are named.
"""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.engine import Engine
from server.http.errors import envelope
from worker.protocol import Served

SERVED: tuple[Served, ...] = ("pipeline", "generation")


async def health(request: Request) -> Response:
    engine: Engine = request.app.engine
    if engine.worker.state == "dead":
        return _no("the worker is dead", "worker_down")
    if engine.stuck:
        long = f"a forward has been running for over {engine.stuck_after_s:g} s"
        return _no(long, "worker_stuck")
    return _json({"status": "ok"})


async def ready(request: Request) -> Response:
    engine: Engine = request.app.engine
    if engine.failure is not None:
        return _no(str(engine.failure), "worker_down")
    if (down := engine.down()) is not None:
        return _no(str(down), "not_ready")
    models = engine.worker.models
    refused = {served: engine.refusal(served) for served in SERVED if models.of(served) is not None}
    if all(refused.values()):
        return _no("the models keep failing; they are tried again shortly", "not_ready")
    content: dict[str, object] = {
        "status": "ready",
        "compile": models.generator.compile_state if models.generator else "off",
    }
    if models.pipeline:
        content |= {"task": models.pipeline.info.task, "model": models.pipeline.info.model}
    if models.generator:
        content["chat_model"] = models.generator.info.model
    if failing := [served for served, refusal in refused.items() if refusal]:
        content["failing"] = failing
    return _json(content)


def _json(content: dict[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _no(message: str, code: str) -> Response:
    return envelope(503, message, "unavailable_error", code, None, {"Retry-After": "5"})
