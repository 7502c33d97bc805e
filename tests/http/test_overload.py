"""A full queue, deadlines, a failing or stuck worker: every request gets a response at once."""

import asyncio
import collections
import multiprocessing
import random
import resource
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from tests.event_streams import chat, open_stream, read_until
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import ManualTimers, metric, serving, wait_until
from worker.messages.protocol import BatchReport, StepOutcome
from worker.registry import ServedModel


def post(url: str, text: str, **headers: str) -> httpx.Response:
    return httpx.post(url, content=text, headers=headers, timeout=60)


def test_full_queue_answers_503_at_once() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, max_queue_size=4) as server, ThreadPoolExecutor(4) as pool:
        runner.gate.clear()
        accepted = [pool.submit(post, server.url, f"t{n}") for n in range(4)]
        wait_until(lambda: server.worker_client.queue.pending == 4)
        refused = post(server.url, "one more")
        assert server.worker_client.queue.pending == 4  # without waiting for one of them
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        runner.gate.set()
        assert [response.result().status_code for response in accepted] == [200] * 4
        assert post(server.url, "again").status_code == 200


@pytest.mark.parametrize("max_queue_size", [4, 1024])
def test_a_list_that_fills_the_queue_leaves_room_for_others(max_queue_size: int) -> None:
    runner = FakeRunner()
    with (
        serving(lambda: runner, max_queue_size=max_queue_size) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        runner.gate.clear()

        def at_worker() -> list[object]:
            items = [*server.worker_client.queue.items]
            return [item.prepared for item in items if item.arrived_at]

        inputs = {"inputs": [f"t{n}" for n in range(max_queue_size)]}
        long = pool.submit(httpx.post, server.url, json=inputs, timeout=60)
        assert runner.entered.acquire(timeout=60)
        bystander = pool.submit(post, server.url, "bystander")
        queue = server.worker_client.queue
        wait_until(lambda: queue.pending == max_queue_size + 1)
        wait_until(lambda: "bystander" in at_worker())
        runner.gate.set()
        assert bystander.result().status_code == 200
        assert long.result().status_code == 200
        assert [result["echo"] for result in long.result().json()] == inputs["inputs"]
        batches = [n for n, batch in enumerate(runner.batches) if "bystander" in batch]
        assert batches == [1]  # the one after that which ran
        # alone, the list fills batches: smaller ones where it is prepared slowly
        assert len(runner.batches) <= max_queue_size // 2 + 3


def test_a_deadline_that_cannot_be_met_is_refused_before_any_work() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server, ThreadPoolExecutor(1) as pool:
        assert post(server.url, "measured").status_code == 200
        assert runner.entered.acquire(timeout=60)
        engine: Any = server.worker_client.models["pipeline"].engine
        engine.times = StepTimes()
        engine.times.learn(1, 0, 10.0)
        runner.gate.clear()
        waiting = pool.submit(post, server.url, "ahead")
        assert runner.entered.acquire(timeout=60)
        refused = post(server.url, "late", **{"X-Request-Timeout-Ms": "5000"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "deadline_hopeless"
        assert refused.headers["retry-after"] == "10"
        runner.gate.set()
        assert waiting.result().status_code == 200
        assert not any("late" in batch for batch in runner.batches)


class Slow(FakeRunner):
    """Waits while it prepares the text "slow"."""

    def __init__(self) -> None:
        super().__init__()
        self.preparing = threading.Semaphore(0)
        self.resume = threading.Event()

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        if item.payload.inputs == "slow":
            self.preparing.release()
            assert self.resume.wait(60)
        super().prepare(item)


def test_outputs_are_finished_while_other_items_are_being_prepared() -> None:
    runner = Slow()
    with serving(lambda: runner) as server, ThreadPoolExecutor(32) as pool:
        runner.gate.clear()
        first = pool.submit(post, server.url, "first")
        assert runner.entered.acquire(timeout=60)
        slow = []
        for _ in server.worker_client.prepare.threads:  # a busy thread holds one item
            slow.append(pool.submit(post, server.url, "slow"))
            assert runner.preparing.acquire(timeout=60)
        runner.gate.set()
        assert first.result(60).status_code == 200
        assert not any(response.done() for response in slow)
        runner.resume.set()
        assert all(response.result().status_code == 200 for response in slow)


def test_a_deadline_that_passes_gets_504_in_the_queue_and_while_running() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server, ThreadPoolExecutor(2) as pool:
        timers = ManualTimers(server)
        runner.gate.clear()
        running = pool.submit(post, server.url, "running", **{"X-Request-Timeout-Ms": "50000"})
        assert runner.entered.acquire(timeout=60)
        waiting = pool.submit(post, server.url, "queued", **{"X-Request-Timeout-Ms": "40000"})
        wait_until(lambda: server.worker_client.queue.pending == 2)
        timers.fire(within_s=40)
        queued = waiting.result()
        assert queued.status_code == 504
        assert queued.json()["error"]["code"] == "deadline_exceeded"
        assert not running.done()
        timers.fire(within_s=50)
        assert running.result().status_code == 504
        runner.gate.set()
        assert post(server.url, "after").status_code == 200
        assert not any("queued" in batch for batch in runner.batches)
        assert metric(server, 'onequeue_errors_total{kind="deadline_exceeded",model="fake"}') == 2


def test_a_stuck_worker_makes_health_503_and_all_requests_are_answered() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, stuck_after_s=30) as server, ThreadPoolExecutor(2) as pool:
        ManualTimers(server)
        runner.gate.clear()
        first = pool.submit(post, server.url, "stuck")
        assert runner.entered.acquire(timeout=60)
        second = pool.submit(post, server.url, "behind")
        wait_until(lambda: server.worker_client.queue.pending == 2)
        server.worker_client.stuck_after_s = 0  # time has passed
        client = server.worker_client
        client.loop.call_soon_threadsafe(client._check_stuck)  # the watchdog's timer fires
        assert first.result().status_code == 503
        assert second.result().json()["error"]["code"] == "worker_down"
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.get(server.url + "/ready").status_code == 503
        assert post(server.url, "new").status_code == 503
        runner.gate.set()  # the step ends after all
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 200)
        wait_until(lambda: post(server.url, "new").status_code == 200)


def test_a_stuck_worker_is_detected_without_traffic_and_during_a_probe() -> None:
    runner = FakeRunner()
    probing, gate = threading.Event(), threading.Event()

    def probe() -> None:
        probing.set()
        assert gate.wait(60)

    with serving(lambda: runner) as server:
        runner.probing = probe
        assert post(server.url, "bad").status_code == 500
        assert probing.wait(60)
        assert httpx.get(server.url + "/ready").status_code == 200
        server.worker_client.stuck_after_s = 0  # time has passed
        assert httpx.get(server.url + "/ready").status_code == 503
        assert httpx.get(server.url + "/health").status_code == 503
        assert post(server.url, "new").json()["error"]["code"] == "worker_down"
        gate.set()
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 200)
        server.worker_client.stuck_after_s = 120
        assert post(server.url, "new").status_code == 200


