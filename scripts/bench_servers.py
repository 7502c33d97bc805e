"""Start and stop the servers that the benchmarks compare, each in a process of its own.

    onequeue[@CHECKOUT][:SETTING=VALUE,…]    this checkout or another one, with its settings

A server that is not being measured is suspended, so that it uses no CPU time.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from environment import ROOT

T = TypeVar("T")
START_TIMEOUT_S = 400  # compilation included
LLAMA_FLAGS = ("-np", "16", "-c", "16384", "-t", "2")  # slots, their tokens in all, threads
PYTHONPATH = {"PYTHONPATH": str(ROOT)}  # of programs outside scripts/ that import the packages


class Launch(NamedTuple):
    command: list[str]
    port: int
    ready: str  # a path that answers once the server is up; a peer's may answer any status but 503
    environ: dict[str, str]
    folder: Path = ROOT


class Server(NamedTuple):
    name: str
    port: int
    process: "subprocess.Popen[bytes] | None"  # None: the library, in a process of each load

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Let the server run inside; otherwise it is suspended."""
        if self.process is None:
            yield
            return
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
    return name.startswith(("onequeue", "instant"))


def launch(
    arguments: argparse.Namespace, name: str, model: str, settings: dict[str, str]
) -> Launch:
    """Return how to launch a server; `settings` are those of onequeue."""
    port, kind = free_port(), name.partition(":")[0]
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    dtype = ["--dtype", "float32" if arguments.bench == "embeddings" else "bfloat16"]
    if kind == "vllm":
        command = [arguments.vllm, "serve", model, *dtype, "--max-model-len", "4096"]
        if arguments.bench == "embeddings":
            command = [arguments.vllm, "serve", model, *dtype, "--runner", "pooling"]
        offline["VLLM_CPU_KVCACHE_SPACE"] = "2"
    elif kind == "infinity":
        command = [name.removeprefix("infinity:"), "v2", "--model-id", model, *dtype]
        command += ["--served-model-name", model, "--engine", "torch", "--device", "cpu"]
        command += ["--url-prefix", "/v1", "--no-bettertransformer"]
    elif kind == "llama":
        gguf = str(Path(name.removeprefix("llama:")).resolve())
        command = [arguments.llama, "-m", gguf, *LLAMA_FLAGS]
    elif kind == "transformers":
        device = "cuda" if arguments.on_gpu else "cpu"
        command = [arguments.peer_python, "-m", "transformers.cli.transformers", "serve", model]
        command += ["--device", device]
        if arguments.bench != "speech":
            command += [*dtype, "--continuous-batching"]
            command += [] if arguments.on_gpu else ["--cb-max-memory-percent", "0.1"]
    elif kind == "instant":
        command = [sys.executable, "scripts/peers/serve.py", kind, str(port)]
        overrides = dict(part.split("=") for part in name.split(":")[1:])
        return Launch(command, port, "/ready", overrides | PYTHONPATH)
    elif is_ours(name):
        return onequeue(name, port, settings)
    elif kind in ("litserve", "mosec"):
        command = [arguments.peer_python, f"scripts/peers/serve_{kind}.py", model]
    else:
        command = [arguments.peer_python, "scripts/peers/serve.py", kind, *[model] * bool(model)]
    is_script = command[1].startswith("scripts/")
    command += [str(port)] if is_script else ["--port", str(port)]
    offline |= {"PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}"}
    offline |= PYTHONPATH if is_script else {}
    return Launch(command, port, "/" if is_script else "/health", offline)


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


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function whose memory and threads end with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(stats: Iterable[Path]) -> Iterator[tuple[int, int, float]]:
    """Yield the id, the session and the CPU seconds so far of processes or threads, by their
    stat files in /proc."""
    for stat in stats:
        with contextlib.suppress(OSError):  # it has exited
            fields = stat.read_text().rpartition(")")[2].split()  # from the third field on
            ticks = int(fields[11]) + int(fields[12])
            yield int(stat.parent.name), int(fields[3]), ticks / os.sysconf("SC_CLK_TCK")


def other_cpu_seconds(own_sessions: set[int]) -> float:
    """Return the CPU seconds used so far by all processes outside these sessions."""
    used = cpu_seconds(Path("/proc").glob("[0-9]*/stat"))
    return sum(seconds for _, session, seconds in used if session not in own_sessions)


def print_json(**measured: Any) -> None:
    print(json.dumps(measured), flush=True)


def command_line(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line; True stands for a flag without a value."""
    for name, value in flags.items():
        for part in value if isinstance(value, list) else [value]:
            yield from [name] if part is True else [name, str(part)]


def start_load_test(
    program: list[str], port: int, path: str, flags: Mapping[str, Any]
) -> "subprocess.Popen[str]":
    """Start scripts/load_test.py, or a program with its flags."""
    command = [sys.executable, *program, f"http://127.0.0.1:{port}{path}", *command_line(flags)]
    environ = os.environ | PYTHONPATH
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


def finish_load_test(load: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the measurements. Failed requests end the benchmark."""
    output, _ = load.communicate()
    if load.returncode:
        raise SystemExit(f"{load.args!r} failed")
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    if measured["errors"]:
        errors = measured["first_errors"]
        raise SystemExit(f"errors under load: {measured['statuses']} {errors}")
    return measured
