"""The processes that compile end with the server."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.serving import wait_until
from worker import compilers

PARENT = (
    "import subprocess, sys; "
    "child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux lists processes")


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Yield a process and its child; it has a group of its own, as compilers have."""
    monkeypatch.setattr(compilers, "ending", threading.Event())
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout
    with parent:
        yield parent.pid, int(parent.stdout.readline())
        parent.kill()


def test_the_processes_of_processes_are_found(family: tuple[int, int]) -> None:
    assert {*family} <= {*compilers.descendants(os.getpid())}
    assert compilers.descendants(family[0]) == [family[1]]


def test_ended_ones_are_not_found() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid not in compilers.descendants(os.getpid())
    child.wait()


def test_all_are_ended_and_builds_are_waited_for(
    family: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = compilers.descendants

    def only_family(pid: int) -> list[int]:  # not the fixtures of other tests
        return [pid for pid in listed(pid) if pid in family]

    monkeypatch.setattr(compilers, "descendants", only_family)
    ended = threading.Event()

    def build() -> None:
        with compilers.build():
            os.waitpid(family[0], 0)
            ended.set()

    thread = threading.Thread(target=build)
    thread.start()
    wait_until(lambda: compilers._builds == {thread})
    monkeypatch.setattr(compilers, "END_S", 60)
    compilers.end_compilers()
    assert compilers.ending.is_set()
    assert ended.is_set()
    assert not compilers.descendants(family[0])
    thread.join()
