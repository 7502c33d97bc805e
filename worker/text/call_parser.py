"""A function call's text, as it comes: the name as soon as it is whole, then its arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

JSON is given as the model writes it, without the white space around it; what is written in
another way is read when the call is whole (arguments.py).
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from worker.text.arguments import Calls, entries, python_calls
from worker.text.call_form import CallForm, Pair
from worker.text.parameter_types import Tools

END_OF_STRING = re.compile(r'(?:[^"\\]|\\.)*+"\s*+(\S)', re.DOTALL)
SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")  # models take one for the other


class CallPart(NamedTuple):
    """A call begins (`name`), or its arguments go on."""

    name: str | None
    arguments: str = ""


class CallParser:
    """One call, or several of them. The keys are what the model's form calls name and arguments;
    without a name's key, the name itself is the arguments' key. `name` is given where the text is
    nothing but one call's arguments."""

    def __init__(self, name_key: str, arguments_key: str, name: str | None = None) -> None:
        self.begun = False  # a name is known
        self.quoted = False  # in the middle of a string
        self.left = 0  # letters of the last text that are no call's any more
        self.may_go_on = True  # it is a call as far as it goes
        self._name_keys = (name_key, "name") if name_key else ()
        self._arguments_keys = (arguments_key, *ARGUMENTS) if name_key else ()
        self._bare_name = name
        self._level = 1  # the depth of a call's members
        self._depth = 0
        self._opened = False  # an object or a list
        self._escaped = False
        self._named = False  # the call that is being read
        self._given = False  # it has arguments
        self._key: str | None = None  # None: a key is being read
        self._text: list[str] = []  # of a key or a name
        self._letters: list[str] = []  # of arguments, perhaps before the name
        self._space: list[str] = []  # white space that may be the arguments' end
        self._parts: list[CallPart] = []

    def feed(self, text: str, marked: bool = False) -> list[CallPart]:
        """`marked`: a mark ends the calls, so that what is no JSON after one is passed over."""
        self._parts, self.left = [], 0
        if self._bare_name is not None and not self.begun:
            self._begin(self._bare_name)
        follows = SPACE if self._bare_name is not None else SPACE + ",;{"
        for place, letter in enumerate(text):
            depth, nested = self._depth, self.quoted
            if self._opened and depth == 0 and letter not in follows:
                if marked:
                    continue
                self.left = len(text) - place
                break
            self._follow(letter)
            self.may_go_on &= self._opened or letter in SPACE
            nested |= max(depth, self._depth) > self._level
            if self._bare_name is not None:
                self._argument(letter)
            elif depth < self._level:
                if letter == "[" and depth == 0:
                    self._level = 2  # a list of calls
            elif nested or letter not in ":,}":
                self._member(letter)
            elif letter == ":":
                self._key, self._text = _string(self._text), []
                if self._key and not self._name_keys:
                    self._begin(self._key)
            else:
                self._key, self._text, self._space = None, [], []
                if letter == "}":
                    self._end()
        self._tell()
        return self._parts

    def close(self, cut: bool) -> list[CallPart]:
        """What the end of the call makes certain."""
        bare = self._bare_name is not None and not (cut or self._given)
        return [CallPart(None, "{}")] if bare else []

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
            self._opened = True
        elif letter in "}]":
            self._depth -= 1

    def _member(self, letter: str) -> None:
        if self._key in self._arguments_keys or (self._key and not self._name_keys):
            self._argument(letter)
        elif self._key is None or self._key in self._name_keys:
            self._text.append(letter)
            if self._key is not None and letter == '"' and not self.quoted:
                name, self._key = _string(self._text), ""
                if name:
                    self._begin(name)

    def _begin(self, name: str) -> None:
        self._tell()  # of a call that has not ended
        self._given = bool(self._letters)
        self._named = self.begun = True
        self._parts.append(CallPart(name))

    def _argument(self, letter: str) -> None:
        if letter not in SPACE or self.quoted:
            self._letters += *self._space, letter
            self._space, self._given = [], True
        elif self._given:
            self._space.append(letter)

    def _end(self) -> None:
        if not self._given:
            self._letters += "{}"
        self._tell()
        self._named, self._given, self._letters = False, False, []

    def _tell(self) -> None:
        if self._named and self._letters:
            self._parts.append(CallPart(None, "".join(self._letters)))
            self._letters = []


class BodyParser:
    """A call, or a list of them, that is read when it is whole. `read`: names and arguments of a
    text that may be cut short; ValueError where it makes no sense. `one`: where a call is cut short
    its arguments are left open. `entry`: what opens one of its values, and what closes it."""

    begun = False
    may_go_on = True
    left = 0

    def __init__(
        self, read: Callable[[str, bool], Calls], one: bool = False, entry: Pair = ("", "")
    ) -> None:
        self._read, self._one = read, one
        self._opens, self._closes = entry
        self._text: list[str] = []

    @property
    def quoted(self) -> bool:
        """In the middle of a value."""
        if not (self._opens and self._closes):
            return False
        self._text = [text := "".join(self._text)]
        if self._opens == self._closes:
            return text.count(self._opens) % 2 > 0
        return text.rfind(self._opens) > text.rfind(self._closes)

    def feed(self, text: str, marked: bool = False) -> list[CallPart]:
        self._text.append(text)
        return []

    def close(self, cut: bool) -> list[CallPart]:
        ends = -1 if cut and self._one else None
        try:
            return [
                # integers of any size, which faster libraries refuse
                CallPart(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)[:ends])
                for name, arguments in self._read("".join(self._text), cut)
            ]
        except (ValueError, RecursionError):
            return []


class ListParser(BodyParser):
    """Python's calls in a list, which ends with its bracket unless a mark ends it."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(lambda text, cut: python_calls(text, tools, cut))
        self._depth = 0
        self._quote = ""  # of the text that is open
        self._escaped = False

    def feed(self, text: str, marked: bool = False) -> list[CallPart]:
        self.left = 0
        for place, letter in enumerate("" if marked else text):
            if not self.may_go_on and letter not in SPACE:
                self.left = len(text) - place
                break
            self._follow(letter)
        return super().feed(text[: len(text) - self.left])

    def _follow(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = letter == "\\"
            self._quote = "" if letter == self._quote else self._quote
        elif letter in "\"'":
            self._quote = letter
        elif letter in "([{":
            self._depth += 1
        elif letter in ")]}":
            self._depth -= 1
            self.may_go_on = self._depth > 0


def body_parser(form: CallForm, name: str | None, tools: Tools) -> BodyParser:
    """Of calls that are not written as JSON; of one, if its name has been read."""
    if name is None:
        return ListParser(tools)
    how, declared = form.arguments, tools.get(name, {})
    entry = (how.quotes, how.quotes) if how.quotes else (how.open.strip(), how.close.strip())
    return BodyParser(lambda text, _: [(name, entries(how, text, declared))], True, entry)


def goes_on_as_json(text: str) -> bool | None:
    """Whether this may be the rest of a string and more of its JSON. None: not known yet."""
    found = END_OF_STRING.match(text)
    return found and found[1] in ",:}]"


def _string(text: Iterable[str]) -> str:
    try:
        value = json.loads("".join(text))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
