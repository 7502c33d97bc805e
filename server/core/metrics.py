"""Prometheus metrics: one registry per app, and the instruments that other modules use.

http/request.py counts requests and errors. worker_client.py appends the worker's reports to
`Metrics.reports`; they are recorded when /metrics is read, or when MAX_REPORTS are waiting.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from worker.messages.protocol import BatchReport, ModelInfo, StepReport

# Buckets of histograms.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)

MAX_REPORTS = 100


async def metrics(request: Request) -> Response:
    """`GET /metrics`."""
    registry = request.app.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    def __init__(self, queue_depth: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.reports: list[tuple[str, BatchReport | StepReport]] = []  # with the model's name
        common: dict[str, Any] = {"namespace": "onequeue", "registry": self.registry}
        in_seconds, in_tokens = common | {"buckets": SECONDS}, common | {"buckets": TOKENS}
        self.requests = Counter("requests", "Responses sent", ["endpoint", "status"], **common)
        latency = "Time from a request to the end of its response"
        self.latency = Histogram("request_seconds", latency, ["endpoint"], **in_seconds)
        depth = "Inputs accepted and not answered"
        Gauge("queue_depth", depth, **common).set_function(queue_depth)
        wait = "Time from acceptance to the first forward pass"
        self._wait = Histogram("queue_wait_seconds", wait, **in_seconds)
        self.errors = Counter("errors", "Failed requests, by kind", ["kind"], **common)
        fetch = "Time to fetch an image from its URL"
        self.fetch_seconds = Histogram("image_fetch_seconds", fetch, **in_seconds)
        not_stored = "Responses that could not be stored"
        self.not_stored = Counter("responses_not_stored", not_stored, **common)
        is_open = "1 while the model's circuit breaker is open"
        self.breaker_open = Gauge("breaker_open", is_open, ["serves"], **common)
        libraries = ("torch", "transformers", "starlette", "uvicorn")
        versions = {name: importlib.metadata.version(name) for name in libraries}
        versions |= {"version": __version__, "python": platform.python_version()}
        Info("build", "Versions", **common).info(versions)
        self.model = Info("model", "A loaded model", ["serves"], **common)

        out_of_memory = "Forward passes that ran out of memory"
        self._out_of_memory = Counter("out_of_memory", out_of_memory, **common)
        self._cap = Gauge("batch_cap", "Current maximum of rows in a batch", ["serves"], **common)
        padding = "Share of padding in the last batch, 0 to 1"
        self._padding = Gauge("padding_share", padding, ["serves"], **common)
        self._size = Histogram("batch_size", "Items in a batch", **common, buckets=SIZES)
        self._tokens = Histogram("batch_tokens", "Tokens in a batch, without padding", **in_tokens)
        self._forward = Histogram("forward_seconds", "Forward pass of a batch", **in_seconds)

        tokens = Counter("tokens", "Tokens processed, by kind", ["kind"], **common)
        self._step_s = Histogram("step_seconds", "Duration of a generation step", **in_seconds)
        self._step_tokens = Histogram("step_tokens", "Tokens in a generation step", **in_tokens)
        first_token = "Time from acceptance to the first text"
        self.first_token = Histogram("time_to_first_token_seconds", first_token, **in_seconds)
        preempted = "Sequences preempted because the key-value cache was full"
        self._step_counters: dict[str, Callable[[float], None]] = {  # by the report's field
            "prefill_tokens": tokens.labels("prompt").inc,
            "cached_tokens": tokens.labels("cached").inc,
            "decode_tokens": tokens.labels("output").inc,
            "drafted": tokens.labels("drafted").inc,
            "accepted": tokens.labels("accepted").inc,
            "preempted": Counter("preemptions", preempted, **common).inc,
        }
        self.audio_s = Counter("transcribed_seconds", "Seconds of audio transcribed", **common)
        windows, waiting = "Audio windows being decoded", "Recordings that wait for a row"
        self._window_gauges = {
            "running": Gauge("running_windows", windows, **common),
            "waiting": Gauge("waiting_recordings", waiting, **common),
        }
        self._last_steps: dict[str, StepReport] = {}  # by model; the gauges read them
        gauges = {
            "running": Gauge("running_sequences", "Sequences being generated", **common),
            "waiting": Gauge("waiting_sequences", "Sequences waiting to be scheduled", **common),
            "blocks_used": Gauge("kv_blocks_used", "Key-value cache blocks in use", **common),
            "blocks_total": Gauge("kv_blocks", "Blocks of the key-value cache", **common),
        }
        for name, gauge in gauges.items():
            gauge.set_function(partial(self._sum_of_last_steps, name))

    def collect(self) -> Iterable[Metric]:
        """Record the waiting reports. The registry calls this before it reads the instruments."""
        reports, self.reports = self.reports, []
        for serves, report in reports:
            if isinstance(report, BatchReport):
                self._record_batch(serves, report)
            elif serves.startswith("transcription"):
                self._record_windows(report)
            else:
                self._record_step(serves, report)
        return ()

    def _record_batch(self, serves: str, report: BatchReport) -> None:
        if report.size:  # 0 if no item of the batch is finished
            self._size.observe(report.size)
            self._tokens.observe(report.tokens)
        self._forward.observe(report.forward_s)
        self._out_of_memory.inc(report.out_of_memory)
        self._cap.labels(serves).set(report.cap)
        self._padding.labels(serves).set(report.padding)
        self._observe_waits(report)

    def _record_step(self, serves: str, report: StepReport) -> None:
        self._last_steps[serves] = report
        for name, count in self._step_counters.items():
            if more := getattr(report, name):  # most are 0 in most steps
                count(more)
        self._observe_waits(report)
        if tokens := report.prefill_tokens + report.decode_tokens:
            self._step_tokens.observe(tokens)
            self._step_s.observe(report.total_s)

    def _record_windows(self, report: StepReport) -> None:
        for name, gauge in self._window_gauges.items():
            gauge.set(getattr(report, name))
        self._observe_waits(report)

    def _observe_waits(self, report: BatchReport | StepReport) -> None:
        for wait_s in report.waits_s:
            self._wait.observe(wait_s)

    def _sum_of_last_steps(self, field: str) -> float:
        return float(sum(getattr(report, field) for report in self._last_steps.values()))

    def on_loaded(self, name: str, info: ModelInfo) -> None:
        self.breaker_open.labels(name).set(0)
        labels = ("task", "model", "device", "dtype", "batching")
        self.model.labels(name).info({label: getattr(info, label) for label in labels})
