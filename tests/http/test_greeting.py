"""What a start says: one form of line, an address, a request that works; and what it leaves out."""

import logging
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from server.core.log import configure_log, is_no_probe, uvicorn_config
from server.lifespan import curl
from tests.fakes import FakeRunner
from tests.process.test_start import pipe, process, program, started
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


def test_a_process_says_where_it_is_what_to_try_and_what_it_waits_for() -> None:
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
        [line] = [each for each in httpx.get(url).text.splitlines() if each.startswith("curl")]
        command = shlex.split(line)
        assert command[:3] == ["curl", url + "/", "-d"]
        assert httpx.post(command[1], content=command[3]).status_code == 200
        child.send_signal(signal.SIGINT)
        said = pipe(child.stderr).read()
    assert '"POST / HTTP/1.1" 200' in said
    assert "/health" not in said
    assert "/metrics" not in said
    assert "a second signal, or Ctrl-C, ends the wait" in said
    for line in (*lines, *said.splitlines()):
        assert line.split()[2] in ("INFO", "WARNING"), line  # behind a date and a time
        assert "startup" not in line


def test_a_socket_is_named_with_a_line_that_finds_it(tmp_path: Path) -> None:
    uds = str(tmp_path / "s")
    with process(program(FAKE.replace("port=0", f"uds={uds!r}"))) as child:
        lines = []
        for line in pipe(child.stderr):
            lines.append(line)
            if " try curl" in line:
                break
        command = lines[-1].partition(" try ")[2].removesuffix(", or a browser\n")
        done = subprocess.run(["sh", "-c", f"{command} --silent"], capture_output=True, check=True)
        assert done.stdout.startswith(b"# onequeue")
    assert command == f"curl --unix-socket {uds} http://localhost/"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"port": 9000}, "curl http://127.0.0.1:9000/"),
        ({"host": "0.0.0.0"}, "curl http://localhost:8000/"),
        ({"host": "::1"}, "curl http://[::1]:8000/"),
        ({"uds": "/run/q"}, "curl --unix-socket /run/q http://localhost/"),
    ],
)
def test_the_address_is_one_that_can_be_called(config: dict[str, Any], wanted: str) -> None:
    made = uvicorn.Config("a:b", log_config=uvicorn_config(), **config)
    assert curl(uvicorn.Server(made)) == wanted


@pytest.mark.parametrize("path", ["/health", "/metrics?name=a", "/a/prefix/ready"])
def test_probes_are_in_no_access_log(path: str) -> None:
    def logged(path: str) -> bool:
        args = ("127.0.0.1:9", "GET", path, "1.1", 200)
        return is_no_probe(logging.LogRecord("uvicorn.access", 20, "", 0, "%s", args, None))

    assert not logged(path)
    assert logged(path.replace("?", "s?") + "/of/what")


@pytest.mark.parametrize(("asked", "level"), [([], logging.INFO), (["warning"], logging.WARNING)])
def test_our_log_has_the_level_that_uvicorn_was_given(
    asked: list[str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logging.Logger("ours")
    theirs = logging.Logger("uvicorn.error")
    for name in asked:
        theirs.setLevel(name.upper())
    empty = logging.Logger("others")
    loggers = {"onequeue": ours, "uvicorn.error": theirs}
    monkeypatch.setattr(logging, "getLogger", lambda name="": loggers.get(name, empty))
    configure_log()
    assert ours.level == level


def test_an_icon_a_version_and_a_ping_need_no_key() -> None:
    with serving(FakeRunner, api_keys=("k",)) as server:
        assert httpx.get(server.url + "/version").json().keys() == {"version"}
        wait_until(lambda: httpx.get(server.url + "/ping").status_code == 200)
        assert httpx.get(server.url + "/favicon.ico").headers["content-type"] == "image/svg+xml"
        assert httpx.get(server.url + "/openapi.json").status_code == 401
