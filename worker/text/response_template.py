"""A response template, which a tokenizer may carry, as the form of answers that it tells.

Its fields are phases of an answer, which open and close. The library compiles it, and reads what
is in a call's field; where fields begin and end is followed by parser.py, which needs no whole
answer for that.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

from worker.text.answer_form import AnswerForm
from worker.text.arguments import Calls, value
from worker.text.call_form import Pair
from worker.text.call_parser import BodyParser, CallParser
from worker.text.marks import ANSWER, CALL, NOBODY, THINKING, Mark
from worker.text.parameter_types import Tools

CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "reasoning", "thinking")
PHASES = {CALLS: CALL, CONTENT: ANSWER, **dict.fromkeys(REASONING, THINKING)}


def answer_form(spec: Mapping[str, Any]) -> AnswerForm:
    """ValueError or TypeError where it is none."""
    raw = {name: dict(each) for name, each in spec["fields"].items()}
    for each in raw.values():
        # Space before a mark is nobody's in any case, and looking for it takes long.
        for key in ("open_pattern", "close_pattern"):
            if key in each:
                each[key] = each[key].removeprefix(r"\s*")
    template = load_response_template({**spec, "fields": raw})
    begins = _phase(template.implicit) if template.implicit else NOBODY
    marks: list[Mark] = []
    call_marks: list[Mark] = []
    texts: list[str] = []
    thoughts: Pair | None = None
    for name, field in template.fields.items():
        made = _marks(field, begins, _phase(name))
        (call_marks if name == CALLS else marks).extend(made)
        texts += [mark.pattern.pattern.replace("\\", "") for mark in made]
        texts += [text for pair in field.content_args.get("string_delims", ()) for text in pair]
        if _phase(name) == THINKING and field.open_literals and field.close_literals:
            thoughts = field.open_literals[0], field.close_literals[0]
    return AnswerForm(
        tuple(marks),
        tuple(call_marks),
        thoughts,
        unmarked=any(mark.leads for mark in call_marks),
        begins=begins,
        texts=tuple(texts),
    )


def _phase(field: str) -> str:
    return PHASES.get(field, f"{NOBODY} {field}")


def _marks(field: ResponseTemplateField, outside: str, phase: str) -> list[Mark]:
    """What opens a field, and what closes it."""
    made = []
    for pattern, literals, within, to in (
        (field.open_re, field.open_literals, outside, phase),
        (field.close_re, field.close_literals, phase, outside),
    ):
        if pattern is None:
            continue
        if literals is None and (alone := literal(pattern.pattern)):
            literals = [alone]
        grows = literals is None or any(
            one != other and one.startswith(other) for one in literals for other in literals
        )
        first = frozenset(text[0] for text in literals or ())
        parser = partial(_call_parser, field) if phase == to == CALL else None
        # No mark stands before calls: they begin with their JSON.
        leads = bool(parser and (m := pattern.search('{"name": "x"')) and not m.group())
        made.append(Mark(frozenset((within,)), to, pattern, grows, first, parser, leads))
    return made


def _call_parser(
    field: ResponseTemplateField, captured: dict[str, str], tools: Tools
) -> CallParser | BodyParser:
    """Of what is in a field. `captured`: by the pattern that opens it."""
    shape = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content == "json" and not field.content_args and shape == "{content}":
        return CallParser("name", "arguments")
    if field.content == "json" and not field.content_args and isinstance(shape, dict):
        name, arguments = str(shape.get("name")), str(shape.get("arguments"))
        if arguments == "{content}":
            return CallParser("", "", captured.get(name.strip("{}")) or "")
        return CallParser(*(key.strip("{}").removeprefix("content.") for key in (name, arguments)))

    def read(text: str, cut: bool) -> Calls:
        try:
            made = process_field(text, field, captured)
            calls = [each["function"] for each in (made if isinstance(made, list) else [made])]
            return [(each["name"], typed(**each)) for each in calls]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("no calls") from error

    def typed(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        declared, quoted = tools.get(name, {}), field.content == "json"

        def made(key: str, each: Any) -> Any:
            types = declared.get(key)
            if types is None or not isinstance(each, str) or (quoted and "string" in types):
                return each
            return value(each, types)

        return {key: made(key, each) for key, each in arguments.items()}

    return BodyParser(read)


def literal(pattern: str) -> str | None:
    """The one text that a pattern stands for."""
    if re.search(r"(?<!\\)(?:\\\\)*[.^$*+?{}\[\]|()]|\\[A-Za-z0-9]", pattern):
        return None
    return re.sub(r"\\(.)", r"\1", pattern)
