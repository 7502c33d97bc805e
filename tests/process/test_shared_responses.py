"""Two server processes with one database of responses: background responses are found from both."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.event_streams import CLIENT
from tests.postgres import Databases
from tests.processes import program, started
from tests.serving import wait_until

# On SIGUSR1 the clock steps by a day.
PROGRAM = """
    import signal
    import time

    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from server.apis.openai import jobs
    {patch}
    from tests.fake_generator import FakeGenerator

    jobs.POLL_S, clock = 0.05, time.time
    signal.signal(signal.SIGUSR1, lambda *_: setattr(time, "time", lambda: clock() + 86400))
    settings = Settings(
        pipeline_model="none", embedding_model="none", api_keys=("one", "two"),
        **{settings!r},
    )
    app = create_app(settings, load_chat=FakeGenerator)
    # the test does not read stderr, and access lines would fill the pipe
    uvicorn.run(app, port=0, access_log=False, timeout_graceful_shutdown=1)
"""


NO_WAIT = "from server.apis.openai import postgres; postgres.RECONNECT_S = 0.0"


class Process(NamedTuple):
    child: "subprocess.Popen[str]"
    url: str

    def call(self, method: str, path: str = "", key: str = "one", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return CLIENT.request(method, self.url + path, headers=headers, json=body or None)

    def start(self, text: str) -> str:
        """Start a background response; return its id."""
        response = self.call("POST", background=True, input=text)
        assert response.status_code == 200, response.text
        return "/" + str(response.json()["id"])

    def status(self, id: str) -> str:
        return str(self.call("GET", id).json()["status"])


@pytest.fixture
def processes(server_databases: Databases) -> Iterator[list[Process]]:
    """Two processes, which start at the same time."""
    patch = NO_WAIT if server_databases.is_postgres else ""
    command = program(PROGRAM, settings=server_databases.settings, patch=patch)
    with ExitStack() as stack:
        both = [stack.enter_context(started(command)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for _, port in both]
        for url in urls:
            wait_until(lambda url=url: CLIENT.get(url + "/ready").status_code == 200)  # type: ignore[misc]
        yield [
            Process(child, url + "/v1/responses")
            for (child, _), url in zip(both, urls, strict=True)
        ]


def test_a_background_response_is_found_and_cancelled_from_each_process(
    processes: list[Process],
) -> None:
    owner, other = processes
    id = owner.start("long")
    seen = other.call("GET", id).json()
    assert (seen["id"], seen["background"]) == (id[1:], True)
    assert seen["status"] in ("queued", "in_progress")
    wait_until(lambda: other.status(id) == "in_progress")
    items = other.call("GET", id + "/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "long"
    streamed = other.call("GET", id + "?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    continued = other.call("POST", input="hi", previous_response_id=id[1:])
    assert "is still being generated" in continued.json()["error"]["message"]
    for path in (id, id + "/input_items"):
        assert other.call("GET", path, key="two").status_code == 404
    assert other.call("POST", id + "/cancel", key="two").status_code == 404
    assert owner.status(id) == "in_progress"
    cancelled = other.call("POST", id + "/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert owner.status(id) == other.status(id) == "cancelled"

    deleted = owner.start("long")
    assert other.call("DELETE", deleted).json()["deleted"] is True
    for process in processes:
        assert process.call("GET", deleted).status_code == 404

    done = other.start("say a b")
    wait_until(lambda: owner.status(done) == "completed")
    assert owner.call("GET", done).json() == other.call("GET", done).json()
    then = owner.call("POST", input="say c", previous_response_id=done[1:])
    assert then.json()["output"][0]["content"][0]["text"]


def test_a_stream_is_resumed_from_another_process_when_its_own_is_killed(
    processes: list[Process],
) -> None:
    owner, other = processes
    body = {"input": "long", "background": True, "stream": True}
    headers = {"authorization": "Bearer one"}
    received: list[dict[str, Any]] = []
    with CLIENT.stream("POST", owner.url, json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                received.append(json.loads(line.removeprefix("data: ")))
            if len(received) == 9:
                break
    id, last = received[0]["response"]["id"], received[-1]["sequence_number"]
    assert other.call("GET", f"/{id}?stream=true", key="two").status_code == 404
    owner.child.send_signal(signal.SIGKILL)
    owner.child.wait(60)
    resumed = other.call("GET", f"/{id}?stream=true&starting_after={last}")
    data = [line for line in resumed.text.splitlines() if line.startswith("data: ")]
    received += [json.loads(line.removeprefix("data: ")) for line in data]
    assert [event["sequence_number"] for event in received] == [*range(len(received))]
    assert received[-1]["type"] == "response.failed"
    assert "has ended" in received[-1]["response"]["error"]["message"]


def test_a_process_that_is_stopped_for_long_keeps_its_responses(processes: list[Process]) -> None:
    owner, other = processes
    id = owner.start("long")
    wait_until(lambda: other.status(id) == "in_progress")
    owner.child.send_signal(signal.SIGSTOP)
    try:
        assert os.waitpid(owner.child.pid, os.WUNTRACED)[0] == owner.child.pid
        other.child.send_signal(signal.SIGUSR1)
        assert other.status(id) == "in_progress"
        assert other.status(other.start("say a")) != "failed"
    finally:
        owner.child.send_signal(signal.SIGCONT)
    assert other.status(id) == owner.status(id) == "in_progress"
    assert other.call("POST", id + "/cancel").json()["status"] == "cancelled"
    assert owner.status(id) == "cancelled"
