"""Prometheus metrics: one registry per app, and the instruments that other modules use.

http/request.py counts requests and errors. worker_client.py appends the worker's reports to
`Metrics.reports`; they are recorded when /metrics is read, or when MAX_REPORTS are waiting. The
label `model` is a served name. Routers read the `vllm:` gauges, sums over all models, to choose a
server (Gateway API Inference Extension's model server protocol).
"""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from worker.messages.protocol import BatchReport, ModelInfo, StepReport
from worker.registry import ServedModel

# Buckets of histograms.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    *(120, 300, 600, 1800),
)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)

MAX_REPORTS = 100
TOKEN_KINDS = {  # the label, by the report's field
    "prefill_tokens": "prompt",
    "cached_tokens": "cached",
    "decode_tokens": "output",
    "drafted": "drafted",
    "accepted": "accepted",
}


async def metrics(request: Request) -> Response:
    """`GET /metrics`."""
    request.app.metrics.describe_adapters()
    request.app.metrics.describe_fallbacks(request.app.worker_client.models)
    exposed = WithoutCreated(request.app.metrics.registry)
    return Response(generate_latest(exposed), media_type=CONTENT_TYPE_LATEST)


class WithoutCreated(Collector):
    """A registry without the `_created` series, which `disable_created_metrics` would also remove
    from a host's own registries."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self.registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class Metrics:
    """`queue_depth`, `waiting`: read when /metrics is."""

    def __init__(
        self, queue_depth: Callable[[], float], waiting: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._served_names: dict[str, str] = {}  # by the name in the registry of models
        self._observers: list[Callable[[str, BatchReport | StepReport], None]] = []
        self.max_reports = MAX_REPORTS
        self.reports: list[tuple[str, BatchReport | StepReport]] = []  # with the model's name
        common: dict[str, Any] = {"namespace": "onequeue", "registry": self.registry}
        in_seconds, in_tokens = common | {"buckets": SECONDS}, common | {"buckets": TOKENS}
        self.requests = Counter("requests", "Responses sent", ["endpoint", "status"], **common)
        latency = "Time from a request to the end of its response"
        self.latency = Histogram("request_seconds", latency, ["endpoint"], **in_seconds)
        depth = "Inputs accepted and not answered"
        Gauge("queue_depth", depth, **common).set_function(queue_depth)
        wait = "Time from acceptance to the first forward pass"
        self._wait = Histogram("queue_wait_seconds", wait, ["model"], **in_seconds)
        self.errors = Counter("errors", "Failed requests, by kind", ["kind", "model"], **common)
        fetch = "Time to fetch an image from its URL"
        self.fetch_seconds = Histogram("image_fetch_seconds", fetch, **in_seconds)
        batch_lines = "Lines of batches that have ended, by result"
        self.batch_lines = Counter("batch_lines", batch_lines, ["result"], **common)
        not_stored = "Responses that could not be stored"
        self.not_stored = Counter("responses_not_stored", not_stored, **common)
        is_open = "1 while the model's circuit breaker is open"
        self.breaker_open = Gauge("breaker_open", is_open, ["serves"], **common)
        libraries = ("torch", "transformers", "starlette", "uvicorn")
        versions = {name: importlib.metadata.version(name) for name in libraries}
        versions |= {"version": __version__, "python": platform.python_version()}
        Info("build", "Versions", **common).info(versions)
        is_loaded = "1 while the model is loaded"
        self.model_loaded = Gauge("model_loaded", is_loaded, ["serves"], **common)
        loads = "Loads of a model, by result"
        self.loads = Counter("model_loads", loads, ["serves", "result"], **common)
        self.model = Info("model", "A loaded model", ["serves"], **common)
        fallback = "1 for each faster way to run a model that a check at load refused"
        self._fallbacks = Gauge("fallback", fallback, ["serves", "refused"], **common)

        out_of_memory = "Forward passes that ran out of memory"
        self._out_of_memory = Counter("out_of_memory", out_of_memory, **common)
        self._cap = Gauge("batch_cap", "Current maximum of rows in a batch", ["serves"], **common)
        padding = "Share of padding in the last batch, 0 to 1"
        self._padding = Gauge("padding_share", padding, ["serves"], **common)
        self._size = Histogram("batch_size", "Items in a batch", ["model"], **common, buckets=SIZES)
        tokens_in_batch = "Tokens in a batch, without padding"
        self._tokens = Histogram("batch_tokens", tokens_in_batch, ["model"], **in_tokens)
        forward = "Forward pass of a batch"
        self._forward = Histogram("forward_seconds", forward, ["model"], **in_seconds)

        self._token_counts = Counter(
            "tokens", "Tokens processed, by kind", ["kind", "model"], **common
        )
        self._step_s = Histogram("step_seconds", "Duration of a generation step", **in_seconds)
        self._step_tokens = Histogram("step_tokens", "Tokens in a generation step", **in_tokens)
        first_token = "Time from acceptance to the first text"
        self.first_token = Histogram(
            "time_to_first_token_seconds", first_token, ["model"], **in_seconds
        )
        per_token = "Mean time between two output tokens of a request"
        self.per_token = Histogram(
            "time_per_output_token_seconds", per_token, ["model"], **common, buckets=TOKEN_SECONDS
        )
        preempted = "Sequences preempted because the key-value cache was full"
        self._preemptions = Counter("preemptions", preempted, **common)
        self.audio_s = Counter("transcribed_seconds", "Seconds of audio transcribed", **common)
        windows, recordings = "Audio windows being decoded", "Recordings that wait for a row"
        self._window_gauges = {
            "running": Gauge("running_windows", windows, **common),
            "waiting": Gauge("waiting_recordings", recordings, **common),
        }
        self._last_steps: dict[str, StepReport] = {}  # by model; the gauges read them
        gauges = {
            "running": Gauge("running_sequences", "Sequences being generated", **common),
            "waiting": Gauge("waiting_sequences", "Sequences waiting to be scheduled", **common),
            "blocks_used": Gauge("kv_blocks_used", "Key-value cache blocks in use", **common),
            "blocks_total": Gauge("kv_blocks", "Blocks of the key-value cache", **common),
            "states_used": Gauge(
                "states_used",
                "States of recurrent layers of sequences and of cached prefixes",
                **common,
            ),
            "states_total": Gauge("states", "States that recurrent layers may use", **common),
        }
        for name, gauge in gauges.items():
            gauge.set_function(partial(self._sum_of_last_steps, name))
        self._add_router_gauges(waiting)

    def _add_router_gauges(self, waiting: Callable[[], float]) -> None:
        def gauge(name: str, documentation: str, function: Callable[[], float]) -> None:
            Gauge("vllm:" + name, documentation, registry=self.registry).set_function(function)

        def usage() -> float:
            total = self._sum_of_last_steps("blocks_total")
            return self._sum_of_last_steps("blocks_used") / total if total else 0.0

        gauge("num_requests_waiting", "Requests whose response has not started", waiting)
        running = partial(self._sum_of_last_steps, "running")
        gauge("num_requests_running", "Sequences being generated", running)
        gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1", usage)
        labels = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
        text = "Time of this state of the LoRA adapters that requests name, in seconds"
        self._adapters = Gauge("vllm:lora_requests_info", text, labels, registry=self.registry)
        # the names of running and waiting adapters
        self.adapter_names: Callable[[], tuple[list[str], list[str]]] = lambda: ([], [])
        self.max_adapters = 0  # 0: there are none
        self._cache_config = Info("vllm:cache_config", "The cache", registry=self.registry)
        self._cache_blocks: dict[str, int] = {}  # by the name in the registry

    def observe(self, observer: Callable[[str, BatchReport | StepReport], None]) -> None:
        """Call a function with each report and its model's served name, without delay."""
        self._observers.append(observer)
        self.max_reports = 1

    def collect(self) -> Iterable[Metric]:
        """Record the waiting reports. The registry calls this before it reads the instruments."""
        reports, self.reports = self.reports, []
        for serves, report in reports:
            for observe in self._observers:
                observe(self._served_names.get(serves, serves), report)
            if isinstance(report, BatchReport):
                self._record_batch(serves, report)
            elif serves.startswith("transcription"):
                self._record_windows(serves, report)
            else:
                self._record_step(serves, report)
        return ()

    def _record_batch(self, serves: str, report: BatchReport) -> None:
        model = self._served_names.get(serves, serves)
        if report.size:  # 0 if no item of the batch is finished
            self._size.labels(model).observe(report.size)
            self._tokens.labels(model).observe(report.tokens)
        self._forward.labels(model).observe(report.forward_s)
        self._out_of_memory.inc(report.out_of_memory)
        self._cap.labels(serves).set(report.cap)
        self._padding.labels(serves).set(report.padding)
        self._observe_waits(serves, report)

    def _record_step(self, serves: str, report: StepReport) -> None:
        self._last_steps[serves] = report
        model = self._served_names.get(serves, serves)
        for field, kind in TOKEN_KINDS.items():
            if more := getattr(report, field):  # most are 0 in most steps
                self._token_counts.labels(kind, model).inc(more)
        self._preemptions.inc(report.preempted)
        self._observe_waits(serves, report)
        if tokens := report.prefill_tokens + report.decode_tokens:
            self._step_tokens.observe(tokens)
            self._step_s.observe(report.total_s)

    def _record_windows(self, serves: str, report: StepReport) -> None:
        for name, gauge in self._window_gauges.items():
            gauge.set(getattr(report, name))
        self._observe_waits(serves, report)

    def _observe_waits(self, serves: str, report: BatchReport | StepReport) -> None:
        for wait_s in report.waits_s:
            self._wait.labels(self._served_names.get(serves, serves)).observe(wait_s)

    def _sum_of_last_steps(self, field: str) -> float:
        return float(sum(getattr(report, field) for report in self._last_steps.values()))

    def describe_adapters(self) -> None:
        """Replace the labels of the adapters' gauge by their current state."""
        self._adapters.clear()
        if self.max_adapters:
            running, waiting = (",".join(names) for names in self.adapter_names())
            self._adapters.labels(running, waiting, self.max_adapters).set_to_current_time()

    def describe_fallbacks(self, models: Mapping[str, ServedModel]) -> None:
        """Replace the fallbacks of all models by those of now."""
        self._fallbacks.clear()
        for name, model in models.items():
            for fallback in model.fallbacks:
                self._fallbacks.labels(name, fallback.refused).set(1)

    def on_loaded(self, name: str, info: ModelInfo) -> None:
        self._served_names[name] = info.model
        self.breaker_open.labels(name).set(0)
        self.model_loaded.labels(name).set(1)
        self.loads.labels(name, "loaded").inc()
        labels = ("task", "model", "device", "dtype", "batching")
        self.model.labels(name).info({label: getattr(info, label) for label in labels})
        if info.cache_blocks:
            self._cache_blocks[name] = info.cache_blocks
            self._describe_caches(str(info.block_size))

    def on_unloaded(self, name: str) -> None:
        self.collect()
        self.model_loaded.labels(name).set(0)
        self._last_steps.pop(name, None)
        self._cache_blocks.pop(name, None)

    def _describe_caches(self, block_size: str) -> None:
        blocks = sum(self._cache_blocks.values())
        self._cache_config.info({"block_size": block_size, "num_gpu_blocks": str(blocks)})
