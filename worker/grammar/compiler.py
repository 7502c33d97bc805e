"""Grammars over tokens: what an answer may be.

    Constraint or calls → Grammars (cache.py: tried, compiled, kept)
    → a copy for each choice (guide.py) → what a step's rows allow (bitmask.py) → model/sampler.py

On llguidance. What is compiled comes from clients, so that its size is bounded here, and what it
takes in trial.py. Here it is put into Lark's notation, in pool threads.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.grammar.cache import Asked, Grammar, GrammarCache
from worker.grammar.trial import Unusable
from worker.grammar.trial_process import Trials
from worker.protocol import Constraint

COMPACT = {"whitespace_flexible": False, "coerce_one_of": True}
LONGEST = 1_000_000  # characters of a grammar, tools and all
LONGEST_TEXT = {"regex": 50_000, "choice": 100_000, "grammar": 100_000}
MOST_CHOICES = 2_000
UNFIT = "answers cannot be constrained with this model's tokenizer"
REASON = 500  # characters of what the library says
# The formats of strings that llguidance holds to.
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
POSITION = re.compile(r"^at \d+\(\d+\): ")
QUOTED = re.compile(r"\s*(\d+ \||\^)")


class Grammars:
    """The grammars of one tokenizer. `rows`: the width of the model's output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: int, ends: Sequence[int]) -> None:
        self._rows, self._ends = rows, list(ends)
        self._tokenizer = tokenizer
        self._cache = GrammarCache(self._make)
        self.close = self._cache.close

    def matcher(self, constraint: Constraint) -> Grammar:
        """InvalidInput with the reason if it is none; Pending, as all that compiles."""
        rule = _rule(constraint)
        foreign = constraint.kind == "grammar"
        return self.compiled(rule if foreign else f"start: {rule}", constraint.param, foreign)

    def either(self, constraint: Constraint, calls: str) -> Grammar:
        """An answer as the constraint says, or calls by their grammar."""
        if constraint.kind != "json_schema":
            only = "goes with tools only where it asks for JSON"
            raise InvalidInput(f"{constraint.param}: {only}", constraint.param)
        lines = [f"calls: {calls.removeprefix('start:')}", f"answer: {_rule(constraint)}"]
        return self.compiled("\n".join(["start: calls | answer", *lines]), constraint.param)

    def compiled(self, grammar: str, param: str, foreign: bool = False) -> Grammar:
        """`grammar`: in Lark's notation, unless it is `foreign`."""
        try:
            return self._cache.get(self._asked(grammar, param, foreign))
        except Unusable as unusable:
            raise _unusable(str(unusable), param) from None

    def check(self, grammar: str, param: str) -> None:
        """InvalidInput if it cannot be compiled."""
        try:
            self._cache.check(self._asked(grammar, param, False))
        except Unusable as unusable:
            raise _unusable(str(unusable), param) from None

    def _asked(self, grammar: str, param: str, foreign: bool) -> Asked:
        _check_length(grammar, LONGEST, param)
        self.tokenizer(param)
        plain = grammar.replace("\\", "")
        # What stands for a special token would be forced as its text, and then not be taken.
        return Asked(grammar, foreign, not any(mark in plain for mark in self._special))

    def tokenizer(self, param: str) -> LLTokenizer:
        try:
            return self._cache.made()
        except Unusable as unusable:
            raise InvalidInput(f"{param}: {unusable}", param) from None

    def _make(self) -> tuple[LLTokenizer, Trials]:
        """Here and in the child, at the same time."""
        try:
            text = self._tokenizer.backend_tokenizer.to_str()
        except Exception:
            raise Unusable(UNFIT) from None
        trials = Trials(text, self._rows, self._ends)
        trials.start()
        try:
            made = LLTokenizer(text, n_vocab=self._rows, eos_token=self._ends or None)
        except BaseException as error:  # a panic in the library is no Exception
            trials.close()
            if isinstance(error, MemoryError):
                raise
            raise Unusable(UNFIT) from None
        return made, trials

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
    if kind in ("regex", "grammar"):
        _check_length(value, LONGEST_TEXT[kind], param)
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
    grammar: str = value
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


def _unusable(reason: str, param: str) -> InvalidInput:
    """With the library's reason, without the lines of the grammar that it quotes."""
    reason = re.split("<backtrace>|<state>|<non-verbose/>", reason)[0]
    if reason.startswith("panic:"):
        reason = "it is more than the library for grammars can take"
    said = [line for line in reason.splitlines() if not QUOTED.match(line)]
    told = " ".join(" ".join(said).split()).rstrip(": ")
    return InvalidInput(f"{param}: cannot be used: {POSITION.sub('', told)[:REASON]}", param)
