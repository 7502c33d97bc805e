"""SIGTERM: accepted requests finish within the grace, new ones get 503."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.serving import wait_until

ROOT = Path(__file__).parents[2]

PROGRAM = """
    import socket, uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fakes import FakeRunner

    runner = FakeRunner(lambda texts: "hold" in texts and open({held!r}).close())
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    only = dict(chat_model="none", embedding_model="none")
    app = create_app(Settings(shutdown_grace_s={grace_s}, **only), lambda: runner)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


@contextmanager
def process(grace_s: float, held: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process; the text `hold` keeps its worker busy until the pipe `held` is opened."""
    os.mkfifo(held)
    code = textwrap.dedent(PROGRAM).format(grace_s=grace_s, held=str(held))
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        wait_until(lambda: is_ready(url), 60)
        yield child, url
    finally:
        child.kill()
        child.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


def post(url: str, text: str) -> httpx.Response:
    return httpx.post(url, content=text, timeout=60)


def depth(url: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("onequeue_queue_depth ")
    )


def test_accepted_work_is_finished_and_new_work_refused(tmp_path: Path) -> None:
    with (
        process(grace_s=600, held=tmp_path / "held") as (child, url),
        ThreadPoolExecutor(4) as pool,
    ):
        accepted = [pool.submit(post, url, "hold")]
        wait_until(lambda: depth(url) == 1)
        accepted += [pool.submit(post, url, text) for text in ("a", "b")]
        wait_until(lambda: depth(url) == 3)
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(url + "/ready").status_code == 503)
        refused = post(url, "new")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert httpx.get(url + "/health").status_code == 200
        (tmp_path / "held").open("w").close()
        assert [response.result().status_code for response in accepted] == [200] * 3
        assert child.wait(60) in (0, -signal.SIGTERM)


def test_requests_that_outlast_the_grace_get_503(tmp_path: Path) -> None:
    with (
        process(grace_s=0.5, held=tmp_path / "held") as (child, url),
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(post, url, "hold")
        wait_until(lambda: depth(url) == 1)
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert accepted.result().status_code == 503
        assert time.monotonic() - started < 25  # the default is 30
        assert child.wait(60) in (0, -signal.SIGTERM)  # a busy worker thread does not block exit


def test_a_second_signal_ends_the_drain_at_once(tmp_path: Path) -> None:
    with (
        process(grace_s=3600, held=tmp_path / "held") as (child, url),
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(post, url, "hold")
        wait_until(lambda: depth(url) == 1)
        child.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(url + "/ready").status_code == 503)
        child.send_signal(signal.SIGINT)
        assert accepted.result().status_code == 503
        child.wait(60)
