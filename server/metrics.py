"""Prometheus metrics, one registry per app: turns the worker's reports into numbers."""

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from worker.protocol import BatchReport, ModelInfo, StepReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Told by engine.py what happens; `request` and `refused` are for the HTTP side."""

    def __init__(self, queue_depth: Callable[[], float], batch_cap: int) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        ours: dict[str, Any] = {"namespace": "onequeue", "registry": self.registry}
        in_seconds, in_tokens = ours | {"buckets": SECONDS}, ours | {"buckets": TOKENS}
        self.requests = Counter("requests", "Requests answered", ["endpoint", "status"], **ours)
        self.latency = Histogram("request_seconds", "Request to answer", ["endpoint"], **in_seconds)
        Gauge("queue_depth", "Inputs accepted and unanswered", **ours).set_function(queue_depth)
        self.wait = Histogram("queue_wait_seconds", "Acceptance to forward", **in_seconds)
        self.batch_size = Histogram("batch_size", "Items a batch", **ours, buckets=SIZES)
        self.batch_tokens = Histogram("batch_tokens", "Tokens a batch, unpadded", **in_tokens)
        self.padding = Gauge("padding_share", "Padding in the last batch, 0 to 1", **ours)
        self.forward = Histogram("forward_seconds", "Forward pass of a batch", **in_seconds)
        self.errors = Counter("errors", "Requests not served, by kind", ["kind"], **ours)
        self.out_of_memory = Counter("out_of_memory", "Forwards that ran out of memory", **ours)
        self.cap = Gauge("batch_cap", "Rows a batch may have now", **ours)
        self.cap.set(batch_cap)
        refused = "Responses that the store did not take"
        self.not_stored = Counter("responses_not_stored", refused, **ours)
        failing = "1 while the model keeps failing"
        self.breaker_open = Gauge("breaker_open", failing, ["serves"], **ours)
        libraries = ("torch", "transformers", "starlette", "uvicorn")
        versions = {name: importlib.metadata.version(name) for name in libraries}
        versions |= {"version": __version__, "python": platform.python_version()}
        Info("build", "Versions", **ours).info(versions)
        self.model = Info("model", "A loaded model", ["serves"], **ours)
        # of generation
        self.tokens = Counter("tokens", "Tokens processed", ["kind"], **ours)
        self.running = Gauge("running_sequences", "Sequences being generated", **ours)
        self.waiting = Gauge("waiting_sequences", "Sequences that wait for room", **ours)
        self.blocks = Gauge("kv_blocks_used", "Blocks of the key-value cache in use", **ours)
        self.blocks_total = Gauge("kv_blocks", "Blocks of the key-value cache", **ours)
        self.preempted = Counter("preemptions", "Sequences put back to make room", **ours)
        self.step_s = Histogram("step_seconds", "A generation step", **in_seconds)
        self.step_tokens = Histogram("step_tokens", "Tokens run in a step", **in_tokens)
        self.first_token = Histogram("time_to_first_token_seconds", "To its text", **in_seconds)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        children = self._children.get((endpoint, status))
        if children is None:  # labels() takes longer than counting
            children = self.requests.labels(endpoint, str(status)), self.latency.labels(endpoint)
            self._children[endpoint, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def refused(self, status: int) -> None:
        """A request that never got as far as to be one."""
        self.requests.labels("other", str(status)).inc()

    def batch(self, report: BatchReport) -> None:
        self.batch_size.observe(report.size)
        self.batch_tokens.observe(report.tokens)
        self.forward.observe(report.forward_s)
        self.padding.set(report.padded_tokens / (report.tokens + report.padded_tokens or 1))
        self.cap.set(report.cap)
        self.out_of_memory.inc(report.out_of_memory)
        for wait_s in report.waits_s:
            self.wait.observe(wait_s)

    def step(self, report: StepReport) -> None:
        self.running.set(report.running)
        self.waiting.set(report.waiting)
        self.blocks.set(report.blocks_used)
        self.blocks_total.set(report.blocks_total)
        self.preempted.inc(report.preempted)
        for kind, count in (
            ("prompt", report.prefill_tokens),
            ("cached", report.cached_tokens),
            ("output", report.decode_tokens),
            ("drafted", report.drafted),
            ("accepted", report.accepted),
        ):
            if count:
                self.tokens.labels(kind).inc(count)
        if report.prefill_tokens or report.decode_tokens:
            self.step_s.observe(report.total_s)
            self.step_tokens.observe(report.prefill_tokens + report.decode_tokens)
        for wait_s in report.waits_s:
            self.wait.observe(wait_s)

    def failed(self, kind: str) -> None:
        self.errors.labels(kind).inc()

    def breaker(self, name: str, is_open: bool) -> None:
        self.breaker_open.labels(name).set(is_open)

    def loaded(self, name: str, info: ModelInfo) -> None:
        self.breaker(name, is_open=False)
        labels = ("task", "model", "device", "dtype", "batching")
        self.model.labels(name).info({each: getattr(info, each) for each in labels})


async def metrics(request: Request) -> Response:
    registry = request.app.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
