"""Keys of API_KEYS_FILE over HTTP: classes, limits, names in logs, reloads."""

import hashlib
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from batching.fair_share import Priority
from server.http.access import flow_of
from tests.event_streams import CLIENT, error_of
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import Server, serving, wait_until

COMPLETIONS = "/v1/completions"
FIELDS = {
    "plain": "",
    "batch": 'priority = "batch"',
    "few": "requests_per_minute = 2",
    "short": "tokens_per_minute = 4",
    "boss": "admin = true",
    "pair": "max_parallel_requests = 2\nrequests_per_minute = 5",
}


def write(path: Path, fields: dict[str, str]) -> None:
    tables = (
        f'[keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{rest}\n'
        for name, rest in fields.items()
    )
    path.write_text("".join(tables))
    path.chmod(0o600)


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def server(tmp_path: Path, generator: FakeGenerator) -> Iterator[Server]:
    write(tmp_path / "keys.toml", FIELDS)
    file = str(tmp_path / "keys.toml")
    with serving(load_chat=lambda: generator, api_keys_file=file, metrics_keys=("m",)) as started:
        yield started


def complete(server: Server, key: str, path: str = COMPLETIONS, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"prompt": "say a b", "max_tokens": 2}
    return CLIENT.post(server.url + path, json=body, headers={"x-api-key": key, **names})


def test_a_request_runs_in_its_class_or_that_of_its_key(
    server: Server, generator: FakeGenerator
) -> None:
    assert complete(server, "plain").status_code == 200
    assert complete(server, "plain", x_priority="Background").status_code == 200
    assert complete(server, "batch").status_code == 200
    assert complete(server, "batch", x_priority="batch").status_code == 200
    assert generator.priorities == [
        Priority.INTERACTIVE,
        Priority.BACKGROUND,
        Priority.BATCH,
        Priority.BATCH,
    ]
    refused = complete(server, "batch", x_priority="interactive")
    assert (refused.status_code, error_of(refused)["code"]) == (403, "priority_not_allowed")
    for value in ("high", "", "0", "x" * 5000, "batch, batch"):
        wrong = complete(server, "plain", x_priority=value)
        assert wrong.status_code == 400
        assert "interactive, batch, background" in error_of(wrong)["message"]
        assert len(error_of(wrong)["message"]) < 200


def test_requests_beyond_the_limit_of_a_key_get_429(server: Server) -> None:
    first = complete(server, "few")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert re.fullmatch(r"\d+\.\d+s", first.headers["x-ratelimit-reset-requests"])
    assert complete(server, "few").status_code == 200
    refused = complete(server, "few")
    assert refused.status_code == 429
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "'few'" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    models = CLIENT.get(server.url + "/v1/models", headers={"x-api-key": "few"})
    assert models.status_code == 200, "what runs no model is not limited"
    assert complete(server, "plain").status_code == 200
    sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="few", max_retries=0)
    with sdk, pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="demo", prompt="a")
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    claude = CLIENT.post(server.url + "/v1/messages", json=body, headers={"x-api-key": "few"})
    assert (claude.status_code, claude.json()["error"]["type"]) == (429, "rate_limit_error")
    assert "retry-after" in claude.headers


def test_tokens_count_when_they_are_generated(server: Server) -> None:
    assert complete(server, "short").status_code == 200
    refused = complete(server, "short")
    assert refused.status_code == 429
    assert error_of(refused)["type"] == "tokens"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


def test_requests_that_run_are_limited_until_their_responses_end(
    server: Server, generator: FakeGenerator
) -> None:
    def running() -> int:
        key = server.app.keyring.find(b"pair")
        assert key
        assert key.parallel
        return key.parallel.running

    generator.one_by_one = True
    generator.permits.release(9)  # for the headers of both streams
    headers = {"x-api-key": "pair"}
    body = {"prompt": "long", "stream": True, "max_tokens": 100}
    stream = partial(CLIENT.stream, "POST", server.url + COMPLETIONS, json=body, headers=headers)
    with stream() as left:
        with stream() as first:
            assert (first.status_code, left.status_code) == (200, 200)
            refused = complete(server, "pair")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            error = error_of(refused)
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert "limit of 2 parallel requests of the key 'pair'" in error["message"]
            left_units = refused.headers["x-ratelimit-remaining-requests"]
            assert left_units == "3", "a refused one is no request"
            models = CLIENT.get(server.url + "/v1/models", headers=headers)
            assert models.status_code == 200, "what runs no model is not limited"
        wait_until(lambda: running() == 1)  # its client has left
        generator.permits.release(9)
        assert complete(server, "pair").status_code == 200
        assert complete(server, "pair", "/v1/unknown").status_code == 404
        wait_until(lambda: running() == 1)
    generator.release()