def test_light_load_does_not_get_a_burst_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server, ThreadPoolExecutor(60) as pool:
        record = server.worker_client._record_step

        def slow(model: ServedModel, outcome: StepOutcome) -> None:
            assert isinstance(outcome.report, BatchReport)
            record(model, replace(outcome, report=replace(outcome.report, total_s=40.0)))

        # as if each batch had taken more than half of the limit
        monkeypatch.setattr(server.worker_client, "_record_step", slow)
        for _ in range(5):
            post(server.url, "single")
        runner.gate.clear()
        burst = [pool.submit(post, server.url, f"t{n}") for n in range(60)]
        wait_until(lambda: server.worker_client.queue.pending == 60)
        runner.gate.set()
        assert [response.result().status_code for response in burst] == [200] * 60


def test_a_dead_worker_makes_health_503_and_all_requests_are_answered() -> None:
    def lost(texts: list[str]) -> None:
        if texts != ["first"]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    runner = FakeRunner(lost)
    with serving(lambda: runner) as server, ThreadPoolExecutor(8) as pool:
        runner.gate.clear()
        first = pool.submit(post, server.url, "first")
        assert runner.entered.acquire(timeout=60)
        rest = [pool.submit(post, server.url, f"t{n}") for n in range(7)]
        wait_until(lambda: server.worker_client.queue.pending == 8)
        runner.gate.set()
        assert first.result().status_code == 200
        for response in rest:
            assert response.result().status_code == 503
            assert response.result().json()["error"]["code"] == "worker_down"
        assert httpx.get(server.url + "/health").status_code == 503
        assert post(server.url, "new").status_code == 503


