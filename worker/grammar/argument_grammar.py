"""Rules for arguments that are not written as JSON, in Lark's notation, from a tool's schema.

    schemas  --schema_analysis.py-->  facts of each way to fit them  -->  a rule of each type that
    is left

They hold to what JSON's are held to by llguidance: types, choices, what is required, bounds,
patterns, formats, numbers of items. A schema that nothing fits has no rule, which is "".
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.lark import Quote, frame, schema_rule, terminal
from worker.grammar.one_of import exclusive
from worker.grammar.schema_analysis import Document, SchemaAnalysis, branches, kind_of, list_in
from worker.grammar.string_formats import FORMATS
from worker.text.tool_call_format import ArgumentFormat

MOST_DEPTH = 64  # of alternatives within alternatives
DEFINITIONS = ("$defs", "definitions")
MOST = 1 << 31  # that anything is counted to
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
HELD = {  # keywords that bound a type
    "string": {"pattern", "minLength", "maxLength", "format"},
    **{"integer": NUMBERS, "fraction": NUMBERS},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
}
# What is read as a type, where a text might stand without quotes.
LIKE = dict.fromkeys(("integer", "fraction"), r"\s*[+-]?[0-9.][0-9._eE+-]*[ \t]*(\n(?s:.*))?")
LIKE |= {"array": r"\s*[\[(](?s:.*)", "object": r"\s*\{(?s:.*)"}
ANY = "(?s:.*)"
# A JSON value, in the ways that templates write it.
LOOSE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
LOOSE |= {"lenient": True}
SINGLE = r"/'([^'\\\n]|\\.)*'/"
WORDS = {
    "python": {"boolean": "/True|False|true|false/", "null": '"None"'},
    "typed": {"boolean": "/true|false/", "null": '"null"'},
    "raw": {"boolean": "/[Tt]rue|[Ff]alse/", "null": '"null"'},
}
Bounds = tuple[int, float]
KEY = r'/[^\s:{}<>"]+/ ":"'  # any, where texts have quotes of their own


class ArgumentGrammar:
    """Those of one tool. `made`: where rules are put that others refer to."""

    def __init__(
        self, form: ArgumentFormat, quote: Quote, made: list[str], parameters: Any
    ) -> None:
        self._root = exclusive(parameters) if isinstance(parameters, dict) else {}
        self._definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        self._document = Document(self._root)
        self._known: dict[tuple[int, ...], str] = {}  # rules by the schemas that they are of
        self._form, self._quote, self._made = form, quote, made
        self._notation = "python" if form.style == "python" else "typed" if form.quotes else "raw"

    def arguments(self) -> str:
        """All of them, as entries in their order; InvalidInput with the reason."""
        try:
            written = self._written()
        except RecursionError:
            raise InvalidInput("it is nested too deeply") from None
        if not written:
            raise InvalidInput("its schema allows no arguments at all")
        return f"({' | '.join(written)})"

    def _written(self) -> list[str]:
        comma, written = self._form.comma, []
        for facts in self._ways([self._root, {"type": "object"}]):
            if (entries := self._members(facts, self._entry)) is not None:
                written.append(self._sequence([*entries.values()], comma))
                by_key = [entries[key] for key in sorted(entries)]
                if self._notation == "typed" and by_key != [*entries.values()]:  # some sort them
                    written.append(self._sequence(by_key, comma))
        return written

    def _frame(self, text: str) -> str:
        return frame(text, self._quote)

    def _ways(self, schemas: Sequence[Any]) -> Iterator[SchemaAnalysis]:
        return branches(SchemaAnalysis(self._document, schemas, MOST_DEPTH))

    def _members(
        self, facts: SchemaAnalysis, written: Callable[[str, Sequence[Any]], str]
    ) -> dict[str, tuple[str, bool]] | None:
        """Entries by their keys, and whether they must be there; None if one cannot be."""
        found = {}
        for key in facts.declared | facts.required:
            if entry := written(key, facts.member(key).schemas):
                found[key] = entry, key in facts.required
            elif key in facts.required:
                return None
        return found

    def _entry(self, key: str, schemas: Sequence[Any]) -> str:
        """A key and its value, between what stands around them."""
        form, middle = self._form, "=" if self._notation == "python" else self._form.middle
        before, after = self._quote(form.open + key + middle), self._frame(form.close)
        if self._notation != "raw":
            value = self._value(schemas)
            return value and f"{before} {value} {after}"
        written = []
        for facts in self._ways(schemas):
            others = facts.kinds
            if "string" in facts.kinds and facts.values is None:
                others -= {"string"}
                held = [kind for kind in sorted(others) if _held(kind, facts)]
                written.append(self._text(form.close, facts, held))
                if not held and not _held("string", facts):  # it may read as anything
                    continue
            if either := self._each(facts, others):
                written.append(f"({' | '.join(either)}) {after}")
        return self._rule(f"{before} ({' | '.join(written)})") if written else ""

    # ── rules ──

    def _rule(self, body: str, name: str = "rule") -> str:
        self._document.spend()
        name = f"{name}_{len(self._made)}"
        self._made.append(f"{name}{'[lazy]' if name.startswith('text') else ''}: {body}")
        return name

    def _value(self, schemas: Sequence[Any]) -> str:
        """What fits all of these; it may refer to itself."""
        key = tuple(dict.fromkeys(map(id, schemas)))
        if key not in self._known:
            name = self._known[key] = f"value_{len(self._made)}_{len(self._known)}"
            branches = self._ways(schemas)
            either = [each for facts in branches for each in self._each(facts, facts.kinds)]
            self._made += [f"{name}: {' | '.join(either)}"] if either else []
            self._known[key] = name if either else ""
        return self._known[key]

    def _sequence(self, entries: Sequence[tuple[str, bool]], comma: str) -> str:
        """In their order; those that are not required may be left out."""
        between = self._frame(comma)
        if not between:
            return " ".join(entry if must else f"({entry})?" for entry, must in entries)
        first, rest = "", ""  # of what follows, where nothing or something stands before it
        needed = False  # one of them
        for entry, must in reversed(entries):
            needed |= must
            entry = self._rule(entry)
            following = f"{between} {entry}" if must else f"({between} {entry})?"
            alone = f"{entry} {rest}"
            first = self._rule(alone if must or not first else f"{alone} | {first}")
            first = first if needed else f"({first})?"
            rest = self._rule(f"{following} {rest}")
        return first

    # ── each type ──

    def _each(self, facts: SchemaAnalysis, kinds: frozenset[str]) -> list[str]:
        """The ways to write what fits and is of these types."""
        if facts.values is not None:
            fit = (value for value in facts.values.values() if kind_of(value) in kinds)
            return [each for value in fit for each in self._constant(value)]
        if "fraction" in kinds:
            kinds = kinds - {"fraction", "integer"} | {"number"}
        return [each for kind in sorted(kinds) for each in self._of(kind, facts)]

    def _of(self, kind: str, facts: SchemaAnalysis) -> list[str]:
        if word := WORDS[self._notation].get(kind):
            return [word]
        if self._notation == "typed" and kind == "string":
            return [f"{self._frame(self._form.quotes)} {self._text(self._form.quotes, facts)}"]
        if self._notation == "typed" and kind == "array":
            return self._array(facts)
        if self._notation == "typed" and kind == "object":
            return self._object(facts)
        written = [self._json({"allOf": facts.parts, "type": kind})]
        free = kind == "string" and not _held(kind, facts)
        return [*written, SINGLE] if free and self._notation == "python" else written

    def _json(self, schema: dict[str, Any]) -> str:
        written = schema_rule(schema, LOOSE)
        if '"$ref"' in written:
            written = schema_rule({**schema, **self._definitions}, LOOSE)
        self._document.spend(len(written) // 20)
        return written

    def _constant(self, value: Any) -> list[str]:
        """A choice, in the ways to write it."""
        if self._notation == "python":
            return [self._quote(json.dumps(value)), self._quote(repr(value))]
        return [self._quote(self._shown(value))]

    def _shown(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._form.quotes}{value}{self._form.quotes}"
        if self._notation == "typed" and isinstance(value, list):
            return f"[{','.join(map(self._shown, value))}]"
        if self._notation == "typed" and isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._shown(each)}' for key, each in value.items())}}}"
        return json.dumps(value)

    def _array(self, facts: SchemaAnalysis) -> list[str]:
        own = max(1, *(len(list_in(part, "prefixItems")) for part in facts.every_part), 1)
        *first, more = (self._value(facts.item(place).schemas) for place in range(own + 1))
        return self._repeated("[]", first, more, _between("array", facts))

    def _object(self, facts: SchemaAnalysis) -> list[str]:
        def member(key: str, schemas: Sequence[Any]) -> str:
            value = self._value(schemas)
            return value and f"{self._quote(key + ':')} {value}"

        if (entries := self._members(facts, member)) is None:
            return []
        if entries:
            return [f'"{{" {self._sequence([*entries.values()], ",")} "}}"']
        other = self._value(facts.member("").schemas)
        entry = other and f"{KEY} {other}"
        return self._repeated("{}", [entry], entry, _between("object", facts))

    def _repeated(self, around: str, first: Sequence[str], more: str, bounds: Bounds) -> list[str]:
        """Between so many of them; the first ones each by its rule, then more by another."""
        own = first.index("") if "" in first else len(first)
        least, most = bounds
        most = most if more and own == len(first) else min(most, own)
        if least > most:
            return []
        written = ""
        if most > own:
            written = f'("," {more}){_times(max(0, least - own), most - own)}'
        for place in reversed(range(int(min(own, most)))):
            comma = '"," ' if place else ""
            written = f"{comma}{first[place]} {written}"
            written = written if place < least else f"({written})?"
        return [f'"{around[0]}" {written} "{around[1]}"']

    # ── texts ──

    def _text(self, close: str, facts: SchemaAnalysis, others: Sequence[str] = ()) -> str:
        """Any text up to what closes it, as far as the schema goes; not what reads as one of these
        other types."""
        bare = self._frame(close.lstrip())
        special = bare.startswith("<[")  # a token, which is no text
        end = "" if special else re.escape(close.rstrip())
        rest = bare if special else self._frame(close[len(close.rstrip()) :])
        least, most = _between("string", facts)
        held = [*self._patterns(facts)]
        if not (special or held or others or least > 0 or most < inf):
            return f"{self._rule(terminal(ANY + end), 'text')} {rest}"
        letter = "(?s:.)" if special else f"[^{re.escape(close.strip()[0])}]"
        parts = [f"{letter}{_times(least, most)}{end}", *(f"({each}){end}" for each in held)]
        unlike = [f"~{terminal(LIKE[kind] + end)}" for kind in others]
        return f"{self._rule(' & '.join([*map(terminal, parts), *unlike]), 'TEXT')} {rest}"

    @staticmethod
    def _patterns(facts: SchemaAnalysis) -> Iterator[str]:
        """What all of a text must match."""
        for part in facts.every_part:
            if isinstance(pattern := part.get("pattern"), str):
                ends = pattern.endswith("$") and not pattern.endswith(r"\$")
                before, after = "" if pattern.startswith("^") else ANY, "" if ends else ANY
                found = pattern.removeprefix("^")
                yield f"{before}({found[: len(found) - ends]}){after}"
            if (named := part.get("format")) in FORMATS:
                yield FORMATS[named]


def _held(kind: str, facts: SchemaAnalysis) -> bool:
    return any(HELD.get(kind, set()) & part.keys() for part in facts.parts)


def _between(kind: str, facts: SchemaAnalysis) -> Bounds:
    (least, _), (most, _) = facts.bounds(kind)
    return int(min(max(least, 0), MOST)), most


def _times(least: int, most: float) -> str:
    return f"{{{least},{'' if most == inf else int(most)}}}"
