"""Ray Serve: `serve run server.cluster:app`, with the settings in the environment.

    proxy → router: the replica of the session → replica: the app of app.py with its own worker

A replica is started once its models are loaded. It refuses what its queue does not take itself:
Ray's own limit of ongoing requests is above it. Replicas are added while more inputs are accepted
than all of them run at a time. Ray gives a request its id, and sends it with the response.
`GET /metrics` and `GET /debug/queue` reach one replica, which asks all of them.
"""

import asyncio
import math
import re
from typing import TYPE_CHECKING, NamedTuple

import orjson
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.schema import LoggingConfig

import server.app
from batching.errors import WorkerDown
from server.core.settings import load_settings
from server.http.json import to_json
from server.http.paths import route_path

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from server.core.worker_client import WorkerClient
    from server.http.request import Application

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# A client that finds the queue filled by others still gets its share of slots.
MAX_QUEUES = 8
MAX_REPLICAS = 8
GATHER_S = 5.0  # for the responses of all replicas: less than Prometheus waits


class ReplicaResponse(NamedTuple):
    id: str  # Ray's, of the replica
    start: "Message"
    body: bytes


def merge_metrics(responses: list[ReplicaResponse]) -> bytes:
    """Return the metrics of all replicas, with the label `replica`; each family is in one place."""
    families: dict[bytes, list[bytes]] = {}  # series by the lines above them, HELP and TYPE
    for id, _, body in responses:
        label = b'replica="%b"' % id.encode()
        body = re.sub(rb"(?m)^([\w:]+)\{", rb"\1{%b," % label, body)
        body = re.sub(rb"(?m)^([\w:]+) ", rb"\1{%b} " % label, body)
        for line in body.strip().split(b"\n"):
            if line.startswith(b"#"):
                family = families.setdefault(line, [])
            else:
                family.append(line)
    lines = [line for head, family in families.items() for line in (head, *family)]
    return b"\n".join(lines) + b"\n"


def merge_queues(responses: list[ReplicaResponse]) -> bytes:
    """Return the queues of all replicas as one. Each request has the id of its `replica`."""
    queues = {id: orjson.loads(body) for id, _, body in responses}
    totals = {name: sum(queue[name] for queue in queues.values()) for name in ("inputs", "slots")}
    requests = [request | {"replica": id} for id in queues for request in queues[id]["requests"]]
    requests.sort(key=lambda request: -request["age_s"])
    return to_json(totals | {"requests": requests})


MERGE = {"/metrics": merge_metrics, "/debug/queue": merge_queues}


async def respond_for_all(scope: "Scope", receive: "Receive", send: "Send") -> None:
    """The app of a replica: `GET` of a path in MERGE is the response of all replicas."""
    path = route_path(scope) if scope["type"] == "http" else ""
    if path not in MERGE or scope["method"] != "GET":
        await server.app.app(scope, receive, send)
        return
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    call = handle.broadcast("respond", scope)
    results = await call.results_async(timeout_s=GATHER_S, return_exceptions=True)
    responses = [result for result in results if isinstance(result, ReplicaResponse)]  # or has died
    _, start, body = max(responses, key=lambda response: response.start["status"])
    if start["status"] == 200:  # no replica refuses
        body = MERGE[path](responses)
    headers = [header for header in start["headers"] if header[0] != b"content-length"]
    await send(start | {"headers": headers})
    await send({"type": "http.response.body", "body": body})


def make_app() -> "ASGIApp":
    """Return the app of a replica's process."""
    app: Application = server.app.app
    app.sends_request_id = False
    app.logs_requests = True
    return respond_for_all


class Replica:
    @property
    def worker_client(self) -> "WorkerClient":
        client: WorkerClient = server.app.app.worker_client
        return client

    async def respond(self, scope: "Scope") -> ReplicaResponse:
        """Respond to a request without a body, for this replica alone."""
        messages: list[Message] = []

        async def receive() -> "Message":
            return {"type": "http.request"}

        async def send(message: "Message") -> None:
            messages.append(message)

        await server.app.app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        id = serve.get_replica_context().replica_id.unique_id
        return ReplicaResponse(id, messages[0], body)

    async def check_health(self) -> None:
        """Wait for the models at the start; raise if the worker is dead or stuck."""
        await asyncio.shield(self.worker_client.loaded)
        if self.worker_client.stuck or self.worker_client.worker.state == "dead":
            raise WorkerDown("the worker is down")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what choose_replicas reads."""
        return {"inputs": self.worker_client.queue.pending}


def choose_replicas(context: AutoscalingContext) -> tuple[int, dict[str, object]]:
    """Return how many replicas run all accepted inputs side by side. Ray applies its bounds."""
    inputs = sum(context.aggregated_metrics.get("inputs", {}).values())
    return math.ceil(inputs / context.config.target_ongoing_requests), {}


settings = load_settings()
autoscaling = AutoscalingConfig(
    min_replicas=1,
    max_replicas=MAX_REPLICAS,
    target_ongoing_requests=settings.max_running,
    policy=AutoscalingPolicy(policy_function=choose_replicas),
)
deployment = serve.deployment(
    serve.ingress(make_app)(Replica),
    max_ongoing_requests=MAX_QUEUES * settings.max_queue_size,
    autoscaling_config=autoscaling,
    graceful_shutdown_timeout_s=settings.shutdown_grace_s + 5,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    logging_config=LoggingConfig(enable_access_log=False),  # the app has its own
)
app = deployment.bind()
