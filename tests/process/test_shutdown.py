"""SIGTERM: accepted requests finish within the grace, new ones get 503, after the delay."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import processes
from tests.processes import SERVER, is_ready, is_running, started
from tests.serving import wait_until

PROGRAM = """
    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fakes import FakeRunner

    runner = FakeRunner(lambda texts: "hold" in texts and open({held!r}).close())
    only = dict(chat_model="none", embedding_model="none")
    settings = Settings(shutdown_grace_s={grace_s}, drain_delay_s={delay_s}, **only)
    uvicorn.run(create_app(settings, lambda: runner), port=0, access_log=False)
"""


@contextmanager
def process(
    grace_s: float, held: Path, delay_s: float = 0.0, program: str = PROGRAM
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process; the text `hold` keeps its worker busy until the pipe `held` is opened."""
    os.mkfifo(held)
    command = processes.program(program, grace_s=grace_s, delay_s=delay_s, held=str(held))
    with started(command) as (child, port):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url), 60)
        yield child, url


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


def test_a_reload_ends_nothing_and_requests_are_accepted_during_the_delay(tmp_path: Path) -> None:
    """While the server is not ready."""
    with process(grace_s=60, held=tmp_path / "held", delay_s=3600) as (child, url):
        child.send_signal(signal.SIGHUP)  # without a file of keys
        assert post(url, "a").status_code == 200
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(url + "/ready").status_code == 503)
        with httpx.Client() as client:
            accepted = client.post(url, content="a")
        assert accepted.status_code == 200
        assert accepted.headers["connection"] == "close", "the next one goes to another server"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) in (0, -signal.SIGTERM)


def test_no_request_fails_behind_a_load_balancer_that_asks_for_readiness(tmp_path: Path) -> None:
    sent_after_signal = 0
    with (
        process(grace_s=60, held=tmp_path / "a", delay_s=1.0) as (child, url),
        process(grace_s=60, held=tmp_path / "b") as (_, other_url),
        httpx.Client() as client,
    ):
        ready, asked_at = [url, other_url], time.monotonic()
        for number in range(10_000):
            if time.monotonic() > asked_at + 0.2:
                ready, asked_at = [u for u in (url, other_url) if is_ready(u)], time.monotonic()
            target = ready[number % len(ready)]
            assert client.post(target, content="a").status_code == 200
            if number == 20:
                child.send_signal(signal.SIGTERM)
            sent_after_signal += number > 20 and target == url
            if child.poll() is not None:
                break
    assert child.returncode in (0, -signal.SIGTERM)
    assert sent_after_signal


LOADING = """
    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fake_generator import FakeGenerator

    loads = []

    def load():
        loads.append(1)
        if len(loads) > 1:
            open({held!r}).close()
        return FakeGenerator()

    settings = Settings(
        shutdown_grace_s={grace_s}, pipeline_model="none", embedding_model="none",
        chat_model="a=demo,b=demo",
    )
    uvicorn.run(create_app(settings, load_chat=load), port=0, access_log=False)
"""


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=60)


def model_states(url: str) -> list[str]:
    return [model["status"]["value"] for model in httpx.get(url + "/models").json()["data"]]


def test_a_load_that_hangs_does_not_outlast_the_grace(tmp_path: Path) -> None:
    with (
        process(1, tmp_path / "held", program=LOADING) as (child, url),
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = pool.submit(ask, url, "b")
        wait_until(lambda: "loading" in model_states(url))
        child.send_signal(signal.SIGTERM)
        assert waiting.result().status_code == 503
        assert child.wait(60) in (0, -signal.SIGTERM)


# A compiler that starts another process, and waits for it.
COMPILER = """\
#!/bin/sh
case "$*" in *" -c "*) ;; *) echo g++ 1.0; exit;; esac
sleep 1000 & echo $$ $! >> "$0.pids"
wait
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists processes")
def test_compilers_end_with_the_server_and_leave_nothing(tmp_path: Path) -> None:
    compiler, pids = tmp_path / "compiler", tmp_path / "compiler.pids"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    others = dict.fromkeys(("PIPELINE_MODEL", "EMBEDDING_MODEL"), "none")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [*SERVER, "--port", "0", "--compile", "on"]
    with processes.process(command, **others, **caches, CXX=str(compiler)) as child:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) % 2 == 0, 120)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) in (0, -signal.SIGTERM)
        assert not any(is_running(int(pid)) for pid in pids.read_text().split())
        assert list((tmp_path / "cache").glob("onequeue-*")) == []
