"""Processes that tests start: commands, programs of a few lines, and servers."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

ROOT = Path(__file__).parents[1]
SERVER = [sys.executable, "-m", "server", "serve"]


def run(command: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=300
    )


@contextmanager
def process(command: Sequence[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | env, stdin=pipe, stderr=pipe, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def started(command: Sequence[str], **env: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a process that listens, and its port; its model may still be loading."""
    with process(command, **env) as child:
        running = next(line for line in pipe(child.stderr) if "Uvicorn running on" in line)
        yield child, int(running.split(" (")[0].rpartition(":")[2])


def pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def program(code: str, **values: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code).format(**values)]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
