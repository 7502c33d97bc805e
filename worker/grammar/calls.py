"""The grammar of calls: a model's form of them, its tools and their parameters, in Lark's notation.

JSON arguments are left to llguidance; for Python's and for entries, rules are made of what a schema
says about names, types, choices, lengths and patterns. What they do not express is free.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from worker.grammar.notation import Quote, schema_of_arguments, schema_rule
from worker.text.arguments import types_of
from worker.text.call_form import VARIABLE, Arguments, CallForm

Tool = Mapping[str, Any]

DEEPEST = 8  # of rules for what is inside an argument; further in, it may be anything
DEFINITIONS = ("$defs", "definitions")
BOUNDS = {"pattern", "minLength", "maxLength"}
HELD_TEXTS = {*BOUNDS, "format", "enum", "const"}  # by llguidance
SCALARS = {"integer", "number"}
ESCAPED = {"/": r"\/", "\n": r"\n", "\t": r"\t"}
# A JSON value, in the ways that templates write it.
LOOSE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
LOOSE |= {"lenient": True}
SINGLE = r"/'([^'\\\n]|\\.)*'/"
WORDS = {"boolean": "/true|false/", "null": '"null"'}
PYTHON_WORDS = {"boolean": "/True|False|true|false/", "null": '"None"'}


def calls_grammar(
    form: CallForm,
    tools: Sequence[Tool],
    several: bool,
    quote: Quote,
    begins: Sequence[str] = (),
    started: bool = False,
) -> str:
    """Nothing but calls of these tools; one if not `several`. `begins`: what may stand before
    them. `started`: the model has begun by itself, perhaps in the middle of a section."""
    rules = _Rules(form.arguments, quote)
    section, end = form.section
    before = " ".join(f"({rules.frame(text)})?" for text in begins)
    begin = rules.first(form.call[0]) if not section.strip() else rules.frame(form.call[0])
    opens = rules.first(section)
    if started and form.call[0].strip() and opens:
        opens = f"({opens})?"
    between = rules.frame((form.separator or "") + form.call[0])
    more = f"({between} call)*" if several and form.separator is not None else ""
    ends = rules.frame(end.rstrip())
    ends = f"({ends})?" if ends and not section.strip() else ends
    calls = [
        f"{rules.frame(form.braces[0] + tool['function']['name'] + form.middle)} "
        f"{rules.arguments(tool['function'].get('parameters'))} "
        f"{rules.frame(form.braces[1] + form.call[1])}"
        for tool in tools
    ]
    return "\n".join(
        [
            f"start: {before} {opens} {begin} call {more} {ends}",
            "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
            *(f"call_{n}: {call}" for n, call in enumerate(calls)),
            *rules.made,
        ]
    )


def accepts(form: CallForm, tools: Sequence[Tool], text: str) -> bool:
    """Whether the grammar of a form takes calls as they are written."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, calls_grammar(form, tools, True, json.dumps))
    tokens = tokenizer.tokenize_str(text.strip())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


