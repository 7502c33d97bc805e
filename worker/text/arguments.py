"""Arguments that are not written as JSON, read from the text of a call: Python's, and entries.

What is written does not always tell a text from a number; then the tool's schema does. Models mix
Python's literals with JSON's and with words without quotes, so that `ast` does not read them.
"""

import ast
import json
import math
import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from worker.text.call_form import Arguments
from worker.text.parameter_types import Tools, Types, type_of

DEEPEST = 100
BACKSLASH, ESCAPES = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuUN01234567\n"
BARE_KEY = re.compile(r'(?<=[{,])([^":,{}\[\]]+):')

TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<call>[\w.:/-]{1,128}+(?<!:)(?=\s*+\())
    |(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<word>[^\W\d][\w./$@-]*|[$@][\w./$@-]+)
    |(?P<sign>\S)""",
    re.VERBOSE | re.DOTALL,
)
END = ""  # the last sign
WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
WORDS |= dict.fromkeys(("None", "null", "none"))
NUMBERS = ("integer", "number")

Calls = list[tuple[str, dict[str, Any]]]


# ── entries ──


def entries(form: Arguments, text: str, declared: Types) -> dict[str, Any]:
    """Up to what does not go on; ValueError where there is none."""
    if form.quotes:
        return _typed(form, text)
    entry, opens, at = _entry(form), form.open.strip(), 0
    found = {}
    while (start := text.find(opens, at)) >= 0 and (match := entry.match(text, start)):
        if not (key := match["key"].strip()):
            break
        found[key] = value(match["value"], declared.get(key, ()))
        at = match.end()
    if text.strip() and not found:
        raise ValueError("no entries")
    return found


@cache
def _entry(form: Arguments) -> re.Pattern[str]:
    """With any space where the middle has some. A line feed on either side of the value is not
    part of it, where the form writes one."""
    parts = form.middle.split() or [form.middle]
    middle = r"\s*+".join(map(re.escape, parts))
    before, after = "\n?" * form.middle.endswith("\n"), "\n?" * form.close.startswith("\n")
    return re.compile(
        rf"{re.escape(form.open.strip())}(?P<key>(?:(?!{re.escape(parts[0])}).)++){middle}"
        rf"{before}(?P<value>.*?){after}{re.escape(form.close.strip())}",
        re.DOTALL,
    )


def _typed(form: Arguments, text: str) -> dict[str, Any]:
    parts = text.split(form.quotes)
    if len(parts) % 2 == 0:
        raise ValueError("a text does not end")
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    parts[0] = "{" + parts[0]
    for n in range(0, len(parts), 2):
        parts[n] = BARE_KEY.sub(lambda key: f"{json.dumps(key[1].strip())}:", parts[n])
    made = literal("".join(parts) + "}")
    assert isinstance(made, dict)
    return made


def value(text: str, types: Collection[str]) -> Any:
    """Of a text that may be a text, or JSON, or what Python shows of it; none of the types: it may
    be of any."""
    if types == {"string"}:
        return text
    stripped, may_be_text = text.strip(), "string" in types
    for read in (_json, literal):
        try:
            made = read(stripped)
        except (ValueError, RecursionError):
            continue
        kind = type_of(made)
        if may_be_text and (kind == "string" or (read is literal and kind in NUMBERS)):
            return text  # as it is, with its quotes, space, or a number's leading zeros
        if not types or kind in types or (kind == "integer" and "number" in types):
            return made
        whole = isinstance(made, float) and made.is_integer()
        if whole and "integer" in types and not may_be_text:
            return int(made)
    return text


def _json(text: str) -> Any:
    """With integers of any size."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(written: str) -> float:
    """ValueError for numbers that JSON cannot show."""
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written} is not of JSON")
    return number


# ── Python ──


def literal(text: str) -> Any:
    """The one that a text is, of Python or JSON; ValueError where it is none. Words without quotes
    are texts."""
    reader = _Reader(text)
    made = reader.value()
    reader.must(END)
    return made


def python_calls(text: str, tools: Tools, cut: bool) -> Calls:
    """Of `[name(key=value, …), …]`; ValueError where it is none. `cut`: it may end too early, with
    the calls that are whole."""
    made: Calls = []
    try:
        for call in _Reader(text).calls(tools):
            made.append(call)  # those before an error count
    except ValueError:
        if not (cut and made):
            raise
    return made


class _Reader:
    """Follows tokens; ValueError where they are not what must come."""

    def __init__(self, text: str) -> None:
        self._tokens = ((str(m.lastgroup), m[0]) for m in TOKEN.finditer(text))
        self._token = next(self._tokens, ("sign", END))
        self._depth = 0

    def calls(self, tools: Tools) -> Iterator[tuple[str, dict[str, Any]]]:
        close = "]" if self._takes("[") else END
        for _ in self._items(close):
            kind, name = self._next()
            if kind != "call":
                raise ValueError("no name")
            self.must("(")
            yield name, self._arguments(tools.get(name, {}))
        if close:
            self.must(END)

    def value(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("too deep")
        made = self._value()
        self._depth -= 1
        return made

    def must(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"no {sign}")

    def _next(self) -> tuple[str, str]:
        taken, self._token = self._token, next(self._tokens, ("sign", END))
        return taken

    def _word(self) -> str:
        kind, word = self._next()
        if kind != "word":
            raise ValueError("no name")
        return word

    def _takes(self, sign: str) -> bool:
        if self._token != ("sign", sign):
            return False
        self._next()
        return True

    def _items(self, close: str) -> Iterator[None]:
        """A turn for each, up to what closes them."""
        while not self._takes(close):
            yield
            if self._takes(close):
                return
            self.must(",")

    def _arguments(self, declared: Types) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for _ in self._items(")"):
            key = self._word()
            self.must("=")
            made[key] = self._typed(declared.get(key, ()))
        return made

    def _typed(self, types: Collection[str]) -> Any:
        """Some models quote all values, some none."""
        kind, _ = self._token
        if kind == "number" and "string" in types and not {*types} & {*NUMBERS}:
            return self._next()[1]
        made = self.value()
        quoted = kind == "text" and types and "string" not in types
        return value(made, types) if quoted else made

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "text":
            return _unquoted(text)
        if kind == "number":
            return _finite(text) if {*text} & {*".eE"} else int(text)
        if kind == "word":
            return WORDS.get(text, text)
        if text == "{":
            return {self._key(): self.value() for _ in self._items("}")}
        if text and text in "[(":
            return [self.value() for _ in self._items("]" if text == "[" else ")")]
        raise ValueError(f"no value: {text}")

    def _key(self) -> str:
        key = self.value()
        self.must(":")
        return str(key)


def _unquoted(written: str) -> str:
    """It may have several lines, and backslashes that are none of Python's."""
    quotes = written[0] * 2
    known = BACKSLASH.sub(lambda found: "\\" * (found[1] not in ESCAPES) + found[0], written)
    try:
        return str(ast.literal_eval(quotes + known + quotes))
    except (SyntaxError, ValueError):
        return written[1:-1]
