"""SIGKILL while a batch runs: the next process goes on with the lines that have no result."""

import json
from typing import Any

from tests.event_streams import CLIENT
from tests.http.test_batches import chat_line, jsonl
from tests.postgres import Databases
from tests.process.test_shared_responses import NO_WAIT
from tests.process.test_start import program, started
from tests.serving import wait_until

PROGRAM = """
    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fake_generator import FakeGenerator
    {patch}

    settings = Settings(pipeline_model="none", embedding_model="none", **{settings!r})
    app = create_app(settings, load_chat=FakeGenerator)
    uvicorn.run(app, port=0)
"""
COMPLETED = 'onequeue_batch_lines_total{result="completed"}'


def test_a_killed_server_repeats_no_finished_line(server_databases: Databases) -> None:
    patch = NO_WAIT if server_databases.is_postgres else ""
    command = program(PROGRAM, settings=server_databases.settings, patch=patch)
    lines = [chat_line(str(n), f"say {n}") for n in range(40)] + [chat_line("stuck", "hang")]

    def call(method: str, path: str, **body: Any) -> Any:
        response = CLIENT.request(method, f"http://127.0.0.1:{port}/v1{path}", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def completed() -> int:
        return int(call("GET", f"/batches/{id}")["request_counts"]["completed"])

    with started(command) as (child, port):
        files = {"file": ("in.jsonl", jsonl(lines))}
        file = call("POST", "/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": file["id"], "endpoint": lines[0]["url"]}
        id = call("POST", "/batches", json=body | {"completion_window": "24h"})["id"]
        wait_until(lambda: completed() >= 20)
        child.kill()
        child.wait()
    with started(command) as (_, port):
        before = completed()
        assert before >= 20
        wait_until(lambda: completed() == 40)
        metrics = CLIENT.get(f"http://127.0.0.1:{port}/metrics").text
        [count] = [line for line in metrics.splitlines() if line.startswith(COMPLETED)] or ["x 0"]
        assert float(count.split()[-1]) == 40 - before
        call("POST", f"/batches/{id}/cancel")
        wait_until(lambda: call("GET", f"/batches/{id}")["status"] == "cancelled")
        output_id = call("GET", f"/batches/{id}")["output_file_id"]
        url = f"http://127.0.0.1:{port}/v1/files/{output_id}/content"
        output = [json.loads(line) for line in CLIENT.get(url).text.splitlines()]
        assert sorted(int(line["custom_id"]) for line in output) == [*range(40)]
