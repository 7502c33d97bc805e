"""NDJSON over real sockets: a line of answer or error for each line of input, in order."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from batching.step_times import StepTimes
from server.http import connections, spool
from server.http.loop_budget import LoopBudget
from server.http.ndjson import LineWindow
from tests.fakes import FakeRunner
from tests.serving import ManualTimers, Parser, Server, metric, server_fixture, serving, wait_until

NDJSON = {"content-type": "application/x-ndjson"}
CHUNKED = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


server = server_fixture(FakeRunner, max_body_mb=0.001, max_queue_size=8)


def lines_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def post(server: Server, content: Any, path: str = "", **headers: str) -> list[Any]:
    return lines_of(
        httpx.post(server.url + path, content=content, headers={**NDJSON, **headers}, timeout=60)
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Client:
    """Sends lines in chunks and reads answers, on a socket."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(CHUNKED)
        self.file = self.socket.makefile("rb")
        self.read: list[Any] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which the file keeps open, too."""
        self.file.close()
        self.socket.close()

    def send(self, *lines: str) -> None:
        self.socket.sendall(chunk("".join(json.dumps(line) + "\n" for line in lines).encode()))

    def answer(self) -> Any:
        """Return the next answer."""
        if not self.read:
            while self.file.readline().strip() not in (b"", b"HTTP/1.1 200 OK"):
                pass
        while True:
            line = self.file.readline()
            if line.startswith(b"{"):
                self.read.append(json.loads(line))
                return self.read[-1]
            assert line, "the response has ended"

    def rest(self) -> list[Any]:
        """Return the answers until the end of the connection."""
        lines = [line for line in self.file.read().splitlines() if line.startswith(b"{")]
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_each_line_gets_its_answer_or_error(http: Parser) -> None:
    body = (
        b'\xef\xbb\xbf"one"\r\n\n{"inputs": "two", "parameters": {"top_k": 3}}\n'
        b'{"inputs": "a", "parameters": {"top_k": 0}}\n{bad\n"\xff"\n[1]\n"refused"\n"bad"\n'
        b'"' + b"x" * 2000 + b'"\n{"inputs": ["a", "refused"], "on_error": "item"}\n"last"'
    )
    with serving(FakeRunner, max_body_mb=0.001, http=http) as server:
        answers = post(server, body)
        errors = metric(server, 'onequeue_errors_total{kind="invalid_value"}')
        assert metric(server, "onequeue_queue_depth") == 0
    assert answers[0] == {"echo": "one"}
    assert answers[1] == {"echo": "two"}
    assert answers[-1] == {"echo": "last"}
    assert [item.get("echo") or item["error"]["param"] for item in answers[-2]] == [
        "a",
        "inputs[1]",
    ]
    failed = [answer["error"] for answer in answers[2:-2]]
    assert [(error["line"], error["code"], error["param"]) for error in failed] == [
        (4, "invalid_value", "parameters.top_k"),
        (5, "invalid_value", None),
        (6, "invalid_value", None),
        (7, "invalid_value", None),
        (8, "invalid_value", "inputs"),
        (9, "item_failed", None),
        (10, "body_too_large", None),
    ]
    assert set(failed[0]) == {"message", "type", "param", "code", "line"}
    assert errors == 6


def test_the_file_name_that_curl_adds_to_the_path_is_ignored(server: Server) -> None:
    assert post(server, b'"a"', "/texts.ndjson") == [{"echo": "a"}]
    for path, headers in (("/texts.ndjson", {}), ("/a/texts.ndjson", NDJSON)):
        response = httpx.post(server.url + path, content=b'"a"', headers=headers)
        assert response.status_code == 404


@pytest.mark.parametrize("name", ["jsonl", "jsonlines", "x-jsonlines"])
def test_jsonl_is_ndjson(server: Server, name: str) -> None:
    media = {"content-type": f"application/{name}; charset=utf-8"}
    assert post(server, b'"a"\n"b"\n', **media) == [{"echo": "a"}, {"echo": "b"}]


demo = server_fixture(pipeline_model="demo")


def test_parameters_in_the_query_hold_for_each_input(demo: Server) -> None:
    body = b'"a [MASK]"\n{"inputs": "a [MASK]", "parameters": {"top_k": 2}}\n{"inputs": "[MASK]"}\n'
    assert [len(answer) for answer in post(demo, body, "/?top_k=1")] == [1, 2, 1]
    assert post(demo, b'"a [MASK]"', "/?top_k=1&targets=day")[0][0]["token_str"] == "day"
    texts = post(demo, b'"a [MASK]"', '/?targets=["day","night"]')[0]
    assert {text["token_str"] for text in texts} == {"day", "night"}
    for plain in ({"content": "a [MASK]"}, {"json": {"inputs": "a [MASK]"}},
                  {"files": {"inputs": (None, "a [MASK]")}}):  # fmt: skip
        answer = httpx.post(demo.url + "/?top_k=1", **plain)
        assert len(answer.json()) == 1
    own = {"inputs": "a [MASK]", "parameters": {"top_k": 2}}
    assert len(httpx.post(demo.url + "/?top_k=1", json=own).json()) == 2


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("top_k=0", "must be a whole number"),
        ("top_k=one", 'not "one"'),
        ("truncation", 'not ""'),
        ("topk=1", "has no parameter 'topk'; it accepts: targets, top_k, truncation"),
        ("top_k=1&top_k=2", "has a name twice"),
        ("&".join(f"a{n}=" for n in range(65)), "at most 64 names"),
        ("targets=%ff", "be UTF-8"),
    ],
)
def test_an_invalid_query_is_refused_before_a_line_is_run(
    server: Server, query: str, part: str
) -> None:
    before = metric(server, "onequeue_batch_size_count")
    for media in (NDJSON, {}):
        refused = httpx.post(f"{server.url}/?{query}", content=b'"a"', headers=media)
        assert refused.status_code == 400
        assert part in refused.json()["error"]["message"]
    assert metric(server, "onequeue_batch_size_count") == before


def test_a_query_may_have_what_a_task_needs() -> None:
    with serving(FakeRunner, pipeline_task="zero-shot-classification") as server:
        path = "/?candidate_labels=a,b"
        own = b'{"inputs": "b", "parameters": {"candidate_labels": ["c"]}}'
        assert post(server, b'"a"\n' + own, path) == [{"echo": "a"}, {"echo": "b"}]
        assert post(server, own, "/?multi_label=true") == [{"echo": "b"}]
        [missing] = post(server, b'"a"', "/?multi_label=true")
        assert missing["error"]["param"] == "parameters.candidate_labels"


def test_a_line_with_an_id_gets_it_back(server: Server) -> None:
    lines = [
        {"inputs": "a", "id": "first"},
        {"inputs": ["a", "b"], "id": -7},
        {"inputs": "bad", "id": 0},
        {"inputs": "a", "parameters": {"top_k": 0}, "id": "x" * 256},
        {"inputs": "a", "id": None},
    ]
    ids: list[Any] = ["x" * 257, True, 1.5, [1], {}]
    wrong = [{"inputs": "a", "id": id} for id in ids]
    body = "".join(json.dumps(line) + "\n" for line in lines + wrong).encode()
    answers = post(server, body)
    assert answers[0] == {"id": "first", "result": {"echo": "a"}}
    assert answers[1] == {"id": -7, "result": [{"echo": "a"}, {"echo": "b"}]}
    failed = [(answer["id"], answer["error"]["line"]) for answer in answers[2:4]]
    assert failed == [(0, 3), ("x" * 256, 4)]
    assert answers[4] == {"echo": "a"}
    assert [set(answer) for answer in answers[5:]] == [{"error"}] * 5
    assert [answer["error"]["param"] for answer in answers[5:]] == ["id"] * 5


def test_lines_without_their_breaks_get_a_hint(server: Server) -> None:
    joined = b'{"inputs": "a"}{"inputs": "b"}'
    [answer] = post(server, joined)
    assert "--data-binary @FILE" in answer["error"]["message"]
    assert len(post(server, (joined + b"\n") * 200)) == 100  # they are not JSON


def test_an_empty_body_gets_no_answers(server: Server) -> None:
    for body in (b"", b"\n\r\n  \n"):
        assert post(server, body) == []


def test_a_stream_is_longer_than_the_queue_and_the_limit_of_bodies(server: Server) -> None:
    texts = [f"text {n}" for n in range(3000)]
    body = "".join(json.dumps(text) + "\n" for text in texts).encode()
    assert [answer["echo"] for answer in post(server, body)] == texts
    assert metric(server, "onequeue_queue_depth") == 0
    assert server.app.memory.used == 0


def test_answers_arrive_while_the_body_is_sent(server: Server) -> None:
    with Client(server) as client:
        for n in range(5):
            client.send(f"text {n}")
            assert client.answer() == {"echo": f"text {n}"}
        client.socket.sendall(b"0\r\n\r\n")
        assert client.rest() == []


def test_errors_before_the_first_line_keep_their_status() -> None:
    with serving(FakeRunner, api_keys=("k",)) as server:
        assert httpx.post(server.url, content=b'"a"', headers=NDJSON).status_code == 401
        wrong = {**NDJSON, "x-api-key": "k", "x-request-timeout-ms": "x"}
        assert httpx.post(server.url, content=b'"a"', headers=wrong).status_code == 400
        assert post(server, b'"a"', **{"x-api-key": "k"}) == [{"echo": "a"}]
        server.worker_client.draining = True
        key = {**NDJSON, "x-api-key": "k"}
        assert httpx.post(server.url, content=b'"a"', headers=key).status_code == 503
        server.worker_client.draining = False


def test_a_stream_waits_for_a_full_queue_and_lets_others_in() -> None:
    runner = FakeRunner()
    body = "".join(f'"t{n}"\n' for n in range(40))
    with (
        serving(lambda: runner, max_queue_size=4) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        runner.gate.clear()
        queue = server.worker_client.queue
        others = [pool.submit(httpx.post, server.url, content=f"o{n}") for n in range(4)]
        wait_until(lambda: queue.pending == 4)
        stream = pool.submit(post, server, body)
        wait_until(lambda: bool(queue._waiting_for_room) or queue.pending > 4)
        runner.gate.set()
        assert [answer["echo"] for answer in stream.result()] == [f"t{n}" for n in range(40)]
        assert [other.result().status_code for other in others] == [200] * 4
        runner.gate.clear()
        stream = pool.submit(post, server, body)
        wait_until(lambda: queue.pending == 2)  # the share of a client
        bystander = pool.submit(httpx.post, server.url, content="bystander")
        wait_until(lambda: queue.pending == 3)
        before = len(runner.batches)
        runner.gate.set()
        assert bystander.result().status_code == 200
        assert len(stream.result()) == 40
        served = [n for n, batch in enumerate(runner.batches) if "bystander" in batch]
        assert served[0] <= before + 1


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_disconnect_empties_the_queue(http: Parser) -> None:
    runner = FakeRunner()
    with serving(lambda: runner, http=http) as server:
        for reset in (False, True):
            runner.gate.clear()
            client = Client(server)
            client.send(*(f"t{n}" for n in range(5000)))
            assert runner.entered.acquire(timeout=60)
            if reset:
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.close()
            runner.gate.set()
            wait_until(lambda: not server.worker_client.queue.items)
            wait_until(lambda: not server.uvicorn.server_state.connections)
            served = sum(map(len, runner.batches))
            assert post(server, b'"after"') == [{"echo": "after"}]
            assert served < 5000
            runner.batches.clear()
            while runner.entered.acquire(blocking=False):
                pass


def test_a_late_line_is_an_error_and_the_stream_goes_on() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server:
        timers = ManualTimers(server)
        runner.gate.clear()
        with Client(server) as client:
            client.send("held")
            assert runner.entered.acquire(timeout=60)
            timers.fire(within_s=100)
            assert client.answer()["error"]["code"] == "deadline_exceeded"
            runner.gate.set()
            client.send("next")
            assert client.answer() == {"echo": "next"}


def test_a_body_that_stops_arriving_ends_the_stream_behind_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    with serving(FakeRunner, body_timeout_s=0.2) as server, Client(server) as client:
        client.send("one")
        client.socket.sendall(chunk(b'"two'))
        [answer, error] = client.rest()
        assert answer == {"echo": "one"}
        assert (error["error"]["code"], error["error"]["line"]) == ("body_timeout", 2)
        assert "this line and those after it were not served" in error["error"]["message"]


def test_a_stopping_server_answers_what_it_has_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    runner = FakeRunner()
    with serving(lambda: runner) as server:
        runner.gate.clear()
        with Client(server) as client:
            client.send(*(f"t{n}" for n in range(500)))
            assert runner.entered.acquire(timeout=60)
            loop = server.worker_client.loop
            wait_until(lambda: len(server.worker_client.queue.items) == 2)
            loop.call_soon_threadsafe(server.worker_client.start_draining)
            wait_until(lambda: server.worker_client.draining)
            runner.gate.set()
            *answers, error = client.rest()
            assert answers == [{"echo": "t0"}, {"echo": "t1"}]
            assert (error["error"]["code"], error["error"]["line"]) == ("draining", 3)


def test_answers_wait_in_a_file_while_the_client_only_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.2)
    monkeypatch.setattr(spool, "MAX_BUFFER", 1 << 16)
    runner = FakeRunner()
    runner.finish = lambda item, raw: b'{"echo": "%b"}' % (b"x" * 20_000)  # type: ignore[method-assign]
    with serving(lambda: runner) as server:
        sent: list[int] = []

        def is_served(count: int) -> bool:
            return sum(map(len, runner.batches)) > count

        def body() -> Iterator[bytes]:
            for n in range(1000):  # 20 MB of answers: more than the sockets hold
                sent.append(n)
                yield b'"a"\n'
                wait_until(partial(is_served, n - 600))

        response = httpx.post(server.url, content=body(), headers=NDJSON, timeout=60)
        assert [len(answer["echo"]) for answer in lines_of(response)] == [20_000] * 1000
        assert len(sent) == 1000


def test_a_client_that_never_reads_is_given_up_once_the_file_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    monkeypatch.setattr(spool, "MAX_BUFFER", 1 << 16)
    monkeypatch.setattr(spool, "MAX_SPOOL", 1 << 20)
    runner = FakeRunner()
    runner.finish = lambda item, raw: b'{"echo": "%b"}' % (b"x" * 200_000)  # type: ignore[method-assign]
    with serving(lambda: runner) as server:
        client = Client(server)
        stop = threading.Event()

        def send() -> None:
            try:
                while not stop.is_set():
                    client.send(*["a"] * 100)
            except OSError:
                stop.set()

        thread = threading.Thread(target=send)
        thread.start()
        assert stop.wait(60)
        thread.join()
        wait_until(lambda: not server.uvicorn.server_state.connections)
        wait_until(lambda: not server.worker_client.queue.items)
        served = sum(map(len, runner.batches))
        assert served < 1000


def test_expect_100_continue(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = CHUNKED.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        client.sendall(head)
        file = client.makefile("rb")
        assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
        client.sendall(chunk(b'"a"\n') + b"0\r\n\r\n")
        assert b'{"echo":"a"}' in file.read()


def test_embeddings_of_lines() -> None:
    path, one = "/v1/embeddings", {"input": "paris", "dimensions": 64}
    lines = ["paris", one, {"inputs": "paris"}, {"input": "a", "parameters": {"model": "x"}}]
    lines += [{"input": "a", "parameters": []}, {"inputs": "paris", "id": 1}]
    lines += [{**one, "id": "b"}, {"input": 5, "id": "c"}]
    with serving(embedding_model="demo") as server:
        expected = httpx.post(server.url + path, json={"input": "paris"}).json()
        answers = post(server, "".join(json.dumps(line) + "\n" for line in lines), path)
    vectors = [expected["data"][0]["embedding"]]
    assert answers[:3] == [expected, expected, vectors]
    assert (answers[3]["error"]["line"], answers[3]["error"]["code"]) == (4, "model_not_found")
    assert answers[4]["error"]["param"] == "parameters"
    assert answers[5:7] == [{"id": 1, "result": vectors}, {"id": "b", "result": expected}]
    assert (answers[7]["id"], answers[7]["error"]["line"]) == ("c", 8)


def test_a_stream_ends_after_a_hundred_lines_in_a_row_that_are_not_json(server: Server) -> None:
    almost = b"x\n" * 99
    answers = post(server, almost + b'"a"\n' + almost + b"[1]\n" + almost + b"x\n" * 9000)
    assert len(answers) == 300
    assert answers[99] == {"echo": "a"}
    assert answers[-2]["error"]["message"].startswith("the line is not valid JSON")
    last = answers[-1]["error"]
    assert (last["line"], last["code"]) == (300, "invalid_request")
    expected = "100 lines in a row are not JSON: this line and those after it were not served"
    assert last["message"] == expected


def test_lines_wait_for_their_turn_of_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def count(name: str) -> None:
        method = getattr(LoopBudget, name)

        async def counted(self: LoopBudget) -> None:
            counts[name] += 1
            await method(self)

        monkeypatch.setattr(LoopBudget, name, counted)

    count("wait")
    count("rest")
    assert len(post(server, b'"a"\n1\n{}\nx\n' * 5)) == 20
    assert counts == {"wait": 2 * 20, "rest": 15}  # to be parsed and answered; refused


def test_refused_lines_do_not_widen_the_window(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(LineWindow, "record", lambda self, size: recorded.append(size))
    assert len(post(server, b'1\nx\n"a"\n' * 5)) == 15
    assert len(recorded) == 5


def test_the_window_grows_as_far_as_answers_fit_into_memory() -> None:
    window = LineWindow(64)
    assert window.size == 2
    for _ in range(100):
        window.record(100)
    assert window.size == 64
    window.record(1 << 24)
    assert window.size == 2
    window.record(1 << 30)
    assert window.size == 1


def test_a_stream_reads_no_further_than_lines_start_well_within_their_time() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server, Client(server) as client:
        client.send(*["a"] * 40)
        assert len([client.answer() for _ in range(40)]) == 40  # measured, and the window has grown
        engine: Any = server.worker_client.models["pipeline"].engine
        engine.times = StepTimes()
        engine.times.learn(1, 0, 10.0)
        runner.gate.clear()
        client.send(*["slow"] * 40)
        wait_until(lambda: server.worker_client.queue.pending >= 1)
        for _ in range(20):  # turns of the event loop
            assert httpx.get(server.url + "/health").status_code == 200
        assert server.worker_client.queue.pending < 10
        runner.gate.set()
        assert len([client.answer() for _ in range(40)]) == 40
