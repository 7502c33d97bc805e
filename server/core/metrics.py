"""Prometheus metrics, one registry per app: the instruments, used where something happens.

Requests and errors are counted in http/request.py. worker_client.py appends the worker's reports
to `reports`: they are recorded when /metrics is read, or when many have collected.
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

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)

MOST_REPORTS = 100


class Metrics:
    def __init__(self, queue_depth: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.reports: list[tuple[str, BatchReport | StepReport]] = []  # after the model's name
        ours: dict[str, Any] = {"namespace": "onequeue", "registry": self.registry}
        in_seconds, in_tokens = ours | {"buckets": SECONDS}, ours | {"buckets": TOKENS}
        self.requests = Counter("requests", "Requests answered", ["endpoint", "status"], **ours)
        self.latency = Histogram("request_seconds", "Request to answer", ["endpoint"], **in_seconds)
        Gauge("queue_depth", "Inputs accepted and unanswered", **ours).set_function(queue_depth)
        self._wait = Histogram("queue_wait_seconds", "Acceptance to forward", **in_seconds)
        self.errors = Counter("errors", "Requests not served, by kind", ["kind"], **ours)
        self.fetch_seconds = Histogram("image_fetch_seconds", "An image's link", **in_seconds)
        refused = "Responses that the store did not take"
        self.not_stored = Counter("responses_not_stored", refused, **ours)
        failing = "1 while the model keeps failing"
        self.breaker_open = Gauge("breaker_open", failing, ["serves"], **ours)
        libraries = ("torch", "transformers", "starlette", "uvicorn")
        versions = {name: importlib.metadata.version(name) for name in libraries}
        versions |= {"version": __version__, "python": platform.python_version()}
        Info("build", "Versions", **ours).info(versions)
        self.model = Info("model", "A loaded model", ["serves"], **ours)

        self._out_of_memory = Counter("out_of_memory", "Forwards that ran out of memory", **ours)
        self._cap = Gauge("batch_cap", "Rows a batch may have now", ["serves"], **ours)
        share = "Padding in the last batch, 0 to 1"
        self._padding = Gauge("padding_share", share, ["serves"], **ours)
        self._size = Histogram("batch_size", "Items a batch", **ours, buckets=SIZES)
        self._tokens = Histogram("batch_tokens", "Tokens a batch, unpadded", **in_tokens)
        self._forward = Histogram("forward_seconds", "A batch's forward", **in_seconds)

        tokens = Counter("tokens", "Tokens processed", ["kind"], **ours)
        self._step_s = Histogram("step_seconds", "A generation step", **in_seconds)
        self._step_tokens = Histogram("step_tokens", "Tokens run in a step", **in_tokens)
        self.first_token = Histogram("time_to_first_token_seconds", "To its text", **in_seconds)
        self._counted_of_step: dict[str, Callable[[float], None]] = {  # by a report's field
            "prefill_tokens": tokens.labels("prompt").inc,
            "cached_tokens": tokens.labels("cached").inc,
            "decode_tokens": tokens.labels("output").inc,
            "drafted": tokens.labels("drafted").inc,
            "accepted": tokens.labels("accepted").inc,
            "preempted": Counter("preemptions", "Sequences put back to make room", **ours).inc,
        }
        windows = "Windows of recordings being decoded", "Recordings that wait for a row"
        self.audio_s = Counter("transcribed_seconds", "Seconds of sound transcribed", **ours)
        self._of_windows = {
            "running": Gauge("running_windows", windows[0], **ours),
            "waiting": Gauge("waiting_recordings", windows[1], **ours),
        }
        self._last_steps: dict[str, StepReport] = {}  # whoever asks is told what they say
        gauges = {
            "running": Gauge("running_sequences", "Sequences being generated", **ours),
            "waiting": Gauge("waiting_sequences", "Sequences that wait for room", **ours),
            "blocks_used": Gauge("kv_blocks_used", "Key-value cache blocks in use", **ours),
            "blocks_total": Gauge("kv_blocks", "Blocks of the key-value cache", **ours),
        }
        for name, gauge in gauges.items():
            gauge.set_function(partial(self._of_last_step, name))

    def collect(self) -> Iterable[Metric]:
        """Called by the registry before the instruments: they have all that was reported."""
        reports, self.reports = self.reports, []
        for serves, report in reports:
            if isinstance(report, BatchReport):
                self._record_batch(serves, report)
            elif serves == "transcription":
                self._record_windows(report)
            else:
                self._record_step(serves, report)
        return ()

    def _record_batch(self, serves: str, report: BatchReport) -> None:
        if report.size:  # else all of them go on
            self._size.observe(report.size)
            self._tokens.observe(report.tokens)
        self._forward.observe(report.forward_s)
        self._out_of_memory.inc(report.out_of_memory)
        self._cap.labels(serves).set(report.cap)
        self._padding.labels(serves).set(report.padding)
        self._observe_waits(report)

    def _record_step(self, serves: str, report: StepReport) -> None:
        self._last_steps[serves] = report
        for name, count in self._counted_of_step.items():
            if more := getattr(report, name):  # in most steps most are 0
                count(more)
        self._observe_waits(report)
        if tokens := report.prefill_tokens + report.decode_tokens:
            self._step_tokens.observe(tokens)
            self._step_s.observe(report.total_s)

    def _record_windows(self, report: StepReport) -> None:
        for name, gauge in self._of_windows.items():
            gauge.set(getattr(report, name))
        self._observe_waits(report)

    def _observe_waits(self, report: BatchReport | StepReport) -> None:
        for wait_s in report.waits_s:
            self._wait.observe(wait_s)

    def _of_last_step(self, name: str) -> float:
        return float(sum(getattr(each, name) for each in self._last_steps.values()))

    def loaded(self, name: str, info: ModelInfo) -> None:
        self.breaker_open.labels(name).set(0)
        labels = ("task", "model", "device", "dtype", "batching")
        self.model.labels(name).info({each: getattr(info, each) for each in labels})


async def metrics(request: Request) -> Response:
    registry = request.app.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
