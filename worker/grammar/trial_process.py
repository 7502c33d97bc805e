"""The server's end of trial.py: the process in which grammars are tried, and its verdicts.

Started with the first grammar, and again if it has died. It ends when its pipe does: with `close`,
with its owner, or with this process, however that ends. One caller at a time.
"""

import contextlib
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from worker.grammar import trial


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str | None = None  # why it cannot be used
    grammar: str | None = None  # as it is to be compiled, where it was foreign
    size: int = 0  # bytes that it takes


class Trials:
    def __init__(self, tokenizer: str, rows: int, ends: Sequence[int]) -> None:
        """`tokenizer`: its file's text."""
        self._told = {"tokenizer": tokenizer, "rows": rows, "ends": list(ends) or None}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Trials] | None = None
        self._closed = False

    def attempt(self, grammar: str, foreign: bool, forcing: bool, cpu_s: float) -> Verdict:
        """OSError if there can be no such process."""
        asked = {"grammar": grammar, "foreign": foreign, "forcing": forcing, "cpu_s": cpu_s}
        for _ in range(2):
            try:
                process = self._process or self.start()
                assert process.stdin is not None
                assert process.stdout is not None
                trial.send(process.stdin, asked)
                told = trial.receive(process.stdout)
            except (OSError, EOFError):  # it has been killed, not by a grammar
                self._drop()
                continue
            return Verdict(told.get("reason"), told.get("grammar"), told.get("bytes", 0))
        raise OSError("the process that tries grammars ends at once")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def close(self) -> None:
        """From any thread."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._end:
            self._end()
        self._process = None

    def start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise OSError("it is closed")
        # By its file, from which nothing else is imported: `worker` may not be on the path. In a
        # session of its own, so that a terminal's signals do not reach it.
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", trial.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, process)
        assert process.stdin
        trial.send(process.stdin, self._told)
        return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what it did not read
            if pipe:
                pipe.close()
