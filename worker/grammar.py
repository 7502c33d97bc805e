"""Grammars over tokens: what an answer may be.

    Constraint or calls → Grammars (compiled, cached) → a copy for each choice (guide.py)
    → what a step's rows allow (masks.py) → sampling.py

On llguidance. Compiling is done in pool threads; what is compiled comes from clients, so that its
size is bounded, and the library's recursion gets a stack of its own.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.payloads import Constraint

COMPACT = {"whitespace_flexible": False, "coerce_one_of": True}
KEPT = 32  # compiled grammars, the ones used last
USES = 200  # of one: copies share what the lexer has learned, which is bounded
LONGEST = 1_000_000  # characters of a grammar, tools and all
LONGEST_TEXT = {"regex": 50_000, "choice": 100_000, "grammar": 100_000}
MOST_CHOICES = 2_000
LIMITS = LLParserLimits(max_items_in_row=20_000, step_max_items=500_000, verbose_errors=False)
STACK_BYTES = 1 << 29  # of address space; a chain of references as long as LONGEST fits
REASON = 500  # characters of what the library says
# The formats of strings that llguidance holds to.
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
POSITION = re.compile(r"^at \d+\(\d+\): ")
QUOTED = re.compile(r"\s*(\d+ \||\^)")

T = TypeVar("T")
_starting = threading.Lock()  # the stack's size is the whole process's setting


class Grammars:
    """The grammars of one tokenizer. `rows`: the width of the model's output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: int, ends: Sequence[int]) -> None:
        self._rows, self._ends = rows, list(ends)
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """To be copied for use; InvalidInput with the reason if it is none."""
        rule = _rule(constraint)
        grammar = rule if constraint.kind == "grammar" else f"start: {rule}"
        return self.compiled(grammar, constraint.param)

    def either(self, constraint: Constraint, calls: str) -> LLMatcher:
        """An answer as the constraint says, or calls by their grammar."""
        if constraint.kind != "json_schema":
            only = "goes with tools only where it asks for JSON"
            raise InvalidInput(f"{constraint.param}: {only}", constraint.param)
        lines = [f"calls: {calls.removeprefix('start:')}", f"answer: {_rule(constraint)}"]
        return self.compiled("\n".join(["start: calls | answer", *lines]), constraint.param)

    def compiled(self, grammar: str, param: str) -> LLMatcher:
        """`grammar`: in Lark's notation."""
        _check_length(grammar, LONGEST, param)
        with self._lock:
            made, uses = self._known.pop(grammar, (None, 0))
            if made is not None and uses < USES:
                self._known[grammar] = made, uses + 1
                return made
        made = _with_stack(lambda: self._compile(grammar, param))
        with self._lock:
            self._known[grammar] = made, 1
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        tokenizer = self.tokenizer(param)
        plain = grammar.replace("\\", "")
        if any(mark in plain for mark in self._special):
            # it would force the text by its token, and then not take it
            grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
        made = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        probe = made.deep_copy()
        probe.compute_bitmask()
        if "NoExtension" in f"{probe.stop_reason()} {probe.get_error()}":
            raise _unusable("no text fits it", param)
        if probe.is_error():
            raise _unusable(probe.get_error(), param)
        return made

    def tokenizer(self, param: str) -> LLTokenizer:
        """Made when it is first needed: a large vocabulary takes a second."""
        with self._lock:
            if self._made is None:
                try:
                    text = self._tokenizer.backend_tokenizer.to_str()
                    self._made = LLTokenizer(text, n_vocab=self._rows, eos_token=self._ends or None)
                except Exception as error:
                    why = "answers cannot be constrained with this model's tokenizer"
                    raise InvalidInput(f"{param}: {why}", param) from error
            return self._made

    def quoted(self, text: str) -> str:
        """A text in Lark's notation; special tokens stand by their ids."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _literal(part)
            for part in parts
            if part
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        """The tokens that no text of a grammar stands for."""
        made = self.tokenizer("tools")
        added = self._tokenizer.get_added_vocab()
        return {token: id_ for token, id_ in added.items() if made.is_special_token(id_)}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def schema_rule(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """A JSON schema in Lark's notation; what a client says to llguidance itself is left out."""
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _rule(constraint: Constraint) -> str:
    """What follows `start:` in Lark's notation, or a whole grammar."""
    value, kind, param = constraint.value, constraint.kind, constraint.param
    if kind == "json_schema" and not isinstance(value, dict):
        raise InvalidInput(f"{param}: must be an object", param)
    if kind == "choice" and len(value) > MOST_CHOICES:
        raise InvalidInput(f"{param}: takes at most {MOST_CHOICES} texts", param)
    try:
        rule = _notation(kind, value)
    except Exception as error:  # whatever makes it no schema, or no grammar
        raise _unusable(str(error) or type(error).__name__, param) from None
    _check_length(rule, LONGEST_TEXT.get(kind, LONGEST), param)
    return rule


def _check_length(grammar: str, longest: int, param: str) -> None:
    if len(grammar) > longest:
        raise _unusable(f"it is longer than {longest} characters", param)


def _notation(kind: str, value: Any) -> str:
    if kind == "json_schema":
        return schema_rule(_without_unknown_formats(value), COMPACT)
    if kind == "regex":
        return f"/{_slashes_escaped(value)}/"
    if kind == "choice":
        return " | ".join(map(_literal, value))
    grammar: str = any_to_lark(value)
    return grammar


def _slashes_escaped(regex: str) -> str:
    return re.sub(r"(\\.)|/|\n", lambda m: m[1] or {"/": r"\/", "\n": r"\n"}[m[0]], regex)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_unknown_formats(schema: Any) -> Any:
    """A format is a remark, not a rule, where it is not known."""
    if isinstance(schema, list):
        return [_without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "enum") else _without_unknown_formats(value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in FORMATS
    }


def _with_stack(run: Callable[[], T]) -> T:
    """In a thread with a stack of STACK_BYTES."""
    result: list[T] = []
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            result.append(run())
        except BaseException as error:  # told where it is waited for
            failure.append(error)

    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=guarded, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _unusable(reason: str, param: str) -> InvalidInput:
    """With the library's reason, without the lines of the grammar that it quotes."""
    reason = re.split("<backtrace>|<state>|<non-verbose/>", reason)[0]
    if reason.startswith("panic:"):
        reason = "it is more than the library for grammars can take"
    said = [line for line in reason.splitlines() if not QUOTED.match(line)]
    told = " ".join(" ".join(said).split()).rstrip(": ")
    return InvalidInput(f"{param}: cannot be used: {POSITION.sub('', told)[:REASON]}", param)
