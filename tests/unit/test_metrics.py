"""The worker's reports as Prometheus metrics."""

import httpx
from prometheus_client.exposition import generate_latest

from server.core.metrics import MAX_REPORTS, Metrics
from tests.fake_generator import FakeGenerator
from tests.serving import metric, serving
from worker.messages.protocol import BatchReport, ModelInfo, StepReport


def read(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_counters_add_up_steps_and_gauges_show_the_last_one() -> None:
    metrics = Metrics(lambda: 0.0)
    report = StepReport(prefill_tokens=7, decode_tokens=2, running=3, blocks_used=5)
    metrics.reports.append(("generation", report))
    metrics.reports.append(("generation", StepReport(decode_tokens=3, waits_s=(0.5,))))
    values = read(metrics)
    assert values['onequeue_tokens_total{kind="prompt",model="generation"}'] == 7
    assert values['onequeue_tokens_total{kind="output",model="generation"}'] == 5
    assert values["onequeue_step_tokens_count"] == 2
    assert values['onequeue_queue_wait_seconds_count{model="generation"}'] == 1
    assert values["onequeue_running_sequences"] == values["onequeue_kv_blocks_used"] == 0
    metrics.reports.append(("generation", StepReport(running=4, waiting=1)))
    values = read(metrics)
    assert values["onequeue_running_sequences"] == 4
    assert values["onequeue_waiting_sequences"] == 1
    assert values["onequeue_step_tokens_count"] == 2, "no tokens were run"


def test_gauges_of_batches_are_kept_per_model() -> None:
    metrics = Metrics(lambda: 0.0)
    for serves, cap in (("pipeline", 32), ("embedding", 8)):
        report = BatchReport(1, 5, 0.25, 0.1, 0.2, (0.0,), 0, cap)
        metrics.reports.append((serves, report))
    values = read(metrics)
    assert values['onequeue_batch_cap{serves="pipeline"}'] == 32
    assert values['onequeue_batch_cap{serves="embedding"}'] == 8
    assert values['onequeue_padding_share{serves="embedding"}'] == 0.25
    for serves in ("pipeline", "embedding"):
        assert values[f'onequeue_batch_size_count{{model="{serves}"}}'] == 1


def test_a_step_that_finishes_no_item_is_not_counted_as_a_batch() -> None:
    metrics = Metrics(lambda: 0.0)
    metrics.reports.append(("embedding", BatchReport(0, 0, 0.0, 0.1, 0.1, (), 1, 8)))
    values = read(metrics)
    assert 'onequeue_batch_size_count{model="embedding"}' not in values
    assert values['onequeue_forward_seconds_count{model="embedding"}'] == 1
    assert values["onequeue_out_of_memory_total"] == 1


def test_many_reports_are_recorded_even_if_metrics_are_not_read() -> None:
    steps = 2 * MAX_REPORTS
    with serving(load_chat=FakeGenerator) as server:
        body = {"prompt": "long", "max_tokens": steps}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        assert len(server.app.worker_client.metrics.reports) < MAX_REPORTS
        output = 'onequeue_tokens_total{kind="output",model="fake"}'
        assert metric(server, output) >= steps
        assert not server.app.worker_client.metrics.reports


def test_routers_read_one_series_each_over_all_models() -> None:
    metrics = Metrics(lambda: 0.0, lambda: 7)
    for name in ("generation", "generation:other"):
        info = ModelInfo(
            "text-generation", name, "cpu", "float32", 0, "continuous", cache_blocks=50,
            block_size=16,
        )  # fmt: skip
        metrics.on_loaded(name, info)
        metrics.reports.append((name, StepReport(running=2, blocks_used=10, blocks_total=50)))
    values = read(metrics)
    assert values["vllm:num_requests_waiting"] == 7
    assert values["vllm:num_requests_running"] == 4
    assert values["vllm:kv_cache_usage_perc"] == 0.2
    assert values['vllm:cache_config_info{block_size="16",num_gpu_blocks="100"}'] == 1


def test_a_server_exposes_its_process_and_no_creation_times() -> None:
    with serving(load_chat=FakeGenerator) as server:
        body = {"prompt": "long", "max_tokens": 4}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        text = httpx.get(server.url + "/metrics").text
        per_token = 'onequeue_time_per_output_token_seconds_count{model="fake"}'
        assert metric(server, per_token) == 1
    assert "process_resident_memory_bytes " in text
    assert "_created" not in text
