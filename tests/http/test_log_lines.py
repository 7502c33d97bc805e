"""Text of clients in log lines: escaped, at most 200 characters, and no line for each value."""

import logging
import sys
from collections.abc import Iterator

import pytest

from server.core.log import FORMAT, MAX_TEXT, OneLineFormatter, shorten_path
from tests.event_streams import CLIENT
from tests.fakes import FakeRunner
from tests.serving import serving

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


def test_the_access_log_shortens_paths() -> None:
    args = ("127.0.0.1:1", "GET", "/" + "x" * 60_000, "1.1", 404)
    record = logging.LogRecord("a", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
    assert shorten_path(record)
    assert len(record.getMessage()) < MAX_TEXT + 50
    assert record.getMessage().endswith(' HTTP/1.1" 404')
