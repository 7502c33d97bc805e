"""How a model writes its answers: reasoning, content and calls.

An AnswerForm tells how they are read (parser.py): by the tokenizer's response template or, where
it has none, by its family's, which the marks in the chat template tell. A CallForm tells how calls
are written, so that a grammar can hold a model to them (grammar/notation.py): the chat template is
asked to write some, and what stands around names and arguments is the form. Where that is
unknown (no tools in the template, arguments that are not JSON), calls that must be made are written
in the plain form.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "reasoning", "thinking")


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CAPTURED = _function("{name}", "{content}")
THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}
JSON_IN_TAGS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
# Marks in a chat template, and how that family writes calls; the first whose marks are all there.
FAMILIES: dict[tuple[str, ...], dict[str, Any]] = {
    ("<tool_call>", "<function=", "<parameter="): {
        "open_pattern": r"<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,128})>",
        "close_pattern": r"</function>\s{0,8}</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": CAPTURED,
    },
    ("<tool_call>",): JSON_IN_TAGS,
    ("[TOOL_CALLS]", "[ARGS]"): {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]{1,128})"
        r"(?:\[CALL_ID\][^\[{]{0,64})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "repeats": True,
        "content": "json",
        "transform": CAPTURED,
    },
    ("[TOOL_CALLS]",): {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": _function("{name}", "{arguments}"),
        "transform_each": True,
    },
    ("<|tool_call>call:",): {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w{1,128})",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": CAPTURED,
    },
    ('{"name": "', '"parameters": '): {
        "open_pattern": r'(?:<\|python_tag\|>)?(?=\{"name": ?")',
        "repeats": True,
        "content": "json",
        "transform": _function("{content.name}", "{content.parameters}"),
    },
}


class Mark(NamedTuple):
    """What opens a field, or closes it."""

    field: ResponseTemplateField
    pattern: Any  # of the regex package
    grows: bool  # a match at the end of a text may become longer
    first: frozenset[str]  # characters that begin it; none: they are not known


def _mark(field: ResponseTemplateField, pattern: Any, literals: list[str] | None) -> Mark:
    if literals is None and (alone := literal(pattern.pattern)):
        literals = [alone]
    if literals is None:
        return Mark(field, pattern, True, frozenset())
    grows = any(a != b and a.startswith(b) for a in literals for b in literals)
    return Mark(field, pattern, grows, frozenset(text[0] for text in literals))


def literal(pattern: str) -> str | None:
    """The one text that a pattern stands for."""
    if re.search(r"(?<!\\)(?:\\\\)*[.^$*+?{}\[\]|()]|\\[A-Za-z0-9]", pattern):
        return None
    return re.sub(r"\\(.)", r"\1", pattern)


class AnswerForm:
    """A response template, `spec`, as the library has compiled it, and its marks by the names of
    the fields that they open or close."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        raw = {name: dict(field) for name, field in spec["fields"].items()}
        for field in raw.values():
            # Space before a mark is nobody's in any case, and looking for it takes long.
            for key in ("open_pattern", "close_pattern"):
                if key in field:
                    field[key] = field[key].removeprefix(r"\s*")
        self.template = load_response_template({**spec, "fields": raw})
        self.opens: dict[str, Mark] = {}
        self.closes: dict[str, Mark] = {}
        fields = self.template.fields
        for name, each in fields.items():
            for marks, pattern, literals in (
                (self.opens, each.open_re, each.open_literals),
                (self.closes, each.close_re, each.close_literals),
            ):
                if pattern is not None:
                    marks[name] = _mark(each, pattern, literals)
        self.calls = fields.get(CALLS)
        self.reasoning = next((fields[name] for name in REASONING if name in fields), None)
        # Without calls an answer is nothing but text.
        self.only_calls = {*self.opens, *self.closes} <= {CALLS} and CONTENT in fields
        # No mark stands before calls: they begin with their JSON.
        mark = self.opens.get(CALLS)
        found = mark.pattern.search('{"name": "x"') if mark else None
        self.unmarked = found is not None and not found.group()

    def thoughts_in(self, prompt: str) -> str:
        """The marks of reasoning that a prompt ends with: it has begun, or is over."""
        if self.reasoning is None or self.reasoning.open_re is None:
            return ""
        begun = [match.start() for match in self.reasoning.open_re.finditer(prompt)]
        rest = tail = prompt[begun[-1] :] if begun else ""
        for mark in filter(None, (self.reasoning.open_re, self.reasoning.close_re)):
            rest = mark.sub("", rest)
        return "" if rest.strip() else tail

    def ends_thoughts(self, text: str) -> bool:
        """Whether the mark that does so is in it."""
        close = self.reasoning.close_re if self.reasoning else None
        return close is not None and close.search(text) is not None

    def marks(self, token: str) -> bool:
        """Whether a special token is part of what opens, closes or quotes reasoning and calls."""
        fields = [field for field in (self.calls, self.reasoning) if field]
        patterns = [each for field in fields for each in (field.open_re, field.close_re) if each]
        texts = [pattern.pattern.replace("\\", "") for pattern in patterns]
        for field in fields:
            texts += [each for pair in field.content_args.get("string_delims", ()) for each in pair]
        return len(token) > 2 and any(token in text for text in texts)


