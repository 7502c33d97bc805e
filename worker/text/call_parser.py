"""A function call's text, as it comes: the name as soon as it is whole, then its arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

The arguments are given as the model writes them, without the white space around them.
"""

import copy
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
)

SPACE = " \t\r\n"


class CallPart(NamedTuple):
    """A call begins (`name`), or its arguments go on."""

    name: str | None
    arguments: str = ""


class CallParser:
    """One call, or a list of them. The keys are what the model's format calls name and arguments;
    `name` is given where the text is nothing but one call's arguments."""

    def __init__(self, name_key: str, arguments_key: str, name: str | None = None) -> None:
        self.begun = False  # a name is known
        self.quoted = False  # in the middle of a string
        self._name_key, self._arguments_key = name_key, arguments_key
        self._bare_name = name
        self._level = 1  # the depth of a call's members
        self._depth = 0
        self._escaped = False
        self._named = False  # the call that is being read
        self._key: str | None = None  # None: a key is being read
        self._text: list[str] = []  # of a key or a name
        self._early: list[str] = []  # arguments that came before the name
        # white space that may be the arguments' end; None: before them
        self._space: list[str] | None = None
        self._parts: list[tuple[str | None, list[str]]] = []

    def feed(self, text: str) -> list[CallPart]:
        self._parts = []
        if self._bare_name is not None and not self.begun:
            self._begin(self._bare_name)
        for letter in text:
            depth, quoted = self._depth, self.quoted
            self._follow(letter)
            nested = quoted or max(depth, self._depth) > self._level
            if self._bare_name is not None:
                self._argument(letter)
            elif depth < self._level:
                self._enter(letter)
            elif nested or letter not in ":,}":
                self._member(letter)
            elif letter == ":":
                self._key, self._text = _string(self._text), []
            else:
                self._key, self._text, self._space = None, [], None
        return [CallPart(name, "".join(letters)) for name, letters in self._parts]

    def sibling(self) -> "CallParser":
        """Another call that begins as this one does, as far as it has been read."""
        made = copy.copy(self)
        made._text, made._early = [*self._text], [*self._early]
        made._space = None if self._space is None else [*self._space]
        return made

    def _follow(self, letter: str) -> None:
        """Where in the JSON text we are."""
        if self._escaped:
            self._escaped = False
        elif letter == '"':
            self.quoted = not self.quoted
        elif self.quoted:
            self._escaped = letter == "\\"
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1

    def _enter(self, letter: str) -> None:
        if letter == "[" and self._depth == 1:
            self._level = 2  # a list of calls
        elif letter == "{":
            self._named, self._key, self._text, self._space = False, None, [], None

    def _member(self, letter: str) -> None:
        if self._key == self._arguments_key:
            self._argument(letter)
        elif self._key is None or self._key == self._name_key:
            self._text.append(letter)
            if self._key is not None and letter == '"' and not self.quoted:
                name, self._key = _string(self._text), ""
                if name:
                    self._begin(name)

    def _begin(self, name: str) -> None:
        self._named = self.begun = True
        self._parts.append((name, []))
        self._add(*self._early)
        self._early = []

    def _argument(self, letter: str) -> None:
        if letter in SPACE and not self.quoted:
            if self._space is not None:
                self._space.append(letter)
            return
        self._add(*(self._space or ()), letter)
        self._space = []

    def _add(self, *letters: str) -> None:
        if not self._named:
            self._early += letters
        elif self._parts and self._parts[-1][0] is None:
            self._parts[-1][1].extend(letters)
        elif letters:
            self._parts.append((None, [*letters]))


def call_parser(field: ResponseTemplateField, mark: Any) -> CallParser | None:
    """For a call that `mark`, a match, has opened; None where the form lets calls be parsed only
    as a whole."""
    shape = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content != "json" or field.content_args:
        return None
    if shape == "{content}":
        return CallParser("name", "arguments")
    if not isinstance(shape, dict):
        return None
    name, arguments = str(shape.get("name")), str(shape.get("arguments"))
    if arguments == "{content}":
        return CallParser("", "", mark.groupdict().get(name.strip("{}")) or "")
    return CallParser(*(key.strip("{}").removeprefix("content.") for key in (name, arguments)))


def whole_calls(text: str, template: ResponseTemplate, tools: list[Any]) -> list[CallPart]:
    """Names and arguments, as the library parses calls with their marks; none if it cannot."""
    try:
        message = parse_response(text, template, prefix="", tools=tools)
        calls = [call["function"] for call in message["tool_calls"]]
        return [CallPart(each["name"], orjson.dumps(each["arguments"]).decode()) for each in calls]
    except (KeyError, TypeError, ValueError):
        return []


def _string(text: Iterable[str]) -> str:
    try:
        value = json.loads("".join(text))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