def test_a_stream_of_lines_ends_where_the_tokens_of_its_key_are_used_up(tmp_path: Path) -> None:
    write(tmp_path / "keys.toml", {"short": "tokens_per_minute = 3"})
    with serving(FakeRunner, api_keys_file=str(tmp_path / "keys.toml")) as server:
        lines = b'"a"\n' * 500
        headers = {"x-api-key": "short", "content-type": "application/x-ndjson"}
        answer = CLIENT.post(server.url + "/", content=lines, headers=headers)
        last = answer.text.splitlines()[-1]
        assert 1 <= len(answer.text.splitlines()) < 500
        assert "rate_limit_exceeded" in last


def test_metrics_need_a_key_of_their_own_or_of_an_operator(server: Server) -> None:
    statuses = {
        key: CLIENT.get(server.url + "/metrics", headers={"authorization": f"Bearer {key}"})
        for key in ("m", "boss", "plain", "other", "-")
    }
    assert [answer.status_code for answer in statuses.values()] == [200, 200, 401, 401, 401]
    assert complete(server, "m").status_code == 401
    assert CLIENT.get(server.url + "/health").status_code == 200


def test_the_name_of_a_key_is_logged_and_its_secret_is_not(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.app.logs_requests = True
    with caplog.at_level(logging.INFO, logger="onequeue.access"):
        complete(server, "batch")
        complete(server, "wrong-secret")
        wait_until(lambda: len(caplog.records) == 2)  # logged after the response
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert [line.get("key") for line in fields] == ["batch", None]
    assert "wrong-secret" not in str(fields)


def test_a_reload_takes_effect_for_the_next_request(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "keys.toml", {"new": "", "few": FIELDS["few"]})
    assert complete(server, "new").status_code == 401
    complete(server, "few")
    server.app.keyring.reload()
    assert complete(server, "new").status_code == 200
    assert complete(server, "plain").status_code == 401
    left = complete(server, "few").headers["x-ratelimit-remaining-requests"]
    assert left == "0", "the reload must keep the used units"


def flow(**headers: str) -> int:
    names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return flow_of({"headers": [*names.items()]})


def test_flows_are_named_by_a_gateway_or_a_session_and_bounded() -> None:
    assert flow() == flow(session_id="") == 0
    assert flow(session_id="a") == flow(x_session_id="a", user_agent="b") != flow(session_id="b")
    assert flow(x_llm_d_inference_fairness_id="a", session_id="b") == flow(session_id="a")
    assert flow(x_claude_code_session_id="a", x_session_id="b") == flow(session_id="a")
    numbers = {flow(session_id=f"\x00{n}" * 1000) for n in range(5000)}
    assert len(numbers | {0}) == 256


def test_requests_of_lower_classes_give_way_in_batches_too() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, max_batch_size=2) as server, ThreadPoolExecutor(9) as pool:
        runner.gate.clear()

        def post(text: str, **headers: str) -> None:
            pool.submit(CLIENT.post, server.url + "/", content=text, headers=headers)

        post("first")
        runner.entered.acquire()
        for number in range(4):
            post(f"batch{number}", **{"x-priority": "batch"})
        wait_until(lambda: server.worker_client.queue.pending == 5)
        for number in range(3):
            post(f"chat{number}")
        items = server.worker_client.queue.items
        wait_until(lambda: sum(item.arrived_at > 0 for item in items) == 8)
        runner.gate.set()
        wait_until(lambda: not server.worker_client.queue.pending)
    served = [text for batch in runner.batches for text in batch]
    chats = [n for n, text in enumerate(served) if text.startswith("chat")]
    assert len(served) == len({*served}) >= 8
    assert max(chats) <= 5, "a class has its turns, and the chats most of them"
