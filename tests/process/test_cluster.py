"""Ray Serve with two replicas of the demo model on one machine."""

import contextlib
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray
CHAT = "/v1/chat/completions"
SESSIONS = [f"session {n}" for n in range(24)]
SETTINGS = {
    "PIPELINE_MODEL": "none", "EMBEDDING_MODEL": "none", "CHAT_MODEL": "demo",
    "OMP_NUM_THREADS": "1", "MAX_QUEUE_SIZE": "64", "RAY_USAGE_STATS_ENABLED": "0",
    "METRICS_KEYS": "metrics-key", "MODEL_CONTROL": "1", "SHUTDOWN_GRACE_S": "300",
    # on a busy machine, where workers of the default niceness, 15, would hardly run
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
}  # fmt: skip

METRICS_KEY = {"x-api-key": "metrics-key"}


def deploy(deployment: Any, replicas: int) -> None:
    from ray import serve

    serve.run(deployment.bind())
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
    root = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SETTINGS | {"RESPONSES_DB": responses, "PYTHONPATH": root}).items():
            patch.setenv(name, value)
        from ray import serve

        from server import cluster

        fixed = cluster.deployment.options(num_replicas=2, autoscaling_config=None)
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            deploy(fixed, 2)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def post(url: str, path: str, session: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, headers={"x-session-id": session}, json=body, timeout=120)


