"""OpenTelemetry: a span per request with a child per stage, and the metrics of GenAI servers.

    request ends → record_request → spans with the times of its stages → the SDK's exporter thread

Imported only where OTEL_EXPORTER_OTLP_ENDPOINT, or an endpoint of traces or metrics, is set: the
package's extra `otel` has the SDK, which reads its own variables. All names are here. Those
of GenAI are of the semantic conventions, which are in development; the engine's are ours.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from server import __version__
from server.core.metrics import SECONDS, TOKEN_SECONDS, Metrics
from server.core.request_context import RequestRecord
from worker.messages.protocol import BatchReport, StepReport

SCOPE = "onequeue"
SHUTDOWN_S = 3.0
MAX_TRACE_HEADER = 512  # bytes, as much as has to be propagated
# The span of each stage, from the time of one field of RequestRecord to that of the next.
STAGES = {
    "received_at": "onequeue.accept",
    "accepted_at": "onequeue.prepare",
    "prepared_at": "onequeue.queue",
    "started_at": "onequeue.run",
    "ended_at": "onequeue.finish",
}
OPERATIONS = {  # gen_ai.operation.name, by path
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
    "/embed_all": "embeddings",
    "/embed_sparse": "embeddings",
}
MODEL = "gen_ai.request.model"
DURATION = "gen_ai.server.request.duration"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
PER_TOKEN = "gen_ai.server.time_per_output_token"
STEP = "onequeue.step.duration"
TOKENS = "onequeue.tokens"  # by onequeue.token.kind
GAUGES = {  # by the field of StepReport
    "running": "onequeue.sequences.running",
    "waiting": "onequeue.sequences.waiting",
    "blocks_used": "onequeue.kv_cache.blocks_used",
    "blocks_total": "onequeue.kv_cache.blocks",
}
TOKEN_KINDS = {"prefill_tokens": "prefill", "decode_tokens": "decode", "cached_tokens": "cached"}


class Telemetry:
    """Records requests, on the event loop, and the worker's reports."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider, metrics: Metrics) -> None:
        self._providers = tracers, meters
        self._tracer = tracers.get_tracer(SCOPE, __version__)
        self._propagator = TraceContextTextMapPropagator()
        meter = meters.get_meter(SCOPE, __version__)
        in_seconds: dict[str, Any] = {"unit": "s", "explicit_bucket_boundaries_advisory": SECONDS}
        self._duration = meter.create_histogram(DURATION, **in_seconds)
        self._first_token = meter.create_histogram(FIRST_TOKEN, **in_seconds)
        per_token = in_seconds | {"explicit_bucket_boundaries_advisory": TOKEN_SECONDS}
        self._per_token = meter.create_histogram(PER_TOKEN, **per_token)
        self._step = meter.create_histogram(STEP, **per_token)
        self._tokens = meter.create_counter(TOKENS, "{token}")
        # The gauges are read once per export: setting each in every step takes long.
        self._last_steps: dict[str, StepReport] = {}  # by model
        for field, name in GAUGES.items():
            meter.create_observable_gauge(name, [partial(self._observe_last_steps, field)])
        metrics.observer, metrics.max_reports = self._record_report, 1  # without delay

    def record_request(self, scope: Scope, path: str, ended: float) -> None:
        """Record a request. `path`: of its route; `ended`: in monotonic seconds."""
        record: RequestRecord = scope["record"]
        attributes = {"gen_ai.provider.name": SCOPE}
        if record.model:
            attributes[MODEL] = record.model
        if operation := OPERATIONS.get(path):
            attributes["gen_ai.operation.name"] = operation
        offset_ns = time.time_ns() - time.monotonic_ns()

        def nanoseconds(at: float) -> int:
            return int(at * 1e9) + offset_ns

        span = self._tracer.start_span(
            f"{scope['method']} {path}",
            self._propagator.extract(trace_headers(scope)),
            SpanKind.SERVER,
            {
                "http.request.method": scope["method"],
                "http.route": path,
                "http.response.status_code": record.status,
                "onequeue.request.id": record.request_id,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                **attributes,
            },
            start_time=nanoseconds(record.received_at),
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error[:200]))
        if span.is_recording():  # it is sampled
            parent = trace.set_span_in_context(span)
            times = {field: getattr(record, field) for field in STAGES} | {"": ended}
            reached = [(field, at) for field, at in times.items() if at]
            for (field, at), (_, until) in pairwise(reached):
                stage = self._tracer.start_span(STAGES[field], parent, start_time=nanoseconds(at))
                stage.end(nanoseconds(max(at, until)))
        span.end(nanoseconds(ended))
        if record.model:
            if record.status >= 400:
                attributes["error.type"] = str(record.status)
            self._duration.record(ended - record.received_at, attributes)
            if record.first_token_at:
                first_token_s = record.first_token_at - record.received_at
                self._first_token.record(first_token_s, attributes)
            if record.per_token_s:
                self._per_token.record(record.per_token_s, attributes)

    def _record_report(self, model: str, report: BatchReport | StepReport) -> None:
        self._step.record(report.total_s, {MODEL: model})
        if isinstance(report, StepReport):
            self._last_steps[model] = report
            for field, kind in TOKEN_KINDS.items():
                if count := getattr(report, field):
                    self._tokens.add(count, {MODEL: model, "onequeue.token.kind": kind})

    def _observe_last_steps(self, field: str, _: CallbackOptions) -> list[Observation]:
        steps = self._last_steps.copy()
        return [Observation(getattr(step, field), {MODEL: model}) for model, step in steps.items()]

    def shutdown(self) -> None:
        """Send the last spans and metrics, for at most SHUTDOWN_S: the exporters retry for longer,
        and a collector that is down must not delay the exit."""
        stops = [provider.shutdown for provider in self._providers]  # type: ignore[union-attr]  # of the SDK
        threads = [threading.Thread(target=stop, daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        until = time.monotonic() + SHUTDOWN_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def trace_headers(scope: Scope) -> Mapping[str, str]:
    """Return the request's W3C trace context. The SDK logs what it does not accept of it."""
    names = (b"traceparent", b"tracestate")
    headers = [(k, v) for k, v in scope["headers"] if k in names and len(v) <= MAX_TRACE_HEADER]
    return {k.decode(): v.decode("latin-1") for k, v in headers}


def telemetry_from_environment(metrics: Metrics) -> Telemetry:
    """Return telemetry that the SDK's variables configure. ImportError without the SDK."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk import metrics as sdk_metrics
    from opentelemetry.sdk import trace as sdk_trace
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes.get("service.name")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SCOPE}))
    tracers = sdk_trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    meters = sdk_metrics.MeterProvider([reader], resource, shutdown_on_exit=False)
    return Telemetry(tracers, meters, metrics)