class _Rules:
    """`made`: those that others refer to."""

    def __init__(self, form: Arguments, quote: Quote) -> None:
        self.made: list[str] = []
        self._form, self._quote = form, quote
        self._python = form.style == "python"
        self._definitions: dict[str, Any] = {}  # that a tool's schemas refer to

    def frame(self, text: str) -> str:
        """A text of a form, with indices and ids."""
        parts = re.split(f"([{''.join(VARIABLE)}])", text)
        return " ".join(
            f"/{VARIABLE[part]}/" if part in VARIABLE else self._quote(part)
            for part in parts
            if part
        )

    def first(self, text: str) -> str:
        """The space before the first text may be left out."""
        bare = text.lstrip()
        space = self.frame(text[: len(text) - len(bare)])
        return f"({space})? {self.frame(bare)}" if space else self.frame(bare)

    def arguments(self, parameters: Any) -> str:
        form = self._form
        if form.style == "json":
            options = {
                "whitespace_flexible": False,
                "item_separator": re.escape(form.comma),
                "key_separator": re.escape(form.colon),
                "lenient": True,  # schemas of tools come from everywhere
            }
            return schema_rule(schema_of_arguments(parameters), options)
        schema = parameters if isinstance(parameters, dict) else {}
        declared = schema.get("properties")
        declared = declared if isinstance(declared, dict) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        self._definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
        entries = {
            key: (self._entry(key, self._resolved(each)), key in required)
            for key, each in declared.items()
        }
        written = self._sequence(list(entries.values()), form.comma)
        if form.quotes and not self._python and sorted(entries) != list(entries):  # some sort them
            by_key = self._sequence([entries[key] for key in sorted(entries)], form.comma)
            written = f"({written} | {by_key})"
        return written

    def _json(self, schema: Any) -> str:
        return schema_rule(
            {**(schema if isinstance(schema, dict) else {}), **self._definitions}, LOOSE
        )

    def _resolved(self, schema: Any) -> Any:
        """What a reference into the tool's definitions stands for."""
        for _ in range(DEEPEST):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            parts = ref.split("/") if isinstance(ref, str) else []
            if len(parts) != 3 or parts[0] != "#":
                return schema
            group = self._definitions.get(parts[1])
            schema = group.get(parts[2]) if isinstance(group, dict) else None
        return {}

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.made)}"
        self.made.append(f"{name}: {body}")
        return name

    def _sequence(self, entries: list[tuple[str, bool]], comma: str) -> str:
        """In their order; those that are not required may be left out."""
        between = self.frame(comma)
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

    def _entry(self, key: str, schema: Any) -> str:
        form = self._form
        if self._python:
            return f"{self._quote(key + '=')} {self._value(schema, 0)}"
        if form.quotes:
            before = self._quote(form.open + key + form.middle)
            return f"{before} {self._value(schema, 0)} {self.frame(form.close)}"
        types = types_of(schema)
        if types and "string" not in types:
            free = types == {"boolean"} and not _choices(schema)
            words = "/[Tt]rue|[Ff]alse/" if free else self._json(schema)
            return f"{self._quote(form.open + key + form.middle)} {words} {self.frame(form.close)}"
        before = self._quote(form.open + key + form.text_middle)
        if options := _choices(schema):
            written = [each if isinstance(each, str) else json.dumps(each) for each in options]
            choices = self._rule(" | ".join(map(self._quote, written)))
            return f"{before} {choices} {self.frame(form.close)}"
        return f"{before} {self._text(form.close, schema)}"

    def _text(self, close: str, schema: Any) -> str:
        """Any text up to what closes it, of the length and by the pattern that a schema has."""
        bare = self.frame(close.lstrip())
        if bare.startswith("<["):  # a special token, which is no text
            return f"{self._letters('(?s:.', '', schema)} {bare}"
        pattern = "".join(ESCAPED.get(letter) or re.escape(letter) for letter in close.rstrip())
        rest = self.frame(close[len(close.rstrip()) :])
        if isinstance(schema, dict) and BOUNDS & {*schema}:
            return (
                f"{self._letters(f'(?s:[^{re.escape(close.strip()[0])}]', pattern, schema)} {rest}"
            )
        name = f"text_{len(self.made)}"
        self.made.append(f"{name}[lazy]: /(?s:.*){pattern}/")
        return f"{name} {rest}"

    def _letters(self, letter: str, end: str, schema: Any) -> str:
        """A text of such letters and its end, as a terminal."""
        schema = schema if isinstance(schema, dict) else {}
        least, most, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
        least, most = (each if type(each) is int and each > 0 else None for each in (least, most))
        bounds = f"{{{least or 0},{most or ''}}}" if least or most else "*"
        made = f"/{letter}{bounds}){end}/"
        if isinstance(pattern, str):
            before = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if pattern.endswith("$") else "(?s:.*)"
            found = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
            made += f" & /{before}({found}){after}{end}/"
        name = f"TEXT_{len(self.made)}"
        self.made.append(f"{name}: {made}")
        return name

    def _value(self, schema: Any, depth: int) -> str:
        """Python's, or one whose texts are quoted in a way of their own."""
        schema = self._resolved(schema)
        schema = schema if isinstance(schema, dict) and depth < DEEPEST else {}
        options = _choices(schema)
        if options and not any(isinstance(each, dict | list) for each in options):
            return self._rule(" | ".join(map(self._quoted, options)))
        types = sorted(types_of(schema))
        if not types or schema.get("$ref"):
            return self._any()
        return self._rule(" | ".join(self._of(type_, schema, depth) for type_ in types))

    def _of(self, type_: str, schema: dict[str, Any], depth: int) -> str:
        words = PYTHON_WORDS if self._python else WORDS
        if type_ in words:
            return words[type_]
        if type_ == "string" and self._python and not HELD_TEXTS & {*schema}:
            return f"{self._json({**schema, 'type': type_})} | {SINGLE}"
        if type_ in SCALARS or self._python:
            return self._json({**schema, "type": type_})
        if type_ == "string":
            return self._string(schema)
        if type_ == "array":
            item = self._value(schema.get("items"), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        declared = schema.get("properties")
        if type_ != "object" or not isinstance(declared, dict) or not declared:
            self._any()
            return "any_object" if type_ == "object" else "any"
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        entries = [
            (f"{self._quote(key + ':')} {self._value(each, depth + 1)}", key in required)
            for key, each in declared.items()
        ]
        return f'"{{" {self._sequence(entries, ",")} "}}"'

    def _quoted(self, choice: Any) -> str:
        if self._python:
            return f"{self._quote(json.dumps(choice))} | {self._quote(repr(choice))}"
        quotes = self._form.quotes
        written = quotes + choice + quotes if isinstance(choice, str) else json.dumps(choice)
        return self._quote(written)

    def _string(self, schema: Any = None) -> str:
        quotes = self._form.quotes
        return f"{self.frame(quotes)} {self._text(quotes, schema)}"

    def _any(self) -> str:
        if self._python:
            return self._rule(f"{self._json({})} | {SINGLE} | /True|False|None/")
        if not any(rule.startswith("any:") for rule in self.made):
            self.made += [
                "any: any_text | any_list | any_object | %json "
                '{"type": ["number", "boolean", "null"]}',
                'any_list: "[" (any ("," any)*)? "]"',
                r'any_object: "{" (any_entry ("," any_entry)*)? "}"',
                r'any_entry: /[^\s:{}<>"]+/ ":" any',
            ]
            self.made.append(f"any_text: {self._string()}")
        return "any"


def _choices(schema: Any) -> list[Any]:
    """The values that it lists; none where it does not."""
    if not isinstance(schema, dict):
        return []
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return options if isinstance(options, list) else []
