"""A stranger's grammar is tried here first, in another process.

    compiler.py: GrammarSandbox ═ pipe ═▶ main: a fork for each grammar, limited → its SandboxResult

Nothing stops the library once it compiles, and a small schema can ask for hours and all memory. So
this file runs as a program (`main`), without torch: it makes the tokenizer once, then tries each
grammar in a fork that the kernel ends when it takes too much. `to_lark`, `compile_grammar` and
`with_large_stack` are what the server does with those that pass.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

# Every copy of a grammar learns while it is followed; these bound a step of it, and what it keeps.
LIMITS = LLParserLimits(
    max_items_in_row=5_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
)
STACK_BYTES = 1 << 29  # of address space; a chain of references as long as LONGEST fits
MEMORY_BYTES = 192 << 20  # for one grammar, its stack not counted
ARENA_BYTES = 128 << 20  # of address space, that a thread's allocator sets aside
WALL_S = 20.0  # on a busy machine; the limit proper is on CPU time
STEPS = 12  # that are tried after compiling: the lexer is made as it is needed
SURE = 32  # tokens of a step, where they must come: before a call's arguments there are some
STEP_S = 0.1  # of CPU time for what is done once a token
NICE = 10  # the model goes first
TOO_LONG = "it takes too long to compile"
TOO_SLOW = "it takes too long to be followed"
TOO_LARGE = "it takes too much memory, or is nested too deeply"
TOO_COMPLEX = "it is too complex to be followed, or asks for a text without end"
ANY_BIT = re.compile(rb"[^\0]")


class Unusable(Exception):
    """With the reason."""


class SandboxResult(NamedTuple):
    reason: str | None = None  # why it cannot be used
    lark: str | None = None  # as it is to be compiled, where it was foreign
    size: int = 0  # bytes that it takes


def to_lark(grammar: str, foreign: bool, forcing: bool) -> str:
    """As it is compiled. `foreign`: in a client's notation, GBNF perhaps. `forcing`: whether
    the library may work out as text what must come."""
    lark: str = any_to_lark(grammar) if foreign else grammar
    return lark if forcing else f'%llguidance {{"no_forcing": true}}\n{lark}'


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """`grammar`: in Lark's notation."""
    made = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if made.is_error():
        raise Unusable(made.get_error())
    return made


def with_large_stack(run: Callable[[], None]) -> threading.Thread:
    """A started thread, for the library's recursion."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


_starting = threading.Lock()  # the stack's size is the whole process's setting


class GrammarSandbox:
    """The server's end: the process in which grammars are tried.

    Started with the first grammar, and again if it has died. It ends when its pipe does: with
    `close`, with its owner, or with the server, however that ends. One caller at a time.
    """

    def __init__(self, tokenizer: str, rows: int, ends: Sequence[int]) -> None:
        """`tokenizer`: its file's text."""
        self._tokenizer = (tokenizer, rows, list(ends) or None)
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarSandbox] | None = None
        self._closed = False

    def attempt(self, grammar: str, foreign: bool, forcing: bool, cpu_s: float) -> SandboxResult:
        """OSError if there can be no such process."""
        for _ in range(2):
            with contextlib.suppress(OSError, EOFError):  # it has been killed, not by a grammar
                process = self._process or self.start()
                _send(process.stdin, (cpu_s, grammar, foreign, forcing))
                return SandboxResult(*_receive(process.stdout))
            self._drop()
        raise OSError("the process that tries grammars ends at once")

    def start(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise OSError("it is closed")
        # By its file, which imports nothing of ours: `worker` may not be on the path. In a session
        # of its own, so that a terminal's signals do not reach it.
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, process)
        _send(process.stdin, self._tokenizer)
        return process

    def close(self) -> None:
        """From any thread."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._end:
            self._end()
        self._process = None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError), process:  # what it did not read
        process.kill()


def _send(pipe: IO[bytes] | None, message: Sequence[Any]) -> None:
    """A line of JSON."""
    assert pipe is not None
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> list[Any]:
    """EOFError when the other side has ended."""
    assert pipe is not None
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return list(json.loads(line))


# ── the program ──


def main() -> None:
    """The tokenizer comes first, then grammars, each answered before the next."""
    requests, verdicts = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        text, rows, ends = _receive(requests)
        tokenizer = LLTokenizer(text, n_vocab=rows, eos_token=ends)
        while True:
            _send(verdicts, _in_a_fork(tokenizer, *_receive(requests)))


def _in_a_fork(tokenizer: LLTokenizer, cpu_s: float, *asked: Any) -> Sequence[Any]:
    ours, its = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(0)  # the pipes are the parent's: they end with it
            os.close(1)
            _limit(cpu_s)
            with os.fdopen(its, "wb") as pipe:
                _send(pipe, _verdict(tokenizer, *asked))
        finally:
            os._exit(0)
    os.close(its)
    verdict: Sequence[Any] = ()
    with os.fdopen(ours, "rb") as pipe, contextlib.suppress(EOFError):
        verdict = _receive(pipe)
    _, status = os.waitpid(pid, 0)
    out_of_time = os.waitstatus_to_exitcode(status) in (-signal.SIGPROF, -signal.SIGALRM)
    return verdict or SandboxResult(TOO_LONG if out_of_time else TOO_LARGE)


def _limit(cpu_s: float) -> None:
    """Beyond any of these the kernel ends this process, whatever it is doing."""
    os.nice(NICE)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if used := _memory()[0]:
        most = used + STACK_BYTES + ARENA_BYTES + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            size, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    page = resource.getpagesize()
    return int(size) * page, int(resident) * page


def _verdict(tokenizer: LLTokenizer, grammar: str, foreign: bool, forcing: bool) -> SandboxResult:
    verdict = SandboxResult(TOO_LARGE)
    before = _memory()[1]

    def attempt() -> None:
        nonlocal verdict
        try:
            lark = to_lark(grammar, foreign, forcing)
            _follow(compile_grammar(tokenizer, lark))
            size = max(0, _memory()[1] - before)
            verdict = SandboxResult(None, lark if foreign else None, size)
        except Exception as error:  # whatever makes it no grammar
            if not isinstance(error, MemoryError):
                verdict = SandboxResult(str(error) or type(error).__name__)

    with_large_stack(attempt).join()
    return verdict


def _follow(matcher: LLMatcher) -> None:
    """A few tokens that the grammar allows, as an answer would follow it; else Unusable."""
    chance = random.Random(0)
    for _ in range(STEPS):
        mask = _in_time(matcher.compute_bitmask)
        if "NoExtension" in f"{matcher.stop_reason()} {matcher.get_error()}":
            raise Unusable("no text fits it")
        if matcher.is_error() or not ANY_BIT.search(mask):
            break
        sure = _in_time(matcher.compute_ff_tokens)[:SURE]
        for token in sure or [_any_of(mask, chance)]:
            _in_time(partial(matcher.validate_tokens, [token]))
            _in_time(partial(matcher.consume_token, token))
        if matcher.is_stopped():
            break
    if matcher.is_error():
        raise Unusable(TOO_COMPLEX)


def _any_of(mask: bytes, chance: random.Random) -> int:
    found = ANY_BIT.search(mask, chance.randrange(len(mask))) or ANY_BIT.search(mask)
    assert found is not None
    byte = mask[found.start()]
    return found.start() * 8 + chance.choice([bit for bit in range(8) if byte >> bit & 1])


def _in_time(run: Callable[[], Any]) -> Any:
    started = time.thread_time()
    made = run()
    if time.thread_time() - started > STEP_S:
        raise Unusable(TOO_SLOW)
    return made


if __name__ == "__main__":
    main()