@pytest.mark.parametrize(
    ("inputs", "replicas"),
    [({}, 0), ({"a": 0.0}, 0), ({"a": 64.0}, 1), ({"a": 64.0, "b": 1.0}, 2), ({"a": 300.0}, 5)],
)
def test_replicas_are_added_for_inputs_that_do_not_run(
    inputs: dict[str, float], replicas: int
) -> None:
    from server.cluster import choose_replicas

    context = SimpleNamespace(
        aggregated_metrics={"inputs": inputs} if inputs else {},
        config=SimpleNamespace(target_ongoing_requests=64),
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


def test_a_response_has_the_id_of_its_request_once(url: str) -> None:
    for headers in ({}, {"x-request-id": "mine"}):
        response = httpx.post(f"{url}/v1/messages", headers=headers, json={}, timeout=120)
        # the error has the id of the log's lines
        assert response.headers.get_list("x-request-id") == [response.json()["request_id"]]
        assert not headers or response.json()["request_id"] == "mine"


def test_any_replica_finds_a_stored_response(url: str) -> None:
    id = post(url, "/v1/responses", "a", {"input": "What is the capital of Japan?"}).json()["id"]
    for _ in range(10):  # without a session, by chance
        assert httpx.get(f"{url}/v1/responses/{id}", timeout=120).json()["id"] == id


def test_a_full_queue_is_answered_by_the_replica(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}
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
        "max_tokens": 1900, "ignore_eos": True, "stream": True,
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


def started_streams(url: str, pool: ThreadPoolExecutor, sessions: list[str]) -> list[Any]:
    started = threading.Semaphore(0)
    streams = [pool.submit(stream, url, session, started) for session in sessions]
    for _ in streams:
        assert started.acquire(timeout=120)
    return streams


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


def read_metrics(url: str) -> dict[str, list[Any]]:
    """Return the samples by their families; each must be in one place."""
    response = httpx.get(f"{url}/metrics", headers=METRICS_KEY, timeout=120)
    assert response.status_code == 200
    families = [*text_string_to_metric_families(response.text)]
    samples = {family.name: family.samples for family in families}
    assert len(samples) == len(families)
    return samples


def requests_by_replica(url: str, endpoint: str) -> dict[str, float]:
    counts: dict[str, float] = defaultdict(float)
    for sample in read_metrics(url)["onequeue_requests"]:
        if sample.labels["endpoint"] == endpoint:
            counts[sample.labels["replica"]] += sample.value
    return counts


def sessions_by_replica(url: str) -> list[list[str]]:
    """Return the sessions of each replica: of the one whose count of unknown paths rises."""
    sessions: dict[str, list[str]] = defaultdict(list)
    before = requests_by_replica(url, "other")
    for session in SESSIONS:
        assert post(url, "/unknown", session, {}).status_code == 404
        counts = requests_by_replica(url, "other")
        [replica] = [id for id, count in counts.items() if count > before.get(id, 0)]
        before = counts
        sessions[replica].append(session)
    return [*sessions.values()]


def test_metrics_are_those_of_all_replicas(url: str) -> None:
    before = requests_by_replica(url, "other")
    for session in SESSIONS:
        assert post(url, "/unknown", session, {}).status_code == 404
    after = requests_by_replica(url, "other")
    added = {id: count - before.get(id, 0) for id, count in after.items()}
    assert sum(added.values()) == len(SESSIONS)
    assert sum(count > 0 for count in added.values()) == 2
    families = read_metrics(url)
    for name, samples in families.items():
        assert {sample.labels["replica"] for sample in samples} <= added.keys(), name
    assert len(families["onequeue_queue_depth"]) == 2
    one_bucket = [s for s in families["onequeue_request_seconds"] if s.labels.get("le") == "+Inf"]
    assert {sample.labels["endpoint"] for sample in one_bucket} >= {"other", "/metrics"}
    refused = httpx.get(f"{url}/metrics", timeout=120)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "METRICS_KEYS" in refused.json()["error"]["message"]
    assert httpx.head(f"{url}/metrics", headers=METRICS_KEY, timeout=120).status_code == 200
    assert httpx.post(f"{url}/metrics", headers=METRICS_KEY, timeout=120).status_code == 405


def test_the_queue_is_that_of_all_replicas(url: str) -> None:
    sessions = sessions_by_replica(url)
    assert len(sessions) == 2
    with ThreadPoolExecutor(4) as pool:
        streams = started_streams(url, pool, sessions[0][:2] + sessions[1][:2])
        replicas = httpx.get(f"{url}/debug/queue", timeout=120).json()["replicas"]
        ids = [request["id"] for queue in replicas.values() for request in queue["requests"]]
        assert len({*ids}) == len(ids) == 4
        assert [queue["inputs"] for queue in replicas.values()] == [2, 2]
        assert [queue["slots"] for queue in replicas.values()] == [64, 64]
        assert all(done.result() for done in streams)


def test_a_killed_replica_fails_its_own_requests_alone(url: str) -> None:
    replicas = sessions_by_replica(url)
    assert len(replicas) == 2
    with ThreadPoolExecutor(24) as pool:
        streams = started_streams(url, pool, SESSIONS)
        os.kill(replica_processes()[0], signal.SIGKILL)
        ended = [done.result() for done in streams]
    assert [session for session, done in zip(SESSIONS, ended, strict=True) if not done] in replicas
    wait_until(lambda: running() == 2, 240)
    body = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    for session in SESSIONS:
        assert post(url, CHAT, session, body).status_code == 200


def test_load_adds_a_replica_which_idling_removes_under_its_streams(url: str) -> None:
    from server import cluster

    at_once = {"look_back_period_s": 1.0, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    limits = {"max_replicas": 2, "target_ongoing_requests": 16}
    config = cluster.autoscaling.model_copy(update=at_once | limits)
    deploy(cluster.deployment.options(num_replicas=None, autoscaling_config=config), 1)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "ignore_eos": True}
    enough = threading.Event()

    def keep_sending(session: str) -> int:
        sent = 0
        while not enough.is_set():
            assert post(url, CHAT, session, body).status_code == 200
            sent += 1
        return sent

    with ThreadPoolExecutor(32) as pool:
        clients = [pool.submit(keep_sending, session) for session in SESSIONS]
        try:
            wait_until(lambda: running() == 2, 120)
            wait_until(lambda: len(sessions_by_replica(url)) == 2)  # the proxy knows both
            replicas = sessions_by_replica(url)
            streams = started_streams(url, pool, replicas[0][:4] + replicas[1][:4])
        finally:
            enough.set()
        assert all(client.result() for client in clients)
        wait_until(lambda: running() == 1, 120)
        assert not any(done.done() for done in streams), "those of the removed replica still run"
        assert all(done.result() for done in streams)
