"""A separate process in which untrusted grammars are compiled first.

    compiler.py: GrammarSandbox ═ pipe ═▶ main: a limited fork for each grammar → SandboxResult

llguidance cannot be interrupted while it compiles, and a small schema can need hours and all
memory. So this file runs as a program (`main`), without torch: it creates the tokenizer once, then
compiles each grammar in a fork that the kernel ends beyond its limits. The server compiles those
that pass again, by `to_lark`, `compile_grammar` and `start_with_large_stack`.
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
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

# The lexer of every copy of a grammar grows during decoding; these bound a step, and its states.
LIMITS = LLParserLimits(
    max_items_in_row=5_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
)
STACK_BYTES = 1 << 29  # of address space; enough for a chain of references in the longest grammar
MEMORY_BYTES = 192 << 20  # for one grammar, without its stack
ARENA_BYTES = 128 << 20  # of address space that a thread's allocator reserves
WALL_S = 20.0  # generous for a busy machine: the actual limit is on CPU time
STEPS = 12  # that are decoded after compilation: the lexer is built on demand
MAX_FORCED = 32  # forced tokens of a step, such as those before a call's arguments
NICE = 10  # the model has priority
TOO_LONG = "it takes too long to compile"
STALLED = "the machine had no time for it"  # says nothing of the grammar
TOO_LARGE = "it needs too much memory, or is nested too deeply"
TOO_COMPLEX = "it is too complex, or requires text without end"
ANY_BIT = re.compile(rb"[^\0]")
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark has a colon alone


class Unusable(Exception):
    """A grammar cannot be used; the text is the reason."""


class SandboxResult(NamedTuple):
    reason: str | None = None  # why the grammar cannot be used
    lark: str | None = None  # a client grammar as it is compiled
    size: int = 0  # bytes


def to_lark(grammar: str, is_client_grammar: bool, forces_text: bool) -> str:
    """Return the grammar as it is compiled. `is_client_grammar`: it may be GBNF. `forces_text`:
    llguidance may tokenize forced text itself."""
    is_gbnf = is_client_grammar and GBNF_RULE.search(grammar)
    lark: str = gbnf_to_lark(grammar) if is_gbnf else grammar
    return lark if forces_text else f'%llguidance {{"no_forcing": true}}\n{lark}'


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar in Lark syntax; Unusable with llguidance's reason."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise Unusable(matcher.get_error())
    return matcher


def start_with_large_stack(run: Callable[[], None]) -> threading.Thread:
    """Start a thread whose stack fits llguidance's recursion."""
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


_stack_size_lock = threading.Lock()  # the stack size is a setting of the process


class GrammarSandbox:
    """The server's side: starts the process with the first grammar, and again if it died.

    The process ends with its pipe: on `close`, with its owner, or with the server, however that
    ends. Not thread-safe, except `close`.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`tokenizer`: the text of its file."""
        self._tokenizer = (tokenizer, vocab_size, list(stop_token_ids) or None)
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarSandbox] | None = None
        self._closed = False

    def check(
        self, grammar: str, is_client_grammar: bool, forces_text: bool, cpu_s: float
    ) -> SandboxResult:
        """Compile a grammar within `cpu_s` seconds of CPU time; OSError if no process starts."""
        for _ in range(2):
            with contextlib.suppress(OSError, EOFError):  # the process was killed from outside
                process = self._process or self.start()
                _send(process.stdin, (cpu_s, grammar, is_client_grammar, forces_text))
                return SandboxResult(*_receive(process.stdout))
            self._stop_process()
        raise OSError("the grammar sandbox exits immediately")

    def start(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise OSError("the grammar sandbox is closed")
        # Run by path: this file imports none of our packages, which may not be on the path. In a
        # session of its own, a terminal's signals do not reach it.
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _kill, process)
        _send(process.stdin, self._tokenizer)
        return process

    def close(self) -> None:
        """May be called from any thread."""
        self._closed = True
        self._stop_process()

    def _stop_process(self) -> None:
        if self._finalizer:
            self._finalizer()
        self._process = None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError), process:  # OSError: unread input
        process.kill()


def _send(pipe: IO[bytes] | None, message: Sequence[Any]) -> None:
    """Write a line of JSON."""
    assert pipe is not None
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> list[Any]:
    """Read a line of JSON; EOFError when the other side has ended."""
    assert pipe is not None
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return list(json.loads(line))


# ── the program ──


def main() -> None:
    """Read the tokenizer, then grammars, and answer each before the next."""
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        text, vocab_size, stop_token_ids = _receive(requests)
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=stop_token_ids)
        while True:
            _send(results, _check_in_fork(tokenizer, *_receive(requests)))


def _check_in_fork(tokenizer: LLTokenizer, cpu_s: float, *request: Any) -> Sequence[Any]:
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(0)  # the parent's pipes must end with the parent
            os.close(1)
            _set_limits(cpu_s)
            with os.fdopen(write_end, "wb") as pipe:
                _send(pipe, _check(tokenizer, *request))
        finally:
            os._exit(0)
    os.close(write_end)
    result: Sequence[Any] = ()
    with os.fdopen(read_end, "rb") as pipe, contextlib.suppress(EOFError):
        result = _receive(pipe)
    _, status = os.waitpid(pid, 0)
    reasons = {-signal.SIGPROF: TOO_LONG, -signal.SIGALRM: STALLED}
    return result or SandboxResult(reasons.get(os.waitstatus_to_exitcode(status), TOO_LARGE))


def _set_limits(cpu_s: float) -> None:
    """Have the kernel end this process beyond its limits of time and memory."""
    os.nice(NICE)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if used := _memory()[0]:
        limit = used + STACK_BYTES + ARENA_BYTES + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _memory() -> tuple[int, int]:
    """Return bytes of address space and of resident memory; zeros where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            size, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    page = resource.getpagesize()
    return int(size) * page, int(resident) * page


def _check(
    tokenizer: LLTokenizer, grammar: str, is_client_grammar: bool, forces_text: bool
) -> SandboxResult:
    result = SandboxResult(TOO_LARGE)
    before = _memory()[1]

    def compile_and_decode() -> None:
        nonlocal result
        try:
            lark = to_lark(grammar, is_client_grammar, forces_text)
            _decode_some(compile_grammar(tokenizer, lark))
            size = max(0, _memory()[1] - before)
            result = SandboxResult(None, lark if is_client_grammar else None, size)
        except Exception as error:  # anything that is wrong with the grammar
            if not isinstance(error, MemoryError):
                result = SandboxResult(str(error) or type(error).__name__)

    start_with_large_stack(compile_and_decode).join()
    return result


def _decode_some(matcher: LLMatcher) -> None:
    """Decode a few random tokens that the grammar allows; Unusable if that fails."""
    rng = random.Random(0)
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if "NoExtension" in f"{matcher.stop_reason()} {matcher.get_error()}":
            raise Unusable("no text matches it")
        if matcher.is_error() or not ANY_BIT.search(mask):
            break
        forced = matcher.compute_ff_tokens()[:MAX_FORCED]
        for token in forced or [_random_token(mask, rng)]:
            matcher.validate_tokens([token])
            matcher.consume_token(token)
        if matcher.is_stopped():
            break
    if matcher.is_error():
        raise Unusable(TOO_COMPLEX)


def _random_token(mask: bytes, rng: random.Random) -> int:
    match = ANY_BIT.search(mask, rng.randrange(len(mask))) or ANY_BIT.search(mask)
    assert match is not None
    byte = mask[match.start()]
    return match.start() * 8 + rng.choice([bit for bit in range(8) if byte >> bit & 1])


if __name__ == "__main__":
    main()
