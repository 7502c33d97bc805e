"""Start and stop the servers that the benchmarks compare, each in a process of its own.

    onequeue[@CHECKOUT][:SETTING=VALUE,…]    this checkout or another one, with its settings

A server that is not being measured is suspended, so that it uses no CPU time.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from environment import ROOT

START_TIMEOUT_S = 400  # compilation included


class Launch(NamedTuple):
    command: list[str]
    port: int
    ready: str  # a path that answers once the server is up; a peer's may answer any status but 503
    environ: dict[str, str]
    folder: Path = ROOT


class Server(NamedTuple):
    name: str
    port: int
    process: "subprocess.Popen[bytes]"

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Let the server run inside; otherwise it is suspended."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


def onequeue(name: str, port: int, settings: dict[str, str]) -> Launch:
    """Return how to launch `onequeue[@CHECKOUT][:SETTING=VALUE,…]`; its settings come last."""
    program, _, overrides = name.partition(":")
    folder = Path(program.partition("@")[2] or ROOT).resolve()
    pairs = (part.partition("=") for part in overrides.split(",") if part)
    settings = settings | {setting: value for setting, _, value in pairs}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    return Launch(command, port, "/ready", {"HF_HUB_OFFLINE": "1"} | settings, folder)


def is_ours(name: str) -> bool:
    return name.startswith("onequeue")


@contextmanager
def running(name: str, launch: Launch) -> Iterator[Server]:
    """Start a server, wait until it is up and has compiled, and suspend it; stop it at the end."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            launch.command,
            cwd=launch.folder,
            env=os.environ | launch.environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_up(launch):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    output = log.read().decode()[-2000:]
                    raise SystemExit(f"{launch.command} did not start:\n{output}")
                time.sleep(0.2)
            os.killpg(child.pid, signal.SIGSTOP)
            yield Server(name, launch.port, child)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has exited already
                os.killpg(child.pid, signal.SIGTERM)
                os.killpg(child.pid, signal.SIGCONT)
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)


def is_up(launch: Launch) -> bool:
    """Return whether a server is ready. Peers compile before they answer; /ready reports it."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{launch.port}{launch.ready}", timeout=5
        ) as response:
            return launch.ready != "/ready" or json.load(response).get("compile") != "running"
    except urllib.error.HTTPError as error:
        return launch.ready != "/ready" and error.code != 503  # it loads the model
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def other_cpu_seconds(own_sessions: set[int]) -> float:
    """Return the CPU seconds used so far by all processes outside these sessions."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited
            fields = stat.read_text().rpartition(")")[2].split()  # from the third field on
            ticks += 0 if int(fields[3]) in own_sessions else int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def print_json(**measured: Any) -> None:
    print(json.dumps(measured), flush=True)


def run_load_test(port: int, path: str, *flags: str) -> dict[str, Any]:
    """Return the measurements of scripts/load_test.py. Failed requests end the benchmark."""
    command = [sys.executable, "scripts/load_test.py", f"http://127.0.0.1:{port}{path}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if measured["errors"]:
        errors = measured["first_errors"]
        raise SystemExit(f"errors under load: {measured['statuses']} {errors}")
    return measured
