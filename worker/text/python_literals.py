"""Python's literals, and JSON's, which models mix in the arguments of a call."""

import ast
import math
import re
from collections.abc import Iterator
from typing import Any

DEEPEST = 100
PYTHON = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<name>[^\W\d][\w./$@-]*|[$@][\w./$@-]+)
    |(?P<sign>[\[\](){},:=]))""",
    re.VERBOSE | re.DOTALL,
)
WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
WORDS |= dict.fromkeys(("None", "null", "none"))


class Literals:
    """A text's, one after the other; ValueError where there is none. Words without quotes are
    texts."""

    def __init__(self, text: str) -> None:
        self._tokens = self._split(text)
        self._depth = 0
        self.next()

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, str]]:
        text, at = text.rstrip(), 0
        while at < len(text):
            match = PYTHON.match(text, at)
            if match is None or match.lastgroup is None:
                raise ValueError(f"at {at}")
            yield match.lastgroup, match[match.lastgroup]
            at = match.end()
        yield "end", ""

    def next(self) -> tuple[str, str]:
        taken = getattr(self, "token", ("", ""))
        self.token = next(self._tokens, ("end", ""))
        return taken

    def takes(self, sign: str) -> bool:
        if self.token == ("sign", sign):
            self.next()
            return True
        return False

    def must(self, sign: str) -> None:
        if not self.takes(sign):
            raise ValueError(f"no {sign}")

    def end(self) -> None:
        if self.token[0] != "end":
            raise ValueError("more follows")

    def value(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("too deep")
        made = self._value()
        self._depth -= 1
        return made

    def _value(self) -> Any:
        kind, text = self.next()
        if kind == "text":
            return _text(text)
        if kind == "number":
            number = float(text) if {*text.lower()} & {*".e"} else int(text)
            if not math.isfinite(number):
                raise ValueError("no number of JSON")
            return number
        if kind == "name":
            return WORDS.get(text, text)
        if text in ("[", "("):
            return self._items("]" if text == "[" else ")")
        if text == "{":
            return self._members()
        raise ValueError(f"no value: {text}")

    def _items(self, close: str) -> list[Any]:
        made: list[Any] = []
        while not self.takes(close):
            if made:
                self.must(",")
                if self.takes(close):
                    break
            made.append(self.value())
        return made

    def _members(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self.takes("}"):
            if made:
                self.must(",")
                if self.takes("}"):
                    break
            key = self.value()
            self.must(":")
            made[str(key)] = self.value()
        return made


def _text(literal: str) -> str:
    """It may have several lines."""
    quotes = literal[0] * 2
    try:
        return str(ast.literal_eval(quotes + literal + quotes))
    except (SyntaxError, ValueError):
        return literal[1:-1]


def literal(text: str) -> Any:
    """The one that a text is."""
    reader = Literals(text)
    made = reader.value()
    reader.end()
    return made
