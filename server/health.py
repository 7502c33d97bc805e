"""`GET /health`: is the process worth keeping. `GET /ready`: should it get traffic."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.errors import envelope
from worker.engine import Engine


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
    if (refusal := engine.refusal()) is not None:
        return _no(str(refusal), "not_ready")
    pipeline, generator = engine.worker.models.pipeline, engine.worker.models.generator
    content = {"status": "ready", "compile": generator.compile_state if generator else "off"}
    if pipeline:
        content |= {"task": pipeline.info.task, "model": pipeline.info.model}
    if generator:
        content["chat_model"] = generator.info.model
    return _json(content)


def _json(content: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _no(message: str, code: str) -> Response:
    return envelope(503, message, "unavailable_error", code, None, {"Retry-After": "5"})
