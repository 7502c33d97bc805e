"""A client that disconnects frees its slot, before or during the forward pass."""

import socket

import httpx

from tests.fakes import FakeRunner
from tests.serving import Server, metric, read_response, serving, wait_until


def send(server: Server, text: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        % (len(text), text.encode())
    )
    return client


def test_a_disconnect_in_the_queue_frees_the_slot_and_costs_no_forward_pass() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, max_queue_size=2) as server:
        runner.gate.clear()
        running = send(server, "running")
        assert runner.entered.acquire(timeout=60)
        queued = send(server, "queued")
        wait_until(lambda: server.worker_client.queue.pending == 2)
        queued.close()
        wait_until(lambda: server.worker_client.queue.pending == 1)
        other = send(server, "other")
        wait_until(lambda: server.worker_client.queue.pending == 2)
        runner.gate.set()
        assert read_response(other) == (200, b'{"echo":"other"}')
        assert read_response(running) == (200, b'{"echo":"running"}')
        assert not any("queued" in batch for batch in runner.batches)
        assert httpx.post(server.url, content="x").status_code == 200


def test_a_disconnect_during_the_forward_pass_frees_the_slot_at_once() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, max_queue_size=1) as server:
        runner.gate.clear()
        running = send(server, "running")
        assert runner.entered.acquire(timeout=60)
        running.close()
        wait_until(lambda: server.worker_client.queue.pending == 0)
        runner.gate.set()
        assert httpx.post(server.url, content="x").status_code == 200
        wait_until(lambda: not server.worker_client.queue.items)


def test_a_disconnect_in_the_body_leaves_nothing_behind() -> None:
    with serving(FakeRunner) as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        client.close()
        gone = 'onequeue_requests_total{endpoint="/",status="499"}'
        wait_until(lambda: metric(server, gone) == 1)
        assert httpx.post(server.url, content="x").status_code == 200
        assert server.worker_client.queue.pending == 0
