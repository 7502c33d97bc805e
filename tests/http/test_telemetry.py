"""OpenTelemetry over OTLP: spans and metrics arrive at a receiver."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from server.core.metrics import Metrics
from server.core.request_context import RequestRecord
from server.core.settings import Settings, SettingsError
from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import serving

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.app import create_app
from server.core import telemetry

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver(ThreadingHTTPServer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.services: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:  # the library's name
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for attribute in resource.resource.attributes:
                    if attribute.key == "service.name":
                        self.server.services.add(attribute.value.string_value)
                self.server.spans += [s for scope in resource.scope_spans for s in scope.spans]
        elif self.path == "/v1/metrics":
            for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in group.scope_metrics:
                    self.server.metrics |= {metric.name: metric for metric in scope.metrics}
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{receiver.server_address[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    yield receiver
    receiver.shutdown()
    receiver.server_close()


def attributes(span: Any) -> dict[str, Any]:
    values = {item.key: item.value for item in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_a_request_is_a_span_of_its_callers_trace_with_a_child_per_stage(
    receiver: Receiver,
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with serving(lambda: FakeRunner()) as server:
        assert CLIENT.post(server.url, content="a", headers=headers).status_code == 200
        assert CLIENT.get(server.url + "/health").status_code == 200
    [root] = [span for span in receiver.spans if span.name == "POST /"]
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    stages = [span for span in receiver.spans if span.parent_span_id == root.span_id]
    assert [span.name for span in stages] == [
        *("onequeue.accept", "onequeue.prepare", "onequeue.queue"),
        *("onequeue.run", "onequeue.finish"),
    ]
    pairs = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in stages]
    edges = [edge for pair in pairs for edge in pair]
    assert edges == sorted(edges)
    assert root.start_time_unix_nano == edges[0]
    assert root.end_time_unix_nano == edges[-1]
    assert attributes(root)["http.response.status_code"] == 200
    assert attributes(root)["gen_ai.request.model"] == "fake"
    assert receiver.services == {"onequeue"}
    assert not [span for span in receiver.spans if "health" in span.name]


def test_generation_has_the_metrics_of_genai_servers_and_of_the_engine(receiver: Receiver) -> None:
    with serving(load_chat=FakeGenerator) as server:
        body = {"prompt": "long", "max_tokens": 5}
        assert CLIENT.post(server.url + "/v1/completions", json=body).status_code == 200
        assert (
            CLIENT.post(server.url + "/v1/completions", json={"prompt": "bad"}).status_code == 500
        )
    names = {"request.duration", "time_to_first_token", "time_per_output_token"}
    assert {f"gen_ai.server.{name}" for name in names} <= receiver.metrics.keys()
    points = receiver.metrics["gen_ai.server.request.duration"].histogram.data_points
    failed = [point for point in points if "error.type" in attributes(point)]
    assert [attributes(point)["error.type"] for point in failed] == ["500"]
    assert attributes(points[0])["gen_ai.operation.name"] == "text_completion"
    [first] = receiver.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert first.count == 1
    assert {"onequeue.step.duration", "onequeue.sequences.running"} <= receiver.metrics.keys()
    tokens = receiver.metrics["onequeue.tokens"].sum.data_points
    assert sum(point.as_int for point in tokens) >= 5


def test_a_receiver_that_does_not_answer_delays_the_exit_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        recorded = telemetry.telemetry_from_environment(Metrics(lambda: 0))
        record = RequestRecord("1", status=200, received_at=1.0)
        scope = {"method": "GET", "headers": [], "record": record}
        recorded.record_request(scope, "/", 2.0)
        monkeypatch.setattr(telemetry, "SHUTDOWN_S", 0.05)
        started = time.monotonic()
        recorded.shutdown()
        assert time.monotonic() - started < 5  # an exporter waits for 10 s


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_BSP_SCHEDULE_DELAY", "-1"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")],
)
def test_a_wrong_variable_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=r"^OTEL variables: .+ must be .+$"):
        create_app(Settings(pipeline_model="demo"))


def test_a_long_trace_state_is_not_parsed() -> None:
    context = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    headers = [context, (b"tracestate", b"a=" + b"x" * 60_000)]
    assert [*telemetry.trace_headers({"headers": headers})] == ["traceparent"]


def test_nothing_is_recorded_without_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with serving(lambda: FakeRunner()) as server:
        assert server.app.telemetry is None
