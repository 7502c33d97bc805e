"""The Lark rules of arguments that are not written as JSON, from a tool's schema.

Values that are written as JSON are constrained by llguidance, with their schema as it is. Strings
without JSON's quotes are free up to the text that closes them, unless the schema lists them. Values
within a format's own quotes follow types, listed values, properties and items.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.lark import MAX_LENGTH, Quote, format_literals, regex_terminal, schema_rule
from worker.text.tool_call_format import ArgumentFormat
from worker.text.tool_call_parser import JSON_TYPES, json_type, resolve_reference, schema_types

MAX_STEPS = 50_000  # over schemas, which are untrusted
MAX_DEPTH = 64  # of nested alternatives
MAX_COUNT = 1 << 31  # of items
DEFINITIONS = ("$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf")
DECIDED = {"type", "enum", "const", "properties"}  # a schema with these is one alternative
STRING_KEYWORDS = {"pattern", "minLength", "maxLength", "format"}
# JSON, with the white space that templates write.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
JSON_OPTIONS |= {"lenient": True}
SINGLE_QUOTED = r"/'([^'\\\n]|\\.)*'/"
PYTHON_BOOLEAN = "/True|False/"
ANY_KEY = r'/[^\s:{}<>"]+/ ":"'  # where strings have quotes of their own
Entry = tuple[str, bool]  # a rule, and whether it is required
Shape = tuple[dict[str, Any], dict[str, None]]  # properties and required names of an object


class ArgumentGrammar:
    """The rules of one tool's arguments. `rules`: a list to which named rules are added."""

    def __init__(
        self, argument_format: ArgumentFormat, quote: Quote, rules: list[str], parameters: Any
    ) -> None:
        self._root = parameters if isinstance(parameters, dict) else {}
        self._definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        self._steps_left, self._length = MAX_STEPS, 0
        self._types_of: dict[int, set[str]] = {}  # targets of references
        self._value_rules: dict[int, tuple[str, Any]] = {}  # by id: the name, and the schema
        self._format, self._quote, self._rules = argument_format, quote, rules
        self._is_python = argument_format.style == "python"
        self._is_quoted = bool(argument_format.quotes) and not self._is_python

    def arguments(self) -> str:
        """Return the rule of all arguments, as entries in order; InvalidInput with the reason."""
        comma, alternatives = self._format.comma, []
        for shape in self._shapes(self._root):
            if (entries := _entries(shape, self._entry)) is not None:
                alternatives.append(self._sequence([*entries.values()], comma))
                by_key = [entries[key] for key in sorted(entries)]
                if self._is_quoted and by_key != [*entries.values()]:
                    alternatives.append(self._sequence(by_key, comma))  # some models sort keys
        if not alternatives:
            raise InvalidInput("its schema allows no arguments")
        return f"({' | '.join(dict.fromkeys(alternatives))})"

    def _entry(self, key: str, schema: Any) -> str:
        """Return the rule of a key, its value and the text around them; "" if none is possible."""
        if schema is False:
            return ""
        if not (self._is_python or self._is_quoted):
            return self._raw_entry(key, schema)
        middle = "=" if self._is_python else self._format.middle
        before = self._quote(self._format.open + key + middle)
        value = self._python_value(schema) if self._is_python else self._value(schema)
        return value and f"{before} {value} {self._literals(self._format.close)}"

    def _raw_entry(self, key: str, schema: Any) -> str:
        close, has_types = self._format.closing(key), bool(self._format.types)
        alternatives: dict[str, list[str]] = {}  # by the text before the value

        def add(json_type: str, rule: str) -> None:
            before = self._quote(self._format.opening(key, json_type))
            alternatives.setdefault(before, []).append(rule)

        for branch in self._branches(schema):
            types, values = self._types(branch), self._listed(branch)
            if values is None and "string" in types:
                text = self._text(close)
                if not has_types:  # it matches everything
                    return f"{self._quote(self._format.opening(key, 'string'))} {text}"
                add("string", text)
            for value in values or ():
                literal = value if isinstance(value, str) else json.dumps(value)
                add(json_type(value), f"{self._quote(literal)} {self._literals(close)}")
            if values is not None:
                continue
            for name in sorted(types - {"string"}) if has_types else [""]:
                rules = [self._json(branch, name)]
                rules += [PYTHON_BOOLEAN] * ("boolean" in ((name,) if has_types else types))
                add(name, f"({' | '.join(rules)}) {self._literals(close)}")
        rules = [f"{before} ({' | '.join(values)})" for before, values in alternatives.items()]
        return self._add_rule(" | ".join(rules)) if rules else ""

    # ── schemas ──

    def _spend(self, steps: int = 1) -> None:
        """Count steps; InvalidInput beyond the limit."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise InvalidInput("it has too many properties or branches")

    def _resolve(self, schema: Mapping[str, Any]) -> Any:
        """Return the target of a schema's `$ref`; True, the schema of anything, if it has none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        self._spend(1 + len(reference) // 10)
        return resolve_reference(self._root, reference)

    def _branches(self, schema: Any, depth: int = 0) -> Iterator[Any]:
        """Yield the alternatives of a value, without references."""
        self._spend()
        if isinstance(schema, dict) and not DECIDED & schema.keys() and depth < MAX_DEPTH:
            lists = [list_in(schema, keyword) for keyword in ALTERNATIVES]
            lists.append([self._resolve(schema)] if "$ref" in schema else list_in(schema, "allOf"))
            if len(lists[-1]) > 1:  # several schemas that all match
                lists.pop()
            if branches := next(filter(None, lists), None):
                for branch in branches:
                    yield from self._branches(branch, depth + 1)
                return
        if schema is not False:
            yield schema

    def _shapes(self, schema: Any, depth: int = 0) -> list[Shape]:
        """Return the shape of an object for each combination of alternatives."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return [({}, {})]
        declared = schema.get("properties")
        properties = declared if isinstance(declared, dict) else {}
        names = [name for name in list_in(schema, "required") if isinstance(name, str)]
        self._spend(1 + len(properties) + len(names))
        shapes: list[Shape] = [(properties, dict.fromkeys(names))]
        groups = [[part] for part in list_in(schema, "allOf")]
        groups += [list_in(schema, keyword) for keyword in ALTERNATIVES]
        groups += [[self._resolve(schema)]] if "$ref" in schema else []
        for group in filter(None, groups):
            others = [shape for part in group for shape in self._shapes(part, depth + 1)]
            shapes = [self._both(one, other) for one in shapes for other in others]
        return shapes

    def _both(self, one: Shape, other: Shape) -> Shape:
        self._spend(1 + len(one[0]) + len(other[0]))
        shared = one[0].keys() & other[0].keys()
        both = {key: {"allOf": [one[0][key], other[0][key]]} for key in shared}
        return one[0] | other[0] | both, one[1] | other[1]

    def _types(self, branch: Any) -> set[str]:
        """Return the JSON types of a value; an integer has its own where types are written."""
        types = schema_types(branch, self._root, self._types_of) or {*JSON_TYPES}
        if "number" in types:
            return types | {"integer"} if self._format.types else types - {"integer"}
        return types

    def _listed(self, branch: Any) -> list[Any] | None:
        """Return all possible values of a schema that lists them."""
        if not isinstance(branch, dict):
            return None
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        if not isinstance(values, list):
            return None
        self._spend(len(values))
        types = self._types(branch)
        types |= {"integer"} if "number" in types else set()
        return [value for value in values if json_type(value) in types]

    # ── rules ──

    def _literals(self, text: str) -> str:
        return format_literals(text, self._quote)

    def _add_rule(self, body: str, name: str = "rule") -> str:
        self._spend()
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if name.startswith('text') else ''}: {body}")
        return name

    def _json(self, branch: Any, type_name: str = "") -> str:
        schema = dict(branch) if isinstance(branch, dict) else {}
        if type_name:
            schema["type"] = type_name
        rule = schema_rule(schema, JSON_OPTIONS)
        if '"$ref"' in rule:
            rule = schema_rule({**schema, **self._definitions}, JSON_OPTIONS)
        self._length += len(rule)
        if self._length > MAX_LENGTH:
            raise InvalidInput("it is too long")
        return rule

    def _text(self, close: str) -> str:
        """Return the rule of free text up to the text that closes it."""
        closing = self._literals(close.lstrip())
        if closing.startswith("<["):  # a special token, which is no text
            return f"{self._add_rule(regex_terminal('(?s:.*)'), 'TEXT')} {closing}"
        ending = close.rstrip()
        text = self._add_rule(regex_terminal(f"(?s:.*){re.escape(ending)}"), "text")
        return f"{text} {self._literals(close[len(ending) :])}"

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

    def _python_value(self, schema: Any) -> str:
        """Return the rule of JSON, or of Python's literals."""
        alternatives = [self._json(schema)]
        for branch in self._branches(schema):
            types, values = self._types(branch), self._listed(branch)
            keywords = branch.keys() if isinstance(branch, dict) else ()
            if values is not None:
                texts = [text for value in values for text in (json.dumps(value), repr(value))]
                alternatives += map(self._quote, texts)
                continue
            alternatives += [PYTHON_BOOLEAN] * ("boolean" in types)
            alternatives += ['"None"'] * ("null" in types)
            if "string" in types and STRING_KEYWORDS.isdisjoint(keywords):
                alternatives.append(SINGLE_QUOTED)
        return f"({' | '.join(dict.fromkeys(alternatives))})"

    # ── values where strings have the format's quotes ──

    def _value(self, schema: Any) -> str:
        """Return the name of a value's rule, which may be recursive; "" if none is possible."""
        if id(schema) not in self._value_rules:
            name = f"value_{len(self._rules)}_{len(self._value_rules)}"
            self._value_rules[id(schema)] = name, schema
            branches = self._branches(schema)
            alternatives = [rule for branch in branches for rule in self._quoted(branch)]
            if alternatives:
                self._rules.append(f"{name}: {' | '.join(alternatives)}")
            self._value_rules[id(schema)] = name if alternatives else "", schema
        return self._value_rules[id(schema)][0]

    def _quoted(self, branch: Any) -> Iterator[str]:
        """Yield the alternatives of a value."""
        if (values := self._listed(branch)) is not None:
            yield from (self._quote(self._write(value)) for value in values)
            return
        schema = branch if isinstance(branch, dict) else {}
        for name in sorted(self._types(branch)):
            if name == "string":
                quotes = self._format.quotes
                yield f"{self._literals(quotes)} {self._text(quotes)}"
            elif name == "array":
                yield self._array(schema)
            elif name == "object":
                yield from self._objects(schema)
            else:
                yield self._json(schema, name)

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._format.quotes}{value}{self._format.quotes}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._write(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    def _array(self, schema: Mapping[str, Any]) -> str:
        min_count, max_count = (_count(schema.get(key)) for key in ("minItems", "maxItems"))
        item = self._value(True if "prefixItems" in schema else schema.get("items", True))
        if not item or max_count == 0:
            return '"[" "]"'
        items = item
        if max_count != 1:
            last = "" if max_count is None else max_count - 1
            items += f' ("," {item}){{{max(0, (min_count or 0) - 1)},{last}}}'
        return f'"[" {items} "]"' if min_count else f'"[" ({items})? "]"'

    def _objects(self, schema: Mapping[str, Any]) -> Iterator[str]:
        def member(key: str, schema: Any) -> str:
            value = self._value(schema)
            return value and f"{self._quote(key + ':')} {value}"

        for shape in self._shapes(schema):
            if (entries := _entries(shape, member)) is None:
                continue
            if entries:
                yield f'"{{" {self._sequence([*entries.values()], ",")} "}}"'
            elif value := self._value(schema.get("additionalProperties", True)):
                yield f'"{{" ({ANY_KEY} {value} ("," {ANY_KEY} {value})*)? "}}"'
            else:
                yield '"{" "}"'


def _entries(shape: Shape, make_entry: Callable[[str, Any], str]) -> dict[str, Entry] | None:
    """Return entries by key; None if a required one has no possible value."""
    properties, required = shape
    entries = {}
    for key in properties | required:
        if rule := make_entry(key, properties.get(key, True)):
            entries[key] = rule, key in required
        elif key in required:
            return None
    return entries


def _count(value: Any) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(min(max(0, value), MAX_COUNT)) if is_number else None


def list_in(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
