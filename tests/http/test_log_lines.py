"""Text of clients in log lines: escaped, at most 200 characters, and no line for each value."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime

import httpx
import pytest

from server.core.log import FORMAT, JsonFormatter, OneLineFormatter, configure_log, quoted
from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import serving, wait_until

FORGED = "a\n2026-01-01 00:00:00 ERROR onequeue \x1b[31m\r\x85\u2028forged " + "x" * 10_000


class Lines(logging.Handler):
    """Collects formatted lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(OneLineFormatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    loggers = [logging.getLogger(name) for name in ("onequeue", "transformers")]
    levels = [logger.level for logger in loggers]
    loggers[0].setLevel(logging.INFO)
    loggers[1].setLevel(logging.WARNING)  # its default
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def assert_short(lines: list[str]) -> None:
    for line in lines:
        assert line.isprintable(), line
        assert len(line) < 500


def test_unknown_targets_write_no_lines(lines: list[str]) -> None:
    with serving(pipeline_model="demo", pipeline_task="fill-mask") as server:
        body = {
            "inputs": "The capital of France is [MASK].",
            "parameters": {"targets": ["paris", FORGED[:60], *map(str, range(1000, 1100))]},
        }
        response = CLIENT.post(server.url, json=body)
        assert response.status_code == 200, response.text
    assert not [line for line in lines if "target" in line or "forged" in line]


def test_errors_that_quote_a_request_are_short(lines: list[str]) -> None:
    def fail(texts: list[str]) -> None:
        if texts[0] != "fine":
            raise ValueError(texts[0])

    with serving(lambda: FakeRunner(fail)) as server:
        assert CLIENT.post(server.url, content=FORGED.encode()).status_code == 500
        path = "/" + "%0A" * 1000
        assert CLIENT.get(server.url + path).status_code == 404
    assert [line for line in lines if "forged" in line]
    assert_short(lines)


def test_a_traceback_is_one_line_of_short_parts() -> None:
    try:
        raise ValueError(FORGED + "\n" * 100_000)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "bug", (), sys.exc_info())
    line = OneLineFormatter(FORMAT).format(record)
    assert line.isprintable()
    assert len(line) < 5000
    assert "forged" in line


def test_text_of_clients_stays_one_json_line() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "refused %s", (FORGED[:60],), None)
    record.fields = {"error": FORGED + "\x7f", "tokens": 3}
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert line.isascii()
    document = json.loads(line)
    assert document["message"].startswith("refused a\\n2026")
    assert document["error"].startswith("a\\n2026")
    assert document["tokens"] == 3
    assert len(line) < 1000


def test_a_json_line_has_the_offset_from_utc() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "ready", (), None)
    time = datetime.fromisoformat(json.loads(JsonFormatter().format(record))["time"])
    assert abs(time.timestamp() - record.created) < 0.002
    assert time.tzinfo


def test_a_value_without_spaces_is_quoted_if_it_reorders_text() -> None:
    assert quoted("/\u202egpj.exe").isprintable()
    assert quoted("/wörld") == "/wörld"


def test_libraries_write_in_our_format(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers: dict[str, logging.Logger] = {}
    monkeypatch.setattr(
        logging, "getLogger", lambda name="": loggers.setdefault(name, logging.Logger(name))
    )
    configure_log("json")
    for name in ("onequeue", "opentelemetry", "asyncio"):
        [handler] = loggers[name].handlers
        assert isinstance(handler.formatter, JsonFormatter)


def access_lines(lines: list[str]) -> list[str]:
    return [line.partition(" onequeue.access ")[2] for line in lines if " onequeue.access " in line]


def test_a_requests_line_has_its_id_model_tokens_and_reason(lines: list[str]) -> None:
    with serving(load_chat=FakeGenerator) as server:
        server.app.logs_requests = True
        url, headers = server.url + "/v1/completions", {"x-request-id": "mine"}
        body = {"prompt": "long", "max_tokens": 5, "stream": True}
        assert CLIENT.post(url, json=body, headers=headers).status_code == 200
        assert CLIENT.post(url, json={"prompt": "a", "temperature": "hot"}).status_code == 400
        assert CLIENT.get(server.url + "/x%0Aforged id=1").status_code == 404
        assert CLIENT.get(server.url + "/health").status_code == 200
    completed, refused, unknown = access_lines(lines)
    assert completed.startswith("request id=mine method=POST path=/v1/completions status=200 ")
    assert "client=127.0.0.1 model=fake prompt_tokens=" in completed
    assert completed.endswith(" output_tokens=5")
    assert " status=400 " in refused
    assert "temperature" in refused.partition(" error=")[2]
    assert r"path='/x\nforged id=1' status=404 " in unknown, "the value stays in its quotes"


def test_a_background_response_has_a_line_at_its_end(lines: list[str]) -> None:
    generator = FakeGenerator()
    generator.gate.clear()
    with serving(load_chat=lambda: generator) as server:
        server.app.logs_requests = True
        body = {"input": "say a b", "background": True}
        response = CLIENT.post(
            server.url + "/v1/responses", json=body, headers={"x-request-id": "b"}
        )
        wait_until(lambda: len(access_lines(lines)) == 1)
        generator.gate.set()
        wait_until(lambda: len(access_lines(lines)) == 2)
    end = access_lines(lines)[1]
    assert end.startswith(f"background id=b response={response.json()['id']} status=completed ")
    assert " model=fake prompt_tokens=" in end
    assert " output_tokens=" in end


def test_the_line_of_a_client_that_left_has_status_499(lines: list[str]) -> None:
    with serving(load_chat=FakeGenerator) as server:
        server.app.logs_requests = True
        with contextlib.suppress(httpx.TimeoutException):
            CLIENT.post(server.url + "/v1/completions", json={"prompt": "hang"}, timeout=0.2)
        wait_until(lambda: bool(access_lines(lines)))
    [line] = access_lines(lines)
    assert " status=499 " in line
    assert "error=" in line


def test_lines_about_an_item_have_the_id_of_its_request(lines: list[str]) -> None:
    def fail(texts: list[str]) -> None:
        raise ValueError("broken")

    with serving(lambda: FakeRunner(fail)) as server:
        CLIENT.post(server.url, content="a", headers={"x-request-id": "mine"})
    assert [line for line in lines if "item failed id=mine error=" in line]
