"""Grammars over tokens: what an answer may be, and which tokens may come next in one.

    Constraint or calls → Grammars (compiled, cached) → a copy for each choice (guide.py)
    → what a step's rows allow (masks.py) → sampling.py

On llguidance. Compiling is done in pool threads.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.payloads import Constraint

COMPACT: Any = {"whitespace_flexible": False}
KEPT = 128  # compiled grammars, the ones used last
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
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """To be copied for use; InvalidInput with the library's reason if it is none."""
        try:
            grammar = _grammar(constraint)
        except ValueError as error:
            raise _unusable(str(error), constraint.param) from None
        return self.compiled(grammar, constraint.param)

    def either(self, constraint: Constraint, calls: str) -> LLMatcher:
        """An answer as the constraint says, or calls by their grammar."""
        if constraint.kind != "json_schema":
            only = "goes with tools only where it asks for JSON"
            raise InvalidInput(f"{constraint.param}: {only}", constraint.param)
        known = _without_unknown_formats(_object(constraint))
        schema = json.dumps({**known, "x-guidance": COMPACT})
        lines = [f"calls: {calls.removeprefix('start:')}", f"answer: %json {schema}"]
        return self.compiled("\n".join(["start: calls | answer", *lines]), constraint.param)

    def compiled(self, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return known
        made = LLMatcher(self.tokenizer(param), grammar, log_level=0)
        probe = made.deep_copy()
        probe.compute_bitmask()
        if probe.is_error() or probe.is_stopped():
            raise _unusable(made.get_error() or "no text fits it", param)
        with self._lock:
            self._known[grammar] = made
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
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
            f"<[{self._special[part]}]>"
            if part in self._special
            else json.dumps(part, ensure_ascii=False)
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


def _grammar(constraint: Constraint) -> str:
    value = constraint.value
    if constraint.kind == "json_schema":
        schema = json.dumps(_without_unknown_formats(_object(constraint)))
        return LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if constraint.kind == "choice":
        alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
        return LLMatcher.grammar_from_lark(f"start: {alternatives}")
    return LLMatcher.grammar_from_lark(any_to_lark(value))


def _object(constraint: Constraint) -> dict[str, Any]:
    if not isinstance(constraint.value, dict):
        raise InvalidInput(f"{constraint.param}: must be an object", constraint.param)
    return constraint.value


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
    said = [line for line in reason.splitlines() if not QUOTED.match(line)]
    told = " ".join(" ".join(said).split()).rstrip(": ")
    return InvalidInput(f"{param}: cannot be used: {POSITION.sub('', told)[:REASON]}", param)
