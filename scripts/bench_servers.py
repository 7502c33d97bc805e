"""The servers that the benchmarks compare, each a process of its own, on the same model.

    onequeue[@CHECKOUT][:SETTING=VALUE,…]    this checkout or another one, with its defaults or not

A server that is up but not being measured stands still, so that it takes no processor time.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the scripts that import this module and the package
START_S = 400  # compiling included


class Launch(NamedTuple):
    command: list[str]
    port: int
    ready: str  # the path that says that it is up; any status will do for a peer's
    environ: dict[str, str]
    folder: Path = ROOT


class Server(NamedTuple):
    name: str
    port: int
    process: "subprocess.Popen[bytes]"

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run meanwhile; otherwise it stands still."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


def onequeue(name: str, port: int, settings: dict[str, str]) -> Launch:
    where, _, changed = name.partition(":")
    folder = Path(where.partition("@")[2] or ROOT).resolve()
    pairs = (part.partition("=") for part in changed.split(",") if part)
    settings = settings | {setting: value for setting, _, value in pairs}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    return Launch(command, port, "/ready", {"HF_HUB_OFFLINE": "1"} | settings, folder)


def is_ours(name: str) -> bool:
    return name.startswith("onequeue")


@contextmanager
def running(name: str, launch: Launch) -> Iterator[Server]:
    """A server that has answered, and has compiled what it compiles; not awake."""
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
            deadline = time.monotonic() + START_S
            while not is_up(launch):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode()[-2000:]
                    raise SystemExit(f"{launch.command} did not start:\n{said}")
                time.sleep(0.2)
            os.killpg(child.pid, signal.SIGSTOP)
            yield Server(name, launch.port, child)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have died by itself
                os.killpg(child.pid, signal.SIGTERM)
                os.killpg(child.pid, signal.SIGCONT)
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)


def is_up(launch: Launch) -> bool:
    """Peers have compiled when they answer; ours says whether it still does."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{launch.port}{launch.ready}", timeout=5
        ) as answer:
            return launch.ready != "/ready" or json.load(answer).get("compile") != "running"
    except urllib.error.HTTPError:
        return launch.ready != "/ready"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def others_cpu_s(ours: set[int]) -> float:
    """CPU seconds that all processes have used so far but those of these sessions."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()  # from the third on
            ticks += 0 if int(fields[3]) in ours else int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def say(**measured: Any) -> None:
    print(json.dumps(measured), flush=True)


def load(port: int, path: str, *flags: str) -> dict[str, Any]:
    """What scripts/load_test.py measures; the benchmark ends where requests fail."""
    command = [sys.executable, "scripts/load_test.py", f"http://127.0.0.1:{port}{path}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if measured["errors"]:
        said = measured["first_errors"]
        raise SystemExit(f"errors under load: {measured['statuses']} {said}")
    return measured
