"""The Lark rules of arguments that are not written as JSON, from a tool's schema.

    schema  --schema_analysis.py-->  an analysis of each branch  -->  a rule of each possible type

They enforce what llguidance enforces for JSON: types, listed values, required properties, bounds,
patterns, formats and array lengths. A schema that nothing matches has no rule: "".
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.lark import Quote, format_literals, regex_terminal, schema_rule
from worker.grammar.schema_analysis import (
    SchemaAnalysis,
    SchemaDocument,
    branches,
    kind_of,
    list_in,
)
from worker.grammar.string_formats import FORMATS
from worker.text.tool_call_format import ArgumentFormat

MAX_COUNT = 1 << 31  # of repetitions
DEFINITIONS = ("$defs", "definitions")
NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
BOUNDING_KEYWORDS = {  # by kind
    "string": {"pattern", "minLength", "maxLength", "format"},
    **{"integer": NUMBER_KEYWORDS, "fraction": NUMBER_KEYWORDS},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
}
# Text that is read as a value of a kind, where a string may stand unquoted.
READS_AS = dict.fromkeys(("integer", "fraction"), r"\s*[+-]?[0-9.][0-9._eE+-]*[ \t]*(\n(?s:.*))?")
READS_AS |= {"array": r"\s*[\[(](?s:.*)", "object": r"\s*\{(?s:.*)"}
ANY = "(?s:.*)"
# JSON, with the white space that templates write.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
JSON_OPTIONS |= {"lenient": True}
SINGLE_QUOTED = r"/'([^'\\\n]|\\.)*'/"
WORDS = {  # by notation
    "python": {"boolean": "/True|False|true|false/", "null": '"None"'},
    "quoted": {"boolean": "/true|false/", "null": '"null"'},
    "raw": {"boolean": "/[Tt]rue|[Ff]alse/", "null": '"null"'},
}
ANY_KEY = r'/[^\s:{}<>"]+/ ":"'  # where strings have quotes of their own
Bounds = tuple[int, float]
Entry = tuple[str, bool]  # a rule, and whether it is required


class ArgumentGrammar:
    """The rules of one tool's arguments. `rules`: a list to which named rules are added."""

    def __init__(
        self, argument_format: ArgumentFormat, quote: Quote, rules: list[str], parameters: Any
    ) -> None:
        self._root = parameters if isinstance(parameters, dict) else {}
        self._definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        self._document = SchemaDocument(self._root)
        self._value_rules: dict[tuple[int, ...], str] = {}  # by the ids of their schemas
        self._format, self._quote, self._rules = argument_format, quote, rules
        self._notation = "quoted" if argument_format.quotes else "raw"
        if argument_format.style == "python":
            self._notation = "python"

    def arguments(self) -> str:
        """Return the rule of all arguments, as entries in order; InvalidInput with the reason."""
        try:
            alternatives = self._argument_lists()
        except RecursionError:
            raise InvalidInput("it is nested too deeply") from None
        if not alternatives:
            raise InvalidInput("its schema allows no arguments")
        return f"({' | '.join(alternatives)})"

    def _argument_lists(self) -> list[str]:
        comma, alternatives = self._format.comma, []
        for analysis in self._branches([self._root, {"type": "object"}]):
            if (entries := self._properties(analysis, self._entry)) is not None:
                alternatives.append(self._sequence([*entries.values()], comma))
                by_key = [entries[key] for key in sorted(entries)]
                if self._notation == "quoted" and by_key != [*entries.values()]:
                    alternatives.append(self._sequence(by_key, comma))  # some models sort keys
        return alternatives

    def _literals(self, text: str) -> str:
        return format_literals(text, self._quote)

    def _branches(self, schemas: Sequence[Any]) -> Iterator[SchemaAnalysis]:
        return branches(self._document, schemas)

    def _properties(
        self, analysis: SchemaAnalysis, make_entry: Callable[[str, Sequence[Any]], str]
    ) -> dict[str, Entry] | None:
        """Return entries by key; None if a required one has no possible value."""
        entries = {}
        for key in analysis.declared | analysis.required:
            if entry := make_entry(key, analysis.property_schemas(key)):
                entries[key] = entry, key in analysis.required
            elif key in analysis.required:
                return None
        return entries

    def _entry(self, key: str, schemas: Sequence[Any]) -> str:
        """Return the rule of a key and its value, with the format's text around them."""
        if self._notation == "raw":
            return self._raw_entry(key, schemas)
        middle = "=" if self._notation == "python" else self._format.middle
        before = self._quote(self._format.open + key + middle)
        value = self._value(schemas)
        return value and f"{before} {value} {self._literals(self._format.close)}"

    def _raw_entry(self, key: str, schemas: Sequence[Any]) -> str:
        close = self._format.closing(key)
        alternatives: dict[str, list[str]] = {}  # by the text before the value

        def add(kind: str, rule: str) -> None:
            json_type = "number" if kind == "fraction" else kind
            before = self._quote(self._format.opening(key, json_type))
            alternatives.setdefault(before, []).append(rule)

        for analysis in self._branches(schemas):
            others = analysis.kinds
            if "string" in analysis.kinds and analysis.values is None:
                others -= {"string"}
                bounded = [kind for kind in sorted(others) if _is_bounded(kind, analysis)]
                excluded = () if self._format.types else bounded
                add("string", self._string(close, analysis, excluded))
                is_bounded = bounded or _is_bounded("string", analysis)
                if not is_bounded and not self._format.types:
                    continue  # an unquoted string matches everything
            groups = [frozenset((kind,)) for kind in others] if self._format.types else [others]
            for kinds in groups:
                if values := self._alternatives(analysis, kinds):
                    add(min(kinds), f"({' | '.join(values)}) {self._literals(close)}")
        rules = (f"{before} ({' | '.join(values)})" for before, values in alternatives.items())
        return self._add_rule(" | ".join(rules)) if alternatives else ""

    # ── rules ──

    def _add_rule(self, body: str, name: str = "rule") -> str:
        self._document.spend()
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if name.startswith('text') else ''}: {body}")
        return name

    def _value(self, schemas: Sequence[Any]) -> str:
        """Return the name of the rule of values that match all schemas. It may be recursive."""
        key = tuple(dict.fromkeys(map(id, schemas)))
        if key not in self._value_rules:
            name = f"value_{len(self._rules)}_{len(self._value_rules)}"
            self._value_rules[key] = name
            alternatives = [
                alternative
                for analysis in self._branches(schemas)
                for alternative in self._alternatives(analysis, analysis.kinds)
            ]
            if alternatives:
                self._rules.append(f"{name}: {' | '.join(alternatives)}")
            self._value_rules[key] = name if alternatives else ""
        return self._value_rules[key]

    def _sequence(self, entries: Sequence[Entry], comma: str) -> str:
        """Return the rule of entries in their order, of which the optional ones may be missing."""
        between = self._literals(comma)
        if not between:
            return " ".join(entry if required else f"({entry})?" for entry, required in entries)
        # The rules of the remaining entries: without and with an entry before them.
        first, rest = "", ""
        any_required = False
        for entry, required in reversed(entries):
            any_required |= required
            entry = self._add_rule(entry)
            following = f"{between} {entry}" if required else f"({between} {entry})?"
            alone = f"{entry} {rest}"
            first = self._add_rule(alone if required or not first else f"{alone} | {first}")
            first = first if any_required else f"({first})?"
            rest = self._add_rule(f"{following} {rest}")
        return first

    # ── values of each kind ──

    def _alternatives(self, analysis: SchemaAnalysis, kinds: frozenset[str]) -> list[str]:
        """Return rules of the matching values of these kinds."""
        if analysis.values is not None:
            values = (value for value in analysis.values.values() if kind_of(value) in kinds)
            return [literal for value in values for literal in self._constant(value)]
        if "fraction" in kinds:
            kinds = kinds - {"fraction", "integer"} | {"number"}
        return [rule for kind in sorted(kinds) for rule in self._of_kind(kind, analysis)]

    def _of_kind(self, kind: str, analysis: SchemaAnalysis) -> list[str]:
        if word := WORDS[self._notation].get(kind):
            return [word]
        if self._notation == "quoted" and kind == "string":
            quotes = self._format.quotes
            return [f"{self._literals(quotes)} {self._string(quotes, analysis)}"]
        if self._notation == "quoted" and kind == "array":
            return self._array(analysis)
        if self._notation == "quoted" and kind == "object":
            return self._object(analysis)
        json_rule = self._json({"allOf": analysis.parts, "type": kind})
        is_free = kind == "string" and not _is_bounded(kind, analysis)
        return [json_rule, SINGLE_QUOTED] if is_free and self._notation == "python" else [json_rule]

    def _json(self, schema: dict[str, Any]) -> str:
        rule = schema_rule(schema, JSON_OPTIONS)
        if '"$ref"' in rule:
            rule = schema_rule({**schema, **self._definitions}, JSON_OPTIONS)
        self._document.spend(len(rule) // 20)
        return rule

    def _constant(self, value: Any) -> list[str]:
        """Return the literals of a listed value."""
        if self._notation == "python":
            return [self._quote(json.dumps(value)), self._quote(repr(value))]
        return [self._quote(self._write(value))]

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._format.quotes}{value}{self._format.quotes}"
        if self._notation == "quoted" and isinstance(value, list):
            return f"[{','.join(map(self._write, value))}]"
        if self._notation == "quoted" and isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._write(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    def _array(self, analysis: SchemaAnalysis) -> list[str]:
        count = max([1, *(len(list_in(part, "prefixItems")) for part in analysis.counted_parts)])
        *first, more = (self._value(analysis.item_schemas(index)) for index in range(count + 1))
        return self._repeated("[]", first, more, _bounds(analysis, "Items"))

    def _object(self, analysis: SchemaAnalysis) -> list[str]:
        def member(key: str, schemas: Sequence[Any]) -> str:
            value = self._value(schemas)
            return value and f"{self._quote(key + ':')} {value}"

        if (entries := self._properties(analysis, member)) is None:
            return []
        if entries:
            return [f'"{{" {self._sequence([*entries.values()], ",")} "}}"']
        value = self._value(analysis.property_schemas(""))
        entry = value and f"{ANY_KEY} {value}"
        return self._repeated("{}", [entry], entry, _bounds(analysis, "Properties"))

    def _repeated(
        self, brackets: str, first: Sequence[str], more: str, bounds: Bounds
    ) -> list[str]:
        """Return the rule of a bounded number of items in brackets: the first ones each by its own
        rule, the others by `more`."""
        possible = first.index("") if "" in first else len(first)
        min_count, max_count = bounds
        max_count = max_count if more and possible == len(first) else min(max_count, possible)
        if min_count > max_count:
            return []
        items = ""
        if max_count > possible:
            repetition = _repetition(max(0, min_count - possible), max_count - possible)
            items = f'("," {more}){repetition}'
        for index in reversed(range(int(min(possible, max_count)))):
            comma = '"," ' if index else ""
            items = f"{comma}{first[index]} {items}"
            items = items if index < min_count else f"({items})?"
        return [f'"{brackets[0]}" {items} "{brackets[1]}"']

    # ── strings ──

    def _string(self, close: str, analysis: SchemaAnalysis, others: Sequence[str] = ()) -> str:
        """Return the rule of a string up to the text that closes it, within the schema's bounds.
        Text that is read as one of the kinds `others` is excluded."""
        closing = self._literals(close.lstrip())
        is_token = closing.startswith("<[")  # a special token, which is no text
        end = "" if is_token else re.escape(close.rstrip())
        rest = closing if is_token else self._literals(close[len(close.rstrip()) :])
        min_length, max_length = _bounds(analysis, "Length")
        patterns = [*self._patterns(analysis)]
        if not (is_token or patterns or others or min_length > 0 or max_length < inf):
            return f"{self._add_rule(regex_terminal(ANY + end), 'text')} {rest}"
        # A number would not end before the text that closes it if a string could go on there.
        char = f"[^{re.escape(close.strip()[0])}]" if others and not is_token else "(?s:.)"
        parts = [f"{char}{_repetition(min_length, max_length)}{end}"]
        parts += [f"({pattern}){end}" for pattern in patterns]
        excluded = [f"~{regex_terminal(READS_AS[kind] + end)}" for kind in others]
        if not is_token:  # the string ends with the first closing text
            excluded.append(f"~{regex_terminal(f'{ANY}{re.escape(close.strip())}(?s:.+)')}")
        rule = " & ".join([*map(regex_terminal, parts), *excluded])
        return f"{self._add_rule(rule, 'TEXT')} {rest}"

    @staticmethod
    def _patterns(analysis: SchemaAnalysis) -> Iterator[str]:
        """Yield the patterns that the whole string must match."""
        for part in analysis.counted_parts:
            if isinstance(pattern := part.get("pattern"), str):
                is_closed = pattern.endswith("$") and not pattern.endswith(r"\$")
                before, after = "" if pattern.startswith("^") else ANY, "" if is_closed else ANY
                bare = pattern.removeprefix("^")
                yield f"{before}({bare[: len(bare) - is_closed]}){after}"
            if (name := part.get("format")) in FORMATS:
                yield FORMATS[name]


def _is_bounded(kind: str, analysis: SchemaAnalysis) -> bool:
    keywords = BOUNDING_KEYWORDS.get(kind, set())
    return any(keywords & part.keys() for part in analysis.parts)


def _bounds(analysis: SchemaAnalysis, unit: str) -> Bounds:
    """Return the smallest and the largest number of `Items`, `Properties`, or the `Length`."""
    lower, upper = (
        [
            value
            for part in analysis.counted_parts
            if isinstance(value := part.get(f"{side}{unit}"), int | float)
            and not isinstance(value, bool)
        ]
        for side in ("min", "max")
    )
    return int(min(max([0, *lower]), MAX_COUNT)), min([inf, *upper])


def _repetition(min_count: int, max_count: float) -> str:
    return f"{{{min_count},{'' if max_count == inf else int(max_count)}}}"