def _of_fields(fields: dict[str, Any]) -> AnswerForm:
    # The library wants to know where an answer begins in a prompt; we know that.
    return AnswerForm({"start_anchor": "\n", "fields": {**fields, CONTENT: {"content": "text"}}})


# What calls look like where a model must make some and its form is unknown.
PLAIN = _of_fields({"reasoning_content": THOUGHTS, CALLS: JSON_IN_TAGS})


def answer_form(tokenizer: PreTrainedTokenizerBase) -> AnswerForm | None:
    """The tokenizer's response template, or its family's; None: answers are nothing but text."""
    if template := getattr(tokenizer, "response_template", None):
        return AnswerForm(template)
    chat = tokenizer.chat_template
    chat = "\n".join(chat.values()) if isinstance(chat, dict) else chat or ""
    fields = {"reasoning_content": THOUGHTS} if "</think>" in chat else {}
    for marks, calls in FAMILIES.items():
        if all(mark in chat for mark in marks):
            fields[CALLS] = calls
            break
    return _of_fields(fields) if fields else None


# ── calls ──

Render = Callable[[list[dict[str, Any]]], str]  # a chat template; nothing where it raises

NAME = "name_of_it"
ARGUMENTS = {"first_key": "its_text", "second_key": 12}
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


PLAIN_CALLS = CallForm(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


def call_form(answers: AnswerForm | None, render: Render) -> CallForm | None:
    """What `render` makes of calls that `answers` reads; None if that is unknown."""
    if answers is None or answers.calls is None or answers.calls.content != "json":
        return None
    one = _calls_written(answers, render, 1)
    found = WRITTEN.search(one)
    if found is None or one.count(NAME) != 1 or found.start() < one.index(NAME):
        return None
    begin, middle = one[: found.start()].split(NAME)
    call = NAME + middle + found[0]
    two, between = _calls_written(answers, render, 2), None
    if two.startswith(begin + call) and call in (rest := two[len(begin + call) :]):
        between = rest[: rest.index(call)]
    close = answers.closes.get("tool_calls")
    shared = between is not None and (close is None or not close.pattern.search(between))
    end = one[found.end() :]
    return CallForm(begin, middle, between, end, found["colon"], found["comma"], shared)


def _calls_written(answers: AnswerForm, render: Render, count: int) -> str:
    """From the mark that opens the first call to the one that closes the last; nothing where no
    such call is shown."""
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    calls = [{**call, "id": f"call0000{n}"} for n in range(count)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render([{"role": "user", "content": "?"}, turn])
    try:
        opens = answers.opens["tool_calls"].pattern.finditer(text)
        first = text.index(NAME)  # before it may stand instructions on calls
        start = [match.start() for match in opens if match.start() <= first][-1]
        close = answers.closes.get("tool_calls")
        ends = [match.end() for match in close.pattern.finditer(text)] if close else []
        if ends and ends[-1] > text.rindex(NAME):
            return text[start : ends[-1]]
        return text[start : list(WRITTEN.finditer(text))[-1].end()] + _closing(text[start:first])
    except (ValueError, LookupError):
        return ""


def _closing(text: str) -> str:
    """The brackets that a text leaves open, closed."""
    closing: list[str] = []
    for bracket in re.findall(r"[\[\]{}]", text):
        if bracket in "{[":
            closing.insert(0, "}" if bracket == "{" else "]")
        else:
            closing.pop(0)
    return "".join(closing)
