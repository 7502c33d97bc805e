"""Ray Serve: `serve run server.cluster:app`, with the settings in the environment.

    proxy → router: the replica of the session → replica: the app of app.py with its own worker

A replica is started once its models are loaded. It refuses what its queue does not take itself:
Ray's own limit of ongoing requests is above it. Replicas are added while more inputs are accepted
than all of them run at a time. Ray gives a request its id, and sends it with the response.
`/metrics` and `/debug/queue` of any replica are those of all.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from server.apis.openai.batches.runner import CapturedResponse
from server.core.settings import load_settings
from server.http.json import to_json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from server.core.worker_client import WorkerClient
    from server.http.request import Application

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# A client that finds the queue filled by others still gets its share of slots.
MAX_QUEUES = 8
MAX_REPLICAS = 8


EACH_REPLICA = "/metrics", "/debug/queue"
GATHER_S = 10.0  # for the responses of all replicas


def make_app() -> "ASGIApp":
    """Return the app of a replica's process."""
    app: Application = server.app.app
    app.sends_request_id = False
    app.logs_requests = True

    async def with_all_replicas(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or scope["path"] not in EACH_REPLICA:
            return await app(scope, receive, send)
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        call = handle.broadcast("respond", scope["path"], scope["method"], scope["headers"])
        results = await call.results_async(timeout_s=GATHER_S)
        _, start, body = max(results, key=lambda result: result[1]["status"])  # a refusal, if any
        if start["status"] == 200:
            bodies = {replica: part for replica, _, part in results}
            if scope["path"] == "/metrics":
                body = merge_metrics(bodies)
            else:
                parts = {replica: orjson.loads(part) for replica, part in bodies.items()}
                body = to_json({"replicas": parts})
        headers = [header for header in start["headers"] if header[0] != b"content-length"]
        await send(start | {"headers": headers})
        await send({"type": "http.response.body", "body": body})

    return with_all_replicas


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Return the series of replicas, each with the label `replica`."""
    families: dict[bytes, list[bytes]] = {}
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith(b"#"):
                family = families.setdefault(line, [])  # HELP, then TYPE, before the series
                continue
            name, brace, rest = line.partition(b"{")
            if not brace:
                name, _, rest = line.partition(b" ")
                rest = b"} " + rest
            family.append(b'%b{replica="%b",%b' % (name, replica.encode(), rest))
    lines = [line for head, series in families.items() for line in (head, *series)]
    return b"\n".join(lines).replace(b",}", b"}") + b"\n"


async def no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


class Replica:
    @property
    def worker_client(self) -> "WorkerClient":
        client: WorkerClient = server.app.app.worker_client
        return client

    async def respond(self, path: str, method: str, headers: Any) -> tuple[str, Any, bytes]:
        """Return this replica's id, and its response to a request without a body."""
        response = CapturedResponse()
        scope = {"type": "http", "path": path, "method": method, "headers": headers}
        scope |= {"query_string": b"", "client": None, "http_version": "1.1", "scheme": "http"}
        await server.app.app(scope, no_body, response)
        id = serve.get_replica_context().replica_id.unique_id
        return id, response.start, b"".join(response.parts)

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
