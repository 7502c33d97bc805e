"""A function call's text, as it comes: the name as soon as it is whole, then its arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

The arguments are given as the model writes them, without the white space around them.
"""

import copy
import json
from collections.abc import Iterable
from typing import NamedTuple

SPACE = " \t\r\n"


class Said(NamedTuple):
    """A call begins (`name`), or its arguments go on."""

    name: str | None
    text: str = ""


class CallReader:
    """One call, or a list of them. The keys are what the model's format calls name and arguments;
    `name` is given where the text is nothing but one call's arguments."""

    def __init__(self, name_key: str, arguments_key: str, name: str | None = None) -> None:
        self.begun = False  # a name has been told
        self._name_key, self._arguments_key = name_key, arguments_key
        self._bare_name = name
        self._level = 1  # the depth of a call's members
        self._depth = 0
        self._quoted = self._escaped = False
        self._named = False  # the call that is being read
        self._key: str | None = None  # None: a key is being read
        self._text: list[str] = []  # of a key or a name
        self._waiting: list[str] = []  # arguments that came before the name
        # white space that may be the arguments' end; None: before them
        self._space: list[str] | None = None
        self._said: list[tuple[str | None, list[str]]] = []

    @property
    def quoted(self) -> bool:
        """Whether it is in the middle of a string."""
        return self._quoted

    def push(self, text: str) -> list[Said]:
        self._said = []
        if self._bare_name is not None and not self.begun:
            self._begin(self._bare_name)
        for letter in text:
            depth, quoted = self._depth, self._quoted
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
        return [Said(name, "".join(text)) for name, text in self._said]

    def sibling(self) -> "CallReader":
        """Another call that begins as this one does, as far as it has been read."""
        made = copy.copy(self)
        made._text, made._waiting = [*self._text], [*self._waiting]
        made._space = None if self._space is None else [*self._space]
        return made

    def _follow(self, letter: str) -> None:
        """Where in the JSON text we are."""
        if self._escaped:
            self._escaped = False
        elif letter == '"':
            self._quoted = not self._quoted
        elif self._quoted:
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
            if self._key is not None and letter == '"' and not self._quoted:
                name, self._key = _string(self._text), ""
                if name:
                    self._begin(name)

    def _begin(self, name: str) -> None:
        self._named = self.begun = True
        self._said.append((name, []))
        self._argue(*self._waiting)
        self._waiting = []

    def _argument(self, letter: str) -> None:
        if letter in SPACE and not self._quoted:
            if self._space is not None:
                self._space.append(letter)
            return
        self._argue(*(self._space or ()), letter)
        self._space = []

    def _argue(self, *text: str) -> None:
        if not self._named:
            self._waiting += text
        elif self._said and self._said[-1][0] is None:
            self._said[-1][1].extend(text)
        elif text:
            self._said.append((None, [*text]))


def _string(text: Iterable[str]) -> str:
    try:
        value = json.loads("".join(text))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
