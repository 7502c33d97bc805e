"""How calls are to be written, so that a grammar can hold a model to it.

What a model's calls look like is told by its own chat template: it is asked to render some, and
what stands around names and arguments is the form. Where that cannot be told (no tools in the
template, arguments that are not JSON), calls that must be made are written in the plain form.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.grammar.compiler import schema_rule
from worker.text.response_template import AnswerForm

Render = Callable[[list[dict[str, Any]]], str]  # a chat template, without a generation prompt
Quote = Callable[[str], str]  # a text as Lark's notation has it
Tool = Mapping[str, Any]

NAME = "name_of_it"
ARGUMENTS = {"first_key": "its_text", "second_key": 12}
# Where properties may be declared besides.
ELSEWHERE = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas")
WRITTEN = re.compile(
    r'\{\s*"first_key"(?P<colon>\s*:\s*)"its_text"(?P<comma>\s*,\s*)"second_key"\s*:\s*12\s*\}'
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end"""

    begin: str
    middle: str
    between: str | None  # None: one call is all there can be
    end: str
    colon: str = ": "
    comma: str = ", "
    several_in_mark: bool = False  # calls share one pair of marks

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as they are written, of names and arguments."""
        between = self.between or self.end + self.begin
        written = between.join(name + self.middle + arguments for name, arguments in calls)
        return self.begin + written + self.end

    def grammar(self, tools: Sequence[Tool], parallel: bool, quote: Quote) -> str:
        """Nothing but calls of these tools, in Lark's notation; one if not `parallel`."""
        more = f"({quote(self.between)} call)*" if parallel and self.between else ""
        return "\n".join(
            [
                f"start: {quote(self.begin)} call {more} {quote(self.end)}",
                "call: " + " | ".join(f"call_{n}" for n in range(len(tools))),
                *(f"call_{n}: {self._call(tool, quote)}" for n, tool in enumerate(tools)),
            ]
        )

    def _call(self, tool: Tool, quote: Quote) -> str:
        function = tool["function"]
        schema = schema_rule(_schema(function.get("parameters")), self._spaces())
        return f"{quote(function['name'] + self.middle)} {schema}"

    def _spaces(self) -> dict[str, Any]:
        colon, comma = (re.escape(each) for each in (self.colon, self.comma))
        spaces = {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}
        return spaces | {"lenient": True}  # schemas of tools come from everywhere


PLAIN_CALLS = CallForm(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


def call_form(form: AnswerForm | None, render: Render) -> CallForm | None:
    """What `render` makes of calls that `form` reads; None if it cannot be told."""
    if form is None or form.calls is None or form.calls.content != "json":
        return None
    try:
        one = _calls_in(form, render(_turn(1)))
    except Exception:  # whatever a template raises
        return None
    found = WRITTEN.search(one)
    if found is None or one.count(NAME) != 1 or found.start() < one.index(NAME):
        return None
    begin, middle = one[: found.start()].split(NAME)
    between = _between(form, render, found[0], begin, middle)
    close = form.closes.get("tool_calls")
    shared = between is not None and (close is None or not close.pattern.search(between))
    end = one[found.end() :]
    return CallForm(begin, middle, between, end, found["colon"], found["comma"], shared)


def _between(
    form: AnswerForm, render: Render, arguments: str, begin: str, middle: str
) -> str | None:
    """What stands between two calls."""
    try:
        two = _calls_in(form, render(_turn(2)))
    except Exception:  # a template that knows one only
        return None
    first, second = begin + NAME + middle + arguments, NAME + middle + arguments
    if not two.startswith(first) or second not in two[len(first) :]:
        return None
    return two[len(first) : two.index(second, len(first))]


def _turn(calls: int) -> list[dict[str, Any]]:
    function = {"name": NAME, "arguments": ARGUMENTS}
    call = {"type": "function", "id": "call00001", "function": function}
    made = [call | {"id": f"call0000{n}"} for n in range(calls)]
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]


def _calls_in(form: AnswerForm, text: str) -> str:
    """From the mark that opens the first call to the one that closes the last."""
    marks = form.opens["tool_calls"].pattern.finditer(text)
    first = text.index(NAME)  # what stands before may be told about calls in general
    start = [match.start() for match in marks if match.start() <= first][-1]
    close = form.closes.get("tool_calls")
    ends = [match.end() for match in close.pattern.finditer(text)] if close else []
    if ends and ends[-1] > text.rindex(NAME):
        return text[start : ends[-1]]
    last = list(WRITTEN.finditer(text))[-1].end()
    return text[start:last] + _closing(text[start:first])


def _closing(text: str) -> str:
    """The brackets that a text leaves open, closed."""
    open_: list[str] = []
    for letter in text:
        if letter in "{[":
            open_.append("}" if letter == "{" else "]")
        elif letter in "}]":
            open_.pop()
    return "".join(reversed(open_))


def _schema(parameters: Any) -> dict[str, Any]:
    """Arguments are an object of what is declared; a function that declares none takes none."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = dict(parameters)
    if "$ref" not in schema:
        schema["type"] = "object"
    declared = schema.get("properties")
    if isinstance(declared, dict) and not any(key in schema for key in ELSEWHERE):
        required = schema.get("required")
        if set(required if isinstance(required, list) else ()) <= set(declared):
            schema.setdefault("additionalProperties", False)
    return schema
