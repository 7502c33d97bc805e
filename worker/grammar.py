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
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.payloads import Constraint

COMPACT: Any = {"whitespace_flexible": False}
KEPT = 128  # compiled grammars, the ones used last
REASON = 500  # characters of what the library says


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
        schema = json.dumps({**_object(constraint), "x-guidance": COMPACT})
        lines = [f"calls: {calls.removeprefix('start:')}", f"answer: %json {schema}"]
        return self.compiled("\n".join(["start: calls | answer", *lines]), constraint.param)

    def compiled(self, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return known
        made = LLMatcher(self.tokenizer(param), grammar, log_level=0)
        if made.is_error():
            raise _unusable(made.get_error(), param)
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
        added = self._tokenizer.get_added_vocab()
        special = {t: i for t, i in added.items() if self.tokenizer("").is_special_token(i)}
        marks = "|".join(re.escape(t) for t in sorted(special, key=len, reverse=True))
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _grammar(constraint: Constraint) -> str:
    value = constraint.value
    if constraint.kind == "json_schema":
        schema = json.dumps(_object(constraint))
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


def _unusable(reason: str, param: str) -> InvalidInput:
    return InvalidInput(f"{param}: cannot be used: {reason[:REASON]}", param)
