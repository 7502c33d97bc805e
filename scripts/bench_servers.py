"""Starting and stopping the servers that the benchmarks compare, each a process of its own."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S = 400  # compiling included


def say(**measured: Any) -> dict[str, Any]:
    print(json.dumps(measured), flush=True)
    return measured


@contextmanager
def running(command: list[str], port: int, ready: str, environ: dict[str, str]) -> Iterator[None]:
    """A server process that has answered `ready` (a path; any status for a peer's)."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_S
            while not answers(f"http://127.0.0.1:{port}{ready}", any_status=ready != "/ready"):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{command} did not start:\n{log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have died by itself
                os.killpg(child.pid, 15)
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, 9)


def answers(url: str, any_status: bool) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError:
        return any_status
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
