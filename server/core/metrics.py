"""Prometheus metrics: one registry per app, and the instruments that other modules use.

http/request.py counts requests and errors. worker_client.py appends the worker's reports to
`Metrics.reports`; they are recorded when /metrics is read, or when MAX_REPORTS are waiting. The
label `model` is a served name. Routers read the `vllm:` gauges, sums over all models, to choose a
server (Gateway API Inference Extension's model server protocol).
"""

import importlib.metadata
import platform
import time
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
from server.core.settings import Settings
from worker.messages.protocol import BatchReport, ModelInfo, StepReport
from worker.registry import ServedModel
from worker.segment_store import open_store

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
    "read_tokens": "read",
    "drafted": "drafted",
    "accepted": "accepted",
}


async def metrics(request: Request) -> Response:
    """`GET /metrics`."""
    app = request.app
    app.metrics.refresh(app.settings, app.worker_client.models)
    exposed = WithoutCreated(app.metrics.registry)
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
        # called with each report and its model's served name
        self.observer: Callable[[str, BatchReport | StepReport], None] | None = None
        self.max_reports = MAX_REPORTS
        self.reports: list[tuple[str, BatchReport | StepReport]] = []  # with the model's name
        common: dict[str, Any] = {"namespace": "onequeue", "registry": self.registry}
        counter: Callable[..., Counter] = partial(Counter, **common)
        gauge: Callable[..., Gauge] = partial(Gauge, **common)
        seconds: Callable[..., Histogram] = partial(Histogram, **common, buckets=SECONDS)
        tokens: Callable[..., Histogram] = partial(Histogram, **common, buckets=TOKENS)
        self.requests = counter("requests", "Responses sent", ["endpoint", "status"])
        latency = "Time from a request to the end of its response"
        self.latency = seconds("request_seconds", latency, ["endpoint"])
        gauge("queue_depth", "Inputs accepted and not answered").set_function(queue_depth)
        wait = "Time from acceptance to the first forward pass"
        self._wait = seconds("queue_wait_seconds", wait, ["model"])
        self.errors = counter("errors", "Failed requests, by kind", ["kind", "model"])
        self.fetch_seconds = seconds("image_fetch_seconds", "Time to fetch an image from its URL")
        batch_lines = "Lines of batches that have ended, by result"
        self.batch_lines = counter("batch_lines", batch_lines, ["result"])
        self.not_stored = counter("responses_not_stored", "Responses that could not be stored")
        is_open = "1 while the model's circuit breaker is open"
        self.breaker_open = gauge("breaker_open", is_open, ["serves"])
        libraries = ("torch", "transformers", "starlette", "uvicorn")
        versions = {name: importlib.metadata.version(name) for name in libraries}
        versions |= {"version": __version__, "python": platform.python_version()}
        Info("build", "Versions", **common).info(versions)
        self.model_loaded = gauge("model_loaded", "1 while the model is loaded", ["serves"])
        self.loads = counter("model_loads", "Loads of a model, by result", ["serves", "result"])
        self.model = Info("model", "A loaded model", ["serves"], **common)
        fallback = "1 for each faster way to run a model that a check at load refused"
        self._fallbacks = gauge("fallback", fallback, ["serves", "refused"])

        self._out_of_memory = counter("out_of_memory", "Forward passes that ran out of memory")
        self._cap = gauge("batch_cap", "Current maximum of rows in a batch", ["serves"])
        padding = "Share of padding in the last batch, 0 to 1"
        self._padding = gauge("padding_share", padding, ["serves"])
        self._size = Histogram("batch_size", "Items in a batch", ["model"], **common, buckets=SIZES)
        self._tokens = tokens("batch_tokens", "Tokens in a batch, without padding", ["model"])
        self._forward = seconds("forward_seconds", "Forward pass of a batch", ["model"])

        self._token_counts = counter("tokens", "Tokens processed, by kind", ["kind", "model"])
        stored = "Bytes of keys and values read from KV_CACHE_DIR, and written to it"
        self._stored_bytes = counter("kv_stored_bytes", stored, ["direction", "model"])
        self._files_bytes = gauge("kv_files_bytes", "Size of the files in KV_CACHE_DIR")
        oldest = "Time since the least recently used file in KV_CACHE_DIR was used"
        self._files_age = gauge("kv_files_age_seconds", oldest)
        saved = "Time that reading keys and values took less than computing them, in seconds"
        self._saved_s = counter("kv_saved_seconds", saved, ["model"])
        self._step_s = seconds("step_seconds", "Duration of a generation step")
        self._step_tokens = tokens("step_tokens", "Tokens in a generation step")
        first_token = "Time from acceptance to the first text"
        self.first_token = seconds("time_to_first_token_seconds", first_token, ["model"])
        per_token = "Mean time between two output tokens of a request"
        self.per_token = Histogram(
            "time_per_output_token_seconds", per_token, ["model"], **common, buckets=TOKEN_SECONDS
        )
        preempted = "Sequences preempted because the key-value cache was full"
        self._preemptions = counter("preemptions", preempted)
        self.audio_s = counter("transcribed_seconds", "Seconds of audio transcribed")
        self.spoken_s = counter("spoken_seconds", "Seconds of audio spoken")
        self._window_gauges = {
            "running": gauge("running_windows", "Audio windows being decoded"),
            "waiting": gauge("waiting_recordings", "Recordings that wait for a row"),
        }
        self._last_steps: dict[str, StepReport] = {}  # by model; the gauges read them
        states = "States of recurrent layers of sequences and of cached prefixes"
        for field, name, documentation in (
            ("running", "running_sequences", "Sequences being generated"),
            ("waiting", "waiting_sequences", "Sequences waiting to be scheduled"),
            ("blocks_used", "kv_blocks_used", "Key-value cache blocks in use"),
            ("blocks_total", "kv_blocks", "Blocks of the key-value cache"),
            ("states_used", "states_used", states),
            ("states_total", "states", "States that recurrent layers may use"),
        ):
            gauge(name, documentation).set_function(partial(self._sum_of_last_steps, field))
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

    def collect(self) -> Iterable[Metric]:
        """Record the waiting reports. The registry calls this before it reads the instruments."""
        reports, self.reports = self.reports, []
        for serves, report in reports:
            model = self._served_names.get(serves, serves)
            if self.observer:
                self.observer(model, report)
            for wait_s in report.waits_s:
                self._wait.labels(model).observe(wait_s)
            if isinstance(report, BatchReport):
                self._record_batch(serves, model, report)
            elif serves.startswith("transcription"):
                for name, gauge in self._window_gauges.items():
                    gauge.set(getattr(report, name))
            else:
                self._record_step(serves, model, report)
        return ()

    def _record_batch(self, serves: str, model: str, report: BatchReport) -> None:
        if report.size:  # 0 if no item of the batch is finished
            self._size.labels(model).observe(report.size)
            self._tokens.labels(model).observe(report.tokens)
        self._forward.labels(model).observe(report.forward_s)
        self._out_of_memory.inc(report.out_of_memory)
        self._cap.labels(serves).set(report.cap)
        self._padding.labels(serves).set(report.padding)

    def _record_step(self, serves: str, model: str, report: StepReport) -> None:
        self._last_steps[serves] = report
        for field, kind in TOKEN_KINDS.items():
            if more := getattr(report, field):  # most are 0 in most steps
                self._token_counts.labels(kind, model).inc(more)
        for direction in ("read", "written"):
            if size := getattr(report, f"{direction}_bytes"):
                self._stored_bytes.labels(direction, model).inc(size)
        if report.saved_ms:
            self._saved_s.labels(model).inc(report.saved_ms / 1000)
        self._preemptions.inc(report.preempted)
        if tokens := report.prefill_tokens + report.decode_tokens:
            self._step_tokens.observe(tokens)
            self._step_s.observe(report.total_s)

    def _sum_of_last_steps(self, field: str) -> float:
        return float(sum(getattr(report, field) for report in self._last_steps.values()))

    def refresh(self, settings: Settings, models: Mapping[str, ServedModel]) -> None:
        """Set the gauges of adapters, of files in KV_CACHE_DIR and of fallbacks."""
        self._adapters.clear()
        if self.max_adapters:
            running, waiting = (",".join(names) for names in self.adapter_names())
            self._adapters.labels(running, waiting, self.max_adapters).set_to_current_time()
        if (folder := settings.kv_cache_dir) != "none":
            usage = open_store(folder, int(settings.kv_cache_dir_gb * 1e9)).usage
            self._files_bytes.set(usage.bytes)
            self._files_age.set(max(0.0, time.time() - usage.oldest_at))
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
            blocks, size = sum(self._cache_blocks.values()), str(info.block_size)
            self._cache_config.info({"block_size": size, "num_gpu_blocks": str(blocks)})

    def on_unloaded(self, name: str) -> None:
        self.collect()
        self.model_loaded.labels(name).set(0)
        self._last_steps.pop(name, None)
        self._cache_blocks.pop(name, None)
