"""Ray Serve with two replicas of the demo model on one machine."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.serving import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray
CHAT = "/v1/chat/completions"
SETTINGS = {
    "PIPELINE_MODEL": "none", "EMBEDDING_MODEL": "none", "CHAT_MODEL": "demo",
    "OMP_NUM_THREADS": "1", "MAX_QUEUE_SIZE": "64", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


def deploy(replicas: int) -> None:
    from ray import serve

    from server import cluster

    fixed = cluster.deployment.options(num_replicas=replicas, autoscaling_config=None)
    serve.run(fixed.bind())
    wait_until(lambda: running() == replicas, 240)


def running() -> int:
    from ray import serve

    [application] = serve.status().applications.values()
    [deployment] = application.deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas that share a file of responses."""
    responses = str(tmp_path_factory.mktemp("ray") / "responses.sqlite")
    root = str(Path(__file__).parents[2])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SETTINGS | {"RESPONSES_DB": responses, "PYTHONPATH": root}).items():
            patch.setenv(name, value)
        from ray import serve

        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            deploy(2)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def post(url: str, path: str, session: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, headers={"x-session-id": session}, json=body, timeout=120)


@pytest.mark.parametrize(
    ("inputs", "replicas"),
    [({}, 1), ({"a": 0.0}, 1), ({"a": 64.0}, 1), ({"a": 64.0, "b": 1.0}, 2), ({"a": 1e4}, 8)],
)
def test_replicas_are_added_for_inputs_that_do_not_run(
    inputs: dict[str, float], replicas: int
) -> None:
    from server.cluster import choose_replicas

    context = SimpleNamespace(
        aggregated_metrics={"inputs": inputs} if inputs else {},
        config=SimpleNamespace(target_ongoing_requests=64),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )
    assert choose_replicas(context) == (replicas, {})


def test_the_turns_of_a_session_find_their_prefix(url: str) -> None:
    for n in range(8):
        text = f"{n} " + f"Tell me about number {n} and {n * 7}. " * 20
        messages = [{"role": "user", "content": text}]
        first = post(url, CHAT, f"s{n}", {"messages": messages, "max_tokens": 8}).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And?"}]
        second = post(url, CHAT, f"s{n}", {"messages": messages, "max_tokens": 8}).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > first["usage"]["prompt_tokens"] * 3 // 4


def test_any_replica_finds_a_stored_response(url: str) -> None:
    id = post(url, "/v1/responses", "a", {"input": "What is the capital of Japan?"}).json()["id"]
    for _ in range(10):  # without a session, by chance
        assert httpx.get(f"{url}/v1/responses/{id}", timeout=120).json()["id"] == id


def test_a_full_queue_is_answered_by_the_replica(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(100) as pool:
        responses = list(pool.map(lambda n: post(url, CHAT, "one", body), range(100)))
    refused = [response for response in responses if response.status_code != 200]
    assert {response.status_code for response in refused} == {503}
    assert all(int(response.headers["retry-after"]) > 0 for response in refused)
    assert all("queue" in response.json()["error"]["message"] for response in refused)


def stream(url: str, session: str, started: threading.Semaphore) -> bool:
    """Return whether a long stream has ended as it should."""
    body = {
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 1500, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers, text = {"x-session-id": session}, ""
    try:
        with httpx.stream("POST", url + CHAT, headers=headers, json=body, timeout=120) as response:
            for part in response.iter_text():
                if not text:
                    started.release()
                text += part
    except httpx.HTTPError:
        return False
    return "data: [DONE]" in text


def started_streams(url: str, pool: ThreadPoolExecutor) -> list[Any]:
    started = threading.Semaphore(0)
    streams = [pool.submit(stream, url, f"stream {n}", started) for n in range(24)]
    for _ in streams:
        assert started.acquire(timeout=120)
    return streams


def test_a_removed_replica_loses_nothing(url: str) -> None:
    with ThreadPoolExecutor(24) as pool:
        streams = started_streams(url, pool)
        deploy(1)
        assert all(done.result() for done in streams)
    deploy(2)


def replica_processes() -> list[int]:
    """Return the replicas that this process has started."""
    parents, replicas = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                replicas.append(int(folder.name))

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return [pid for pid in replicas if is_ours(pid)]


def test_a_killed_replica_fails_its_own_requests_alone(url: str) -> None:
    with ThreadPoolExecutor(24) as pool:
        streams = started_streams(url, pool)
        os.kill(replica_processes()[0], signal.SIGKILL)
        ended = [done.result() for done in streams]
    assert any(ended)
    assert not all(ended)
    wait_until(lambda: running() == 2, 240)
    body = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    for n in range(24):
        assert post(url, CHAT, f"stream {n}", body).status_code == 200
