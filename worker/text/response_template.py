"""How a model writes its reasoning and its calls, as transformers' response templates tell it.

A tokenizer may carry a response template. For one that does not, the marks in its chat template
tell its family's form. Reading by a form is done in parser.py.
"""

import re
from collections.abc import Mapping
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
        # Nothing but their own text tells that there are calls.
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


# What calls look like where a model must make some and its own form cannot be told.
PLAIN = _of_fields({"reasoning_content": THOUGHTS, CALLS: JSON_IN_TAGS})


def answer_form(tokenizer: PreTrainedTokenizerBase) -> AnswerForm | None:
    """The tokenizer's own form, or its family's; None: answers are nothing but text."""
    if own := getattr(tokenizer, "response_template", None):
        return AnswerForm(own)
    chat = tokenizer.chat_template
    chat = "\n".join(chat.values()) if isinstance(chat, dict) else chat or ""
    fields = {"reasoning_content": THOUGHTS} if "</think>" in chat else {}
    for marks, calls in FAMILIES.items():
        if all(mark in chat for mark in marks):
            fields[CALLS] = calls
            break
    return _of_fields(fields) if fields else None
