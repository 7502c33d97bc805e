"""`GET /health`: is the process worth keeping. `GET /ready`: should it get traffic."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.errors import envelope
from worker.engine import Engine


async def health(request: Request) -> Response:
    engine: Engine = request.app.engine
    if engine.dead:
        return _no("the worker is dead", "worker_down")
    if engine.stuck:
        return _no(
            f"a forward has been running for over {engine.stuck_after_s:g} s", "worker_stuck"
        )
    return _json({"status": "ok"})


async def ready(request: Request) -> Response:
    engine: Engine = request.app.engine
    info = engine.worker.runner.info if engine.worker.runner else None
    if engine.failure is not None:
        return _no(str(engine.failure), "worker_down")
    if engine.queue.closed is not None:
        return _no(str(engine.queue.closed), "not_ready")
    assert info is not None
    return _json({"status": "ready", "task": info.task, "model": info.model, "compile": "off"})


def _json(content: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _no(message: str, code: str) -> Response:
    return envelope(503, message, "unavailable_error", code, None, {"Retry-After": "5"})
