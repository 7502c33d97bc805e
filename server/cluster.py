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
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

import server.app
from batching.errors import WorkerDown
from server.core.settings import load_settings

if TYPE_CHECKING:
    from server.core.worker_client import WorkerClient
    from server.http.request import Application

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# A client that finds the queue filled by others still gets its share of slots.
MAX_QUEUES = 8
MAX_REPLICAS = 8
GATHER_S = 5.0  # for the responses of all replicas: less than Prometheus waits


LOCAL: dict[str, Callable[[Request], Awaitable[Any]]] = {}  # by path: of this replica alone


def merge_metrics(replicas: dict[str, Response]) -> Response:
    """Return the metrics of all replicas, with the label `replica`; each family is in one place."""
    families: dict[bytes, list[bytes]] = {}  # series by the lines above them, HELP and TYPE
    for id, response in replicas.items():
        label = b'replica="%b"' % id.encode()
        body = re.sub(rb"(?m)^([\w:]+)\{", rb"\1{%b," % label, bytes(response.body))
        body = re.sub(rb"(?m)^([\w:]+) ", rb"\1{%b} " % label, body)
        for line in body.strip().split(b"\n"):
            if line.startswith(b"#"):
                family = families.setdefault(line, [])
            else:
                family.append(line)
    lines = [line for head, family in families.items() for line in (head, *family)]
    return Response(b"\n".join(lines) + b"\n", media_type=CONTENT_TYPE_LATEST)


MERGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "/metrics": merge_metrics,
    "/debug/queue": lambda queues: {"replicas": queues},
}


async def respond_for_all(path: str, request: Request) -> object:
    await LOCAL[path](request)  # raises if it is refused
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    scope = {name: request.scope[name] for name in ("type", "headers", "context")}
    call = handle.broadcast("respond", path, scope)
    results = await call.results_async(timeout_s=GATHER_S, return_exceptions=True)
    return MERGE[path](dict(result for result in results if isinstance(result, tuple)))


def make_app() -> "Application":
    app: Application = server.app.app
    app.sends_request_id = False
    app.logs_requests = True
    for route in app.routes:
        if route.path in MERGE:
            endpoint: Any = route.endpoint
            LOCAL[route.path] = endpoint.respond
            endpoint.respond = partial(respond_for_all, route.path)
    return app


class Replica:
    @property
    def worker_client(self) -> "WorkerClient":
        client: WorkerClient = server.app.app.worker_client
        return client

    async def respond(self, path: str, scope: dict[str, Any]) -> tuple[str, object]:
        """Return the id of this replica, and its own response."""
        response = await LOCAL[path](Request(scope | {"app": server.app.app}))
        return serve.get_replica_context().replica_id.unique_id, response

    async def check_health(self) -> None:
        """Wait for the models at the start; raise if the worker is dead or stuck."""
        await asyncio.shield(self.worker_client.loaded)
        if self.worker_client.stuck or self.worker_client.failure:
            raise WorkerDown("the worker is down")

    def record_autoscaling_stats(self) -> dict[str, float]:
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
