"""Compiles and caches the llguidance grammars that constrain outputs.

    a pool thread requests one → Grammar, an error, or Pending: request again when called back
    the grammar thread: check in a child process (sandbox.py) → compile → cache → call back
    Grammar → a copy for each choice (constraints.py) → the masks of a step (bitmask.py)

Equal grammars are compiled once. Clients have theirs compiled in turn. One that no request waits
for any more is dropped. A grammar has MAX_CPU_S for all: both compilations, and its late masks.
"""

import hashlib
import logging
import re
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput, OnequeueError, QueueFull, WorkerDown
from worker.grammar import lark, sandbox
from worker.grammar.sandbox import GrammarSandbox, Unusable
from worker.messages.generation import Constraint
from worker.messages.protocol import IsWanted, Notify, Pending

log = logging.getLogger("onequeue.grammar")

MAX_CACHED = 32  # compiled grammars; least recently used ones are evicted
# Of all that are cached or in use. A client has at most half of what those of others leave, since
# memory in use cannot be taken back.
MAX_BYTES = 1 << 30
MAX_USES = 200  # of one: its copies share the lexer's states, which are bounded
MAX_RESULTS = 1_000  # of the sandbox, that are cached
MAX_QUEUED = 64  # of a client
MAX_CPU_S = 5.0  # of a grammar: both compilations, each at most half, and late masks
ERROR_TTL_S = 1.0  # of an error that may not recur
TOO_SLOW = "computing the next token takes too long"
UNSUPPORTED_TOKENIZER = "constrained decoding does not support this model's tokenizer"
UNAVAILABLE = "constrained decoding is temporarily unavailable"

T = TypeVar("T")

# The client of the request that a pool thread prepares.
compiling_for: ContextVar[Hashable] = ContextVar("compiling_for", default=None)


@dataclass(eq=False)
class Grammar:
    """A compiled grammar; each output follows a copy of its matcher."""

    matcher: LLMatcher
    size: int = 0  # bytes
    client: Hashable = None  # whose memory it is
    uses: int = 0
    cpu_s: float = 0.0  # of compilation and late masks
    is_slow: bool = False  # its last mask was late
    too_slow: bool = False  # it has taken all of its CPU time, and is used no more


