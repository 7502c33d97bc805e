"""The log of a start: its format, the address, a command that works, and its access log."""

import json
import logging
import shlex
import signal
from typing import Any

import httpx
import pytest
import uvicorn

from server.core.log import configure_log, uvicorn_config
from server.lifespan import curl_command
from tests.fakes import FakeRunner
from tests.processes import pipe, program, started
from tests.serving import serving, wait_until

FAKE = """
    import uvicorn
    from server.app import create_app
    from server.core.log import uvicorn_config
    from server.core.settings import Settings
    from tests.fakes import FakeRunner

    app = create_app(Settings(chat_model="none", embedding_model="none"), FakeRunner)
    uvicorn.run(app, port=0, log_config=uvicorn_config())
"""


def test_a_start_logs_the_address_a_command_and_the_drain() -> None:
    with started(program(FAKE)) as (child, port):
        url = f"http://127.0.0.1:{port}"
        lines = []
        for line in pipe(child.stderr):
            lines.append(line)
            if " try curl" in line:
                break
        httpx.get(url + "/health")
        httpx.get(url + "/metrics?name=a")
        assert lines[-1].endswith(f": try curl {url}/, or a browser\n")
        [line] = [line for line in httpx.get(url).text.splitlines() if line.startswith("curl")]
        command = shlex.split(line)
        assert command[:3] == ["curl", url + "/", "-d"]
        assert httpx.post(command[1], content=command[3]).status_code == 200
        child.send_signal(signal.SIGINT)
        rest = pipe(child.stderr).read()
    [line] = [line for line in rest.splitlines() if " path=/ " in line and "POST" in line]
    assert " INFO onequeue.access request id=" in line
    assert " status=200 seconds=" in line
    assert "HTTP/1.1" not in rest, "uvicorn's access log is off"
    assert "/health" not in rest
    assert "/metrics" not in rest
    assert "a second signal, or Ctrl-C, ends the wait" in rest
    for line in (*lines, *rest.splitlines()):
        assert line.split()[2] in ("INFO", "WARNING"), line  # after the date and the time


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"port": 9000}, "curl http://127.0.0.1:9000/"),
        ({"host": "0.0.0.0"}, "curl http://localhost:8000/"),
        ({"host": "::1"}, "curl http://[::1]:8000/"),
        ({"uds": "/run/q"}, "curl --unix-socket /run/q http://localhost/"),
    ],
)
def test_the_logged_address_can_be_called(config: dict[str, Any], wanted: str) -> None:
    server_config = uvicorn.Config("a:b", log_config=uvicorn_config(), **config)
    assert curl_command(uvicorn.Server(server_config)) == wanted


@pytest.mark.parametrize("configured", ["LOG_FORMAT=json", "--log-format"])
def test_every_line_is_json_if_asked_for(configured: str) -> None:
    code = FAKE.replace("embedding_model=", 'log_format="json", embedding_model=')
    if configured == "--log-format":  # as the command configures uvicorn
        code = code.replace("uvicorn_config()", 'uvicorn_config("json")')
    with started(program(code)) as (child, port):
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200)
        headers = {"x-request-id": "my-id"}
        httpx.post(f"http://127.0.0.1:{port}/", content="a", headers=headers)
        child.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in pipe(child.stderr)]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    [line] = [line for line in lines if line["message"] == "request"]
    assert line["id"] == "my-id"
    assert line["status"] == 200
    assert line["prompt_tokens"] == 1


@pytest.mark.parametrize(("names", "level"), [([], logging.INFO), (["warning"], logging.WARNING)])
def test_our_log_has_uvicorns_level(
    names: list[str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    our_logger = logging.Logger("our_logger")
    uvicorn_logger = logging.Logger("uvicorn.error")
    for name in names:
        uvicorn_logger.setLevel(name.upper())
    empty = logging.Logger("others")
    loggers = {"onequeue": our_logger, "uvicorn.error": uvicorn_logger}
    monkeypatch.setattr(logging, "getLogger", lambda name="": loggers.get(name, empty))
    configure_log()
    assert our_logger.level == level


def test_the_icon_version_and_ping_need_no_key() -> None:
    with serving(FakeRunner, api_keys=("k",)) as server:
        assert httpx.get(server.url + "/version").json().keys() == {"version"}
        wait_until(lambda: httpx.get(server.url + "/ping").status_code == 200)
        assert httpx.get(server.url + "/favicon.ico").headers["content-type"] == "image/svg+xml"
        assert httpx.get(server.url + "/openapi.json").status_code == 401