def test_an_open_breaker_answers_503_and_closes_again() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server:
        server.worker_client.models["pipeline"].breaker.cooldown_s = 0.3
        runner.healthy = False
        statuses = [post(server.url, "bad").status_code for _ in range(3)]
        assert statuses == [500] * 3
        is_open = 'onequeue_breaker_open{serves="pipeline"}'
        wait_until(lambda: metric(server, is_open) == 1)
        refused = post(server.url, "good")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "breaker_open"
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/ready").status_code == 503
        runner.healthy = True
        wait_until(lambda: metric(server, is_open) == 0)
        assert post(server.url, "good").status_code == 200


def test_a_failing_pipeline_does_not_affect_the_chat_model() -> None:
    runner, generator = FakeRunner(), FakeGenerator()
    long = {"messages": [{"role": "user", "content": "long"}], "stream": True}
    with (
        serving(lambda: runner, load_chat=lambda: generator) as server,
        open_stream(server, "/v1/chat/completions", long) as client,
    ):
        read_until(client, b"content")
        (stream,) = generator.running
        server.worker_client.models["pipeline"].breaker.cooldown_s = 0.2
        runner.healthy = False
        assert [post(server.url, "bad").status_code for _ in range(3)] == [500] * 3
        ready = server.url + "/ready"
        wait_until(lambda: httpx.get(ready).json().get("failing") == ["pipeline"])
        assert httpx.get(ready).status_code == 200
        steps = stream.steps
        wait_until(lambda: stream.steps > steps + 3)
        assert chat(server).status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert post(server.url, "good").json()["error"]["code"] == "breaker_open"
        assert generator.running == [stream]
        assert metric(server, 'onequeue_breaker_open{serves="generation"}') == 0
        runner.healthy = True
        wait_until(lambda: "failing" not in httpx.get(ready).json())
        assert post(server.url, "good").status_code == 200


async def storm(
    port: int, clients: int, disconnect_share: float, in_flight: int
) -> collections.Counter[str]:
    """Post once per client, each on its own connection; some disconnect at a random moment. Return
    the number of clients by outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    slots = asyncio.Semaphore(in_flight)
    chance = random.Random(0)

    async def client(number: int) -> None:
        disconnects, after_s = chance.random() < disconnect_share, chance.random() * 0.02
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b"text %d" % number
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            if disconnects:
                await asyncio.sleep(after_s)
                writer.transport.abort()
                outcomes["left"] += 1
                return
            status = (await reader.readline()).split()[1].decode()
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            if status == "200":
                assert content == b'{"echo":"%b"}' % body, "another request's response"
            outcomes[status] += 1
            writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return outcomes


def every_third(runner: FakeRunner) -> None:
    def raises(texts: list[str]) -> None:
        if len(runner.batches) % 3 == 0:
            raise RuntimeError("every third batch")

    runner.before = raises


def storm_apart(port: int, clients: int, disconnect_share: float, in_flight: int) -> Any:
    """Run the storm in a process of its own: each side needs an open file per client."""
    allow_files(clients + 200)
    return asyncio.run(storm(port, clients, disconnect_share, in_flight))


def allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"at most {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def check_storm(clients: int, in_flight: int) -> None:
    runner = FakeRunner()
    apart = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with serving(lambda: runner) as server, apart:
        every_third(runner)
        outcomes = apart.submit(storm_apart, server.port, clients, 0.2, in_flight).result()
        assert sum(outcomes.values()) == clients
        assert set(outcomes) <= {"200", "500", "503", "left"}
        assert outcomes["200"] > min(clients * 0.2, 300)
        wait_until(lambda: server.worker_client.queue.pending == 0)
        wait_until(lambda: not server.worker_client.queue.items)
        assert metric(server, "onequeue_queue_depth") == 0
        runner.before = lambda texts: None
        started = time.process_time()  # of this process alone
        after = asyncio.run(storm(server.port, 50, 0.0, 16))
        assert after == {"200": 50}
        assert time.process_time() - started < 1


def test_every_accepted_request_is_answered_exactly_once_under_load() -> None:
    check_storm(clients=1500, in_flight=300)


@pytest.mark.slow
def test_ten_thousand_connections_at_once() -> None:
    allow_files(10_500)
    check_storm(clients=10_000, in_flight=10_000)