@dataclass(eq=False)
class _Task:
    """A grammar to check and compile, as arguments of `to_lark`; without a digest, the tokenizer
    to create."""

    text: str = ""
    is_client_grammar: bool = False
    forces_text: bool = True
    compiles: bool = False  # False: check only
    digest: bytes = b""  # the cache key
    client: Hashable = None  # that requested it first
    # For each request: whether it still waits, and its callback.
    waiting: list[tuple[IsWanted, Notify]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether a request waits. An empty list: one is about to."""
        return not self.waiting or any(is_wanted() for is_wanted, _ in self.waiting)


class GrammarCompiler:
    """The grammars of one tokenizer. `vocab_size`: of the model's logits. llguidance's tokenizer
    takes a second for a large vocabulary, and is created with the first grammar."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._pretrained, self._vocab_size = tokenizer, vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._loaded: tuple[LLTokenizer, GrammarSandbox] | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of grammars that passed the sandbox
        # With the monotonic time until which an error that may not recur is raised: to all requests
        # that waited, and to those that come right after them.
        self._errors: OrderedDict[bytes, tuple[str | OnequeueError, float]] = OrderedDict()
        self._tasks: dict[bytes, _Task] = {}
        self._has_thread = False
        self._turns: dict[Hashable, int] = {}  # of clients: how many turns had passed at their last
        self._closed = False

    # ── in pool threads: all raise InvalidInput with the reason, or Pending ──

    def compile_constraint(self, constraint: Constraint, before: str = "") -> Grammar:
        """`before`: Lark rules of the text that may stand before the content."""
        rule = lark.content_rule(constraint)
        if constraint.kind == "grammar":
            return self.compile(rule, constraint.param, is_client_grammar=True)
        grammar = f"start: {before}answer\nanswer: {rule}" if before else f"start: {rule}"
        return self.compile(grammar, constraint.param)

    def compile(self, grammar: str, param: str, is_client_grammar: bool = False) -> Grammar:
        """Return a compiled Lark grammar. A client's grammar may be GBNF."""
        task = self._task(grammar, param, is_client_grammar, compiles=True)
        with self._lock:
            cached = self._cache.pop(task.digest, None)
            if cached and cached.too_slow:
                _store(self._errors, task.digest, (TOO_SLOW, 0.0))
            elif cached and cached.uses < MAX_USES:
                cached.uses += 1
                self._cache[task.digest] = cached
                return cached
            raise self._error(task, param) or self._enqueue(task)

    def check(self, grammar: str, param: str) -> None:
        """Raise if a Lark grammar cannot be compiled."""
        task = self._task(grammar, param, False, compiles=False)
        with self._lock:
            if task.digest not in self._sizes:
                raise self._error(task, param) or self._enqueue(task)

    def tokenizer(self, param: str) -> LLTokenizer:
        with self._lock:
            if self._loaded is None:
                raise self._error(_Task(), param) or self._enqueue(_Task())
            return self._loaded[0]

    def quote(self, text: str) -> str:
        """Return a text as Lark literals, and special tokens in it by their ids."""
        parts = self._special_pattern.split(text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else lark.string_literal(part)
            for part in parts
            if part
        )

    @property
    def special_ids(self) -> list[int]:
        return sorted(self._special.values())

    @cached_property
    def _special(self) -> dict[str, int]:
        """The ids of tokens that a grammar's text never matches."""
        tokenizer = self.tokenizer("tools")
        added = self._pretrained.get_added_vocab()
        return {token: id_ for token, id_ in added.items() if tokenizer.is_special_token(id_)}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _task(self, grammar: str, param: str, is_client_grammar: bool, compiles: bool) -> _Task:
        lark.check_length(grammar, param)
        self.tokenizer(param)
        unescaped = grammar.replace("\\", "")
        # llguidance would force a special token as its text, which the matcher then rejects.
        forces_text = not any(token in unescaped for token in self._special)
        key = f"{is_client_grammar}{forces_text}{grammar}".encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(key).digest()
        return _Task(grammar, is_client_grammar, forces_text, compiles, digest)

    def _error(self, task: _Task, param: str) -> OnequeueError | None:
        error, until = self._errors.get(task.digest, (None, 0.0))
        if isinstance(error, str):
            self._errors.move_to_end(task.digest)
            if not task.digest:  # the tokenizer
                return InvalidInput(f"{param}: {error}", param)
            return lark.unusable_grammar(error, param)
        return error if time.monotonic() < until else None

    def _enqueue(self, new: _Task) -> Pending:
        task = self._tasks.get(new.digest)
        if task is None:
            new.client = compiling_for.get()
            queued = sum(task.client == new.client for task in self._tasks.values())
            if queued >= MAX_QUEUED:
                raise QueueFull("too many grammars are waiting to be compiled", MAX_CPU_S)
            task = self._tasks[new.digest] = new
        task.compiles |= new.compiles
        try:
            if not self._has_thread and not self._closed:
                sandbox.start_with_large_stack(self._work)  # it waits for the lock
                self._has_thread = True
        except RuntimeError as error:
            del self._tasks[new.digest]
            raise WorkerDown(UNAVAILABLE, 5) from error
        return Pending(lambda _, is_wanted, notify: self._wait(task, is_wanted, notify))

    def _wait(self, task: _Task, is_wanted: IsWanted, notify: Notify) -> None:
        with self._lock:
            if self._tasks.get(task.digest) is task:
                task.waiting.append((is_wanted, notify))
                return
        notify()  # the task has just finished

    def close(self) -> None:
        self._closed = True
        if self._loaded:
            self._loaded[1].close()

    # ── the grammar thread, which ends without tasks ──

    def _work(self) -> None:
        while (task := self._next()) is not None:
            failure: str | OnequeueError | None = None
            try:
                self._run(task)
            except Unusable as unusable:
                failure = str(unusable)
            except OnequeueError as error:
                failure = error
            except BaseException as error:  # a panic in llguidance is no Exception
                if not self._closed:
                    log.exception("bug in the grammar thread")
                failure = WorkerDown(UNAVAILABLE, 5)
                failure.__cause__ = error
            with self._lock:
                if failure is not None:
                    until = time.monotonic() + ERROR_TTL_S
                    _store(self._errors, task.digest, (failure, until))
                del self._tasks[task.digest]
            for _, notify in task.waiting:
                notify()

    def _next(self) -> _Task | None:
        with self._lock:
            for unwanted in [task for task in self._tasks.values() if not task.wanted]:
                del self._tasks[unwanted.digest]
            if self._tasks and not self._closed:
                task = min(self._tasks.values(), key=lambda task: self._turns.get(task.client, -1))
                self._turns[task.client] = max(self._turns.values(), default=0) + 1
                return task
            self._has_thread = False
            self._turns.clear()
            return None

    def _run(self, task: _Task) -> None:
        if not task.digest or self._loaded is None:
            self._load_tokenizer()
            return
        tokenizer, grammar_sandbox = self._loaded
        client_lark, size = None, self._sizes.get(task.digest)
        if size is None:
            reason, client_lark, size = grammar_sandbox.check(
                task.text, task.is_client_grammar, task.forces_text, MAX_CPU_S / 2
            )
            if reason == sandbox.STALLED:  # a later request tries again
                raise WorkerDown(UNAVAILABLE, 5)
            if reason is not None:
                raise Unusable(reason)
            if not task.is_client_grammar:  # the sandbox converts those, each time
                _store(self._sizes, task.digest, size)
        if task.compiles:
            self._make_room(size, task.client)
            text = client_lark or sandbox.to_lark(
                task.text, task.is_client_grammar, task.forces_text
            )
            started_s = time.thread_time()
            matcher = sandbox.compile_grammar(tokenizer, text)
            cpu_s = 2 * (time.thread_time() - started_s)  # that of the sandbox included
            grammar = Grammar(matcher, size, task.client, uses=1, cpu_s=cpu_s)
            grammar.matcher.deep_copy().compute_bitmask()  # copies share the lexer's first states
            with self._lock:
                self._cache[task.digest] = grammar
                self._alive.add(grammar)

    def _load_tokenizer(self) -> None:
        """Create the tokenizer here and in the sandbox, at the same time."""
        try:
            text = self._pretrained.backend_tokenizer.to_str()
            grammar_sandbox = GrammarSandbox(text, self._vocab_size, self._stop_token_ids)
            grammar_sandbox.start()
            tokenizer = LLTokenizer(
                text, n_vocab=self._vocab_size, eos_token=self._stop_token_ids or None
            )
        except (OSError, MemoryError):
            raise
        except BaseException:  # a panic in llguidance is no Exception
            raise Unusable(UNSUPPORTED_TOKENIZER) from None
        self._loaded = tokenizer, grammar_sandbox
        if self._closed:
            grammar_sandbox.close()

    def _make_room(self, size: int, client: Hashable) -> None:
        with self._lock:
            while len(self._cache) >= MAX_CACHED:
                self._cache.popitem(last=False)
            # the client's own first
            for digest in sorted(self._cache, key=lambda key: self._cache[key].client != client):
                if self._has_room(size, client):
                    return
                del self._cache[digest]
            if not self._has_room(size, client):
                raise QueueFull("the memory for compiled grammars is exhausted", 5)

    def _has_room(self, size: int, client: Hashable) -> bool:
        used = Counter[Hashable]()
        for grammar in self._alive:
            used[grammar.client] += grammar.size
        return used[client] + size <= (MAX_BYTES - used.total() + used[client]) // 2


def _store(cache: OrderedDict[bytes, T], digest: bytes, result: T) -> None:
    cache[digest] = result
    if len(cache) > MAX_RESULTS:
        cache.popitem(last=False)
