"""Three servers with one PostgreSQL database: killed ones, and an outage of the database."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.event_streams import CLIENT
from tests.http.test_api_keys import write
from tests.http.test_batches import chat_line, jsonl
from tests.postgres import Postgres, running_postgres
from tests.processes import program, started
from tests.serving import wait_until

PROGRAM = """
    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from server.apis.openai import jobs, postgres, store
    from server.apis.openai.batches import runner
    from tests.fake_generator import FakeGenerator

    jobs.POLL_S = runner.POLL_S = 0.1
    postgres.RECONNECT_S = runner.RETRY_S = 1.0
    settings = Settings(
        pipeline_model="none", embedding_model="none", store={url!r}, api_keys_file={keys!r}
    )
    app = create_app(settings, load_chat=FakeGenerator)
    uvicorn.run(app, port=0, access_log=False, timeout_graceful_shutdown=1)
"""


class Replica:
    def __init__(self, command: list[str], stack: ExitStack) -> None:
        self.child, port = stack.enter_context(started(command))
        self.url = f"http://127.0.0.1:{port}"
        # nobody else reads it, and lines about an outage would fill the pipe
        threading.Thread(target=self.child.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        wait_until(lambda: CLIENT.get(self.url + "/ready").status_code == 200, 240)

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(60)

    def call(self, method: str, path: str, **body: Any) -> Any:
        response = CLIENT.request(method, f"{self.url}/v1{path}", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def create(self, lines: list[dict[str, Any]]) -> str:
        files = {"file": ("in.jsonl", jsonl(lines))}
        file = self.call("POST", "/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": file["id"], "endpoint": lines[0]["url"]}
        batch = self.call("POST", "/batches", json=body | {"completion_window": "24h"})
        return str(batch["id"])

    def batch(self, id: str) -> Any:
        """Return a batch; None while the database is down."""
        response = CLIENT.get(f"{self.url}/v1/batches/{id}")
        if response.status_code == 503:
            assert response.headers["retry-after"]
            assert "database is not available" in response.json()["error"]["message"]
            return None
        return response.json()

    def completed(self, id: str) -> int:
        batch = self.batch(id)
        return int(batch["request_counts"]["completed"]) if batch else 0


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A server of the test's own, which it may stop."""
    with running_postgres() as postgres:
        yield postgres


def test_a_limit_of_parallel_requests_holds_over_all_servers(
    server: Postgres, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    write(keys, {"k": "max_parallel_requests = 20"})
    command = program(PROGRAM, url=server.new_database(), keys=str(keys))
    body, key = {"prompt": "hang", "max_tokens": 1}, {"x-api-key": "k"}
    with ThreadPoolExecutor(64) as pool, ExitStack() as stack:
        replicas = [Replica(command, stack) for _ in range(3)]

        def post(replica: Replica) -> None:
            with suppress(httpx.TransportError):  # it hangs until the server is killed
                url = replica.url + "/v1/completions"
                response = CLIENT.post(url, json=body, headers=key, timeout=600)
                assert response.status_code == 429

        def running() -> int:
            """Send a request to each server, and return how many run at all of them."""
            sent.extend([pool.submit(post, replica) for replica in replicas])
            loads = [CLIENT.get(replica.url + "/load", headers=key) for replica in replicas]
            return sum(load.json()["server_load"] for load in loads)

        sent: list[Future[None]] = []
        wait_until(lambda: running() >= 20, 240)
        assert max(running() for _ in range(20)) <= 21
        for replica in replicas:
            replica.kill()
        for request in sent:
            request.result()


def test_each_line_has_one_result_though_servers_and_the_database_end(server: Postgres) -> None:
    command, count = program(PROGRAM, url=server.new_database(), keys="none"), 1500
    with ExitStack() as stack:
        replicas = [Replica(command, stack) for _ in range(3)]
        id = replicas[0].create([chat_line(str(n), f"say {n}") for n in range(count)])
        wait_until(lambda: replicas[1].completed(id) > 300, 240)
        replicas[0].kill()
        replicas[0] = Replica(command, stack)
        done = replicas[1].completed(id)
        wait_until(lambda: replicas[1].completed(id) > min(done + 300, count - 1), 240)
        server.stop(signal.SIGQUIT)
        assert replicas[1].batch(id) is None
        chat = {"model": "demo", "messages": [{"role": "user", "content": "say a"}]}
        replicas[1].call("POST", "/chat/completions", json=chat)
        stored = replicas[1].call("POST", "/responses", json={"input": "say a"})
        assert (stored["status"], stored["store"]) == ("completed", False)
        server.start()
        # Each replica connects again in its own time.
        wait_until(lambda: all(replica.completed(id) == count for replica in replicas), 240)
        wait_until(lambda: replicas[2].batch(id)["status"] == "completed", 240)
        batch = replicas[2].batch(id)
        counts = batch["request_counts"]
        assert counts == {"total": count, "completed": count, "failed": 0}
        url = f"{replicas[1].url}/v1/files/{batch['output_file_id']}/content"
        content = CLIENT.get(url)
        assert content.status_code == 200, content.text
        output = [json.loads(line) for line in content.text.splitlines()]
        assert sorted(int(line["custom_id"]) for line in output) == [*range(count)]
        assert len({line["id"] for line in output}) == count
        stored = replicas[1].call("POST", "/responses", json={"input": "say a"})
        assert replicas[2].call("GET", f"/responses/{stored['id']}") == stored
