"""`GET /debug/queue`: what waits and runs, without contents; `GET /load`: how much; `POST /reset`.

A key is shown its own, an admin key all. Without keys they are there with MODEL_CONTROL=1."""

import math
import time
from itertools import islice
from typing import Literal, cast

from msgspec import Struct
from starlette.requests import Request

from batching.fair_share import WorkOwner
from batching.request_queue import WorkItem
from server.core.delta_stream import DeltaStream, TokenStream
from server.core.request_context import RequestContext
from server.http.access import check_admin
from server.http.errors import HttpError
from server.http.health import Health
from server.http.operation import JSON, Operation

MAX_REQUESTS = 1000


class QueuedRequest(Struct):
    id: str
    key: str  # its name
    priority: str  # its class
    model: str  # its served name
    state: Literal["waiting", "running"]
    age_s: float  # since it was accepted
    time_left_s: float | None  # until the response must begin; null where it has, or has no limit
    inputs: int  # not answered yet
    running_inputs: int
    output_tokens: int  # so far


class DebugQueue(Struct):
    inputs: int  # accepted and not answered
    slots: int
    requests: list[QueuedRequest]  # the oldest MAX_REQUESTS


@Operation("GET /load", "The number of inputs that wait and run", {JSON: {"type": "object"}})
async def load(request: Request) -> dict[str, int]:
    return {"server_load": request.app.worker_client.queue.pending}


@Operation("POST /reset_prefix_cache", "Drop the unused cached prefixes", Health, errors=[403, 503])
@Operation("POST /reset", "Drop the unused cached prefixes", Health, errors=[403, 503])
async def reset_prefix_cache(request: Request) -> Health:
    check_admin(request.scope)
    if (refusal := request.app.worker_client.refusal()) is not None:
        raise refusal
    request.app.worker_client.worker.reset_prefix_caches()
    return Health("ok")


@Operation("GET /debug/queue", "The requests that wait and run", DebugQueue)
async def debug_queue(request: Request) -> DebugQueue:
    app, queue, key = request.app, request.app.worker_client.queue, request.scope["context"].key
    if not app.keyring.required:
        if not (app.keyring.has_admins or app.settings.model_control):
            raise HttpError(404, "the queue is shown with API keys, or with MODEL_CONTROL=1")
        check_admin(request.scope)
    shows_all = key.admin or not app.keyring.required
    items = [item for item in queue.items if shows_all or item.owner.client == key.id]
    models = {model.name: model.served_name for model in app.worker_client.models.values()}
    by_owner: dict[WorkOwner, list[WorkItem]] = {}  # the items of a stream arrive over time
    for item in sorted(items, key=lambda item: item.accepted_at):
        by_owner.setdefault(item.owner, []).append(item)
    requests = [describe(items, models) for items in islice(by_owner.values(), MAX_REQUESTS)]
    return DebugQueue(len(items), queue.capacity, requests)


def describe(items: list[WorkItem], models: dict[str, str]) -> QueuedRequest:
    first, now = items[0], time.monotonic()
    context = cast(RequestContext, first.owner)
    running = sum(item.started_at > 0 for item in items)
    stream, left_s = first.stream, first.deadline - now
    has_started = isinstance(stream, DeltaStream) and stream.started
    return QueuedRequest(
        id=context.request_id,
        key=context.key.name,
        priority=context.priority.name.lower(),
        model=models[first.model],
        state="running" if running or has_started else "waiting",
        age_s=round(now - first.accepted_at, 3),
        time_left_s=None if has_started or left_s == math.inf else round(left_s, 3),
        inputs=len(items),
        running_inputs=running,
        output_tokens=stream.usage.completion if isinstance(stream, TokenStream) else 0,
    )
