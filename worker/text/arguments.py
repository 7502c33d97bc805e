"""Arguments that are not written as JSON, read from the text of a call: Python's, and entries.

What is written does not always tell a text from a number; then the tool's schema does.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker.text.call_form import Arguments, common_start
from worker.text.python_literals import DEEPEST, WORDS, Literals, literal

BARE_KEY = re.compile(r'(?<=[{,])([^":,{}\[\]]+):')
CDATA = "<![CDATA[", "]]>"  # what some put around texts between tags

Schema = Mapping[str, Any]


def properties(tool: Schema | None) -> Schema:
    """The schemas of a tool's parameters."""
    function = tool.get("function") if tool else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    return declared if isinstance(declared, dict) else {}


# ── entries ──


def entries(form: Arguments, text: str, declared: Schema) -> dict[str, Any]:
    """ValueError where it is none."""
    if form.quotes:
        return _typed(form, text)
    found = {}
    for key, written, is_text in _split(form, text):
        found[key] = written if is_text else value(written, declared.get(key))
    if text.strip() and not found:
        raise ValueError("no entries")
    return found


def _split(form: Arguments, text: str) -> Iterator[tuple[str, str, bool]]:
    """Keys and what is written for them, up to what does not go on; whether that is sure to be a
    text. One line feed on either side is not part of it, where the form writes one."""
    opens, close = form.open.strip(), form.close.strip()
    before, *middles = form.middle.split() or [form.middle]
    text_middles = form.text_middle.split()
    at = 0
    while (start := text.find(opens, at)) >= 0:
        key_start = start + len(opens)
        shared = common_start(before, text_middles[0]) if text_middles else before
        end = text.find(shared, key_start)
        key = text[key_start:end].strip()
        as_text = _after(text, end, text_middles) if form.text_middle != form.middle else -1
        begin = max(as_text, _after(text, end, [before, *middles]))
        stop = text.find(close, begin)
        if not key or end < 0 or begin < 0 or stop < 0:
            return
        written = text[begin:stop]
        if form.middle.endswith("\n"):
            written = written.removeprefix("\n")
        if form.close.startswith("\n"):
            written = written.removesuffix("\n")
        if written.startswith(CDATA[0]) and written.endswith(CDATA[1]):
            written = written[len(CDATA[0]) : -len(CDATA[1])]
        yield key, written, as_text >= 0
        at = stop + len(close)


def _after(text: str, at: int, parts: Sequence[str]) -> int:
    """Where these parts end that stand at a place, with any space between them; -1: they do not."""
    for part in parts:
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(part, at):
            return -1
        at += len(part)
    return at


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


def value(text: str, schema: Any) -> Any:
    """Of a text that may be a text, or JSON, or what Python shows of it."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    stripped = text.strip()
    for read in (_json, literal):
        try:
            made = read(stripped)
        except (ValueError, RecursionError):
            continue
        if made is None and types and "null" not in types:
            continue
        if not types or kind(made) in types or ("number" in types and kind(made) == "integer"):
            return made
        if "integer" in types and isinstance(made, float) and made.is_integer():
            return int(made)
    return text


def _json(text: str) -> Any:
    """With integers of any size; ValueError for numbers that JSON cannot show."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not of JSON")


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        _refuse(written)
    return number


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return set()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    types = {each for each in listed if isinstance(each, str)}
    options = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if not types and isinstance(options, list):
        types = {kind(option) for option in options}
    for several in ("anyOf", "oneOf"):
        branches = schema.get(several)
        for each in branches if isinstance(branches, list) else ():
            types |= types_of(each, depth + 1)
    if schema.get("nullable"):
        types.add("null")
    return types


def kind(made: Any) -> str:
    if made is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(made), "object")


# ── Python ──


def python_calls(
    text: str, tools: Mapping[str, Schema], cut: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Of `[name(key=value, …), …]`; ValueError where it is none. `cut`: it may end too early, with
    the calls that are whole."""
    made: list[tuple[str, dict[str, Any]]] = []
    try:
        reader = _Calls(text)
        for call in reader.calls(tools):
            made.append(call)  # noqa: PERF402  # those before an error count
        reader.end()
    except ValueError:
        if not (cut and made):
            raise
    return made


class _Calls(Literals):
    def calls(self, tools: Mapping[str, Schema]) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = self.takes("[")
        first = True
        while first or self.takes(",") or self.token[0] == "name":
            first = False
            kind, name = self.next()
            if kind != "name":
                raise ValueError("no name")
            self.must("(")
            yield name, self._arguments(properties(tools.get(name)))
        if listed:
            self.must("]")

    def _arguments(self, declared: Schema) -> dict[str, Any]:
        """Those without a key are the parameters in their order."""
        made: dict[str, Any] = {}
        keys = list(declared)
        while not self.takes(")"):
            if made and not self.takes(",") and self.token[0] != "name":
                raise ValueError("no comma")
            if self.takes(")"):
                break
            word = self.next() if self.token[0] == "name" else None
            if word and self.takes("="):
                made[word[1]] = self._typed(declared.get(word[1]))
            elif len(made) < len(keys):
                made[keys[len(made)]] = WORDS.get(word[1], word[1]) if word else self.value()
            else:
                raise ValueError("an argument without a key")
        return made

    def _typed(self, schema: Any) -> Any:
        """Some models quote all values, some none."""
        kind, _ = self.token
        if kind == "number" and types_of(schema) == {"string"}:
            return self.next()[1]
        made = self.value()
        return value(made, schema) if kind == "text" and schema else made
