"""A function call's text, as it comes: the name as soon as it is whole, then its arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

JSON is given as the model writes it, without the white space around it; what is written in
another way is read when the call is whole (arguments.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from worker.text.arguments import entries, properties, python_calls, value
from worker.text.call_form import CallForm

END_OF_STRING = re.compile(r'(?:[^"\\]|\\.)*+"\s*+(\S)', re.DOTALL)
SPACE = " \t\r\n"
# Of JSON: what means nothing by itself, white space, or one sign.
CHUNK = re.compile(r'[^"\\{}\[\]:,; \t\r\n]+|[ \t\r\n]+|.')
ARGUMENTS = ("arguments", "parameters")  # models take one for the other

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # by their names


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
        self._early: list[str] = []  # arguments that came before the name
        # white space that may be the arguments' end; None: before them
        self._space: list[str] | None = None
        self._parts: list[tuple[str | None, list[str]]] = []

    def feed(self, text: str, marked: bool = False) -> list[CallPart]:
        """`marked`: a mark ends the calls, so that what is no JSON after one is passed over."""
        self._parts, self.left = [], 0
        if self._bare_name is not None and not self.begun:
            self._begin(self._bare_name)
        follows = SPACE if self._bare_name is not None else SPACE + ",;{"
        for match in CHUNK.finditer(text):
            chunk = match[0]
            depth, quoted = self._depth, self.quoted
            if self._opened and depth == 0 and chunk[0] not in follows:
                if marked:
                    continue
                self.left = len(text) - match.start()
                break
            self._follow(chunk)
            self.may_go_on &= self._opened or chunk[0] in SPACE
            nested = quoted or max(depth, self._depth) > self._level
            if self._bare_name is not None:
                self._argument(chunk)
            elif depth < self._level:
                self._enter(chunk)
            elif nested or chunk not in ":,}":
                self._member(chunk)
            elif chunk == ":":
                self._key, self._text = _string(self._text), []
                if self._key and not self._name_keys:
                    self._begin(self._key)
            else:
                if chunk == "}" and self._named and not self._given:
                    self._add(*"{}")
                self._key, self._text, self._space = None, [], None
        return [CallPart(name, "".join(chunks)) for name, chunks in self._parts]

    def close(self, cut: bool) -> list[CallPart]:
        """What the end of the call makes certain."""
        bare = self._bare_name is not None and not (cut or self._given)
        return [CallPart(None, "{}")] if bare else []

    def _follow(self, chunk: str) -> None:
        """Where in the JSON text we are."""
        if self._escaped:
            self._escaped = False
        elif chunk == '"':
            self.quoted = not self.quoted
        elif self.quoted:
            self._escaped = chunk == "\\"
        elif chunk in "{[":
            self._depth += 1
            self._opened = True
        elif chunk in "}]":
            self._depth -= 1

    def _enter(self, chunk: str) -> None:
        if chunk == "[" and self._depth == 1:
            self._level = 2  # a list of calls
        elif chunk == "{":
            self._named, self._key, self._text, self._space = False, None, [], None

    def _member(self, chunk: str) -> None:
        if self._key in self._arguments_keys or (self._key and not self._name_keys):
            self._argument(chunk)
        elif self._key is None or self._key in self._name_keys:
            self._text.append(chunk)
            if self._key is not None and chunk == '"' and not self.quoted:
                name, self._key = _string(self._text), ""
                if name:
                    self._begin(name)

    def _begin(self, name: str) -> None:
        self._named = self.begun = True
        self._given = False
        self._parts.append((name, []))
        self._add(*self._early)
        self._early = []

    def _argument(self, chunk: str) -> None:
        if chunk[0] in SPACE and not self.quoted:
            if self._space is not None:
                self._space.append(chunk)
            return
        self._add(*(self._space or ()), chunk)
        self._space = []

    def _add(self, *chunks: str) -> None:
        if not self._named:
            self._early += chunks
            return
        self._given |= bool(chunks)
        if self._parts and self._parts[-1][0] is None:
            self._parts[-1][1].extend(chunks)
        elif chunks:
            self._parts.append((None, [*chunks]))


class BodyParser:
    """A call, or a list of them, that is read when it is whole."""

    begun = quoted = False
    may_go_on = True
    left = 0

    def __init__(self, form: CallForm, name: str | None, tools: Tools) -> None:
        self._form, self._name, self._tools = form, name, tools
        self._text: list[str] = []

    def feed(self, text: str, marked: bool = False) -> list[CallPart]:
        self._text.append(text)
        return []

    def close(self, cut: bool) -> list[CallPart]:
        """None where it makes no sense. Of a call that is cut short, the arguments so far."""
        text, name, form = "".join(self._text), self._name, self._form.arguments
        try:
            if name is None:
                calls = python_calls(text, self._tools, cut)
            else:
                calls = [(name, entries(form, text, properties(self._tools.get(name))))]
        except (ValueError, RecursionError):
            calls = []
        written = [(each, written_json(arguments)) for each, arguments in calls]
        ends = -1 if cut and name is not None else None
        return [CallPart(each, text[:ends]) for each, text in written]


class FieldParser(BodyParser):
    """As the library reads what is in a response template's field."""

    def __init__(
        self, field: ResponseTemplateField, captured: dict[str, str], tools: Tools
    ) -> None:
        self._field, self._captured, self._tools = field, captured, tools
        self._text: list[str] = []

    def close(self, cut: bool) -> list[CallPart]:
        try:
            made = process_field("".join(self._text), self._field, self._captured)
            calls = [each["function"] for each in (made if isinstance(made, list) else [made])]
            return [CallPart(each["name"], self._arguments(**each)) for each in calls]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []

    def _arguments(self, name: str, arguments: dict[str, Any]) -> str:
        declared = properties(self._tools.get(name))
        typed = {
            key: value(each, declared[key]) if isinstance(each, str) and key in declared else each
            for key, each in arguments.items()
        }
        return written_json(typed)


def field_calls(field: ResponseTemplateField) -> Callable[[Any, Tools], "CallParser | BodyParser"]:
    """What reads the calls in a response template's field, for the match that opens it."""

    def make(match: Any, tools: Tools) -> CallParser | BodyParser:
        shape = field.transform.get("function") if isinstance(field.transform, dict) else None
        if field.content == "json" and not field.content_args and shape == "{content}":
            return CallParser("name", "arguments")
        if field.content == "json" and not field.content_args and isinstance(shape, dict):
            name, arguments = str(shape.get("name")), str(shape.get("arguments"))
            if arguments == "{content}":
                return CallParser("", "", match.groupdict().get(name.strip("{}")) or "")
            keys = (key.strip("{}").removeprefix("content.") for key in (name, arguments))
            return CallParser(*keys)
        return FieldParser(field, match.groupdict(), tools)

    return make


def written_json(arguments: dict[str, Any]) -> str:
    """Integers of any size, which faster libraries refuse."""
    return json.dumps(arguments, ensure_ascii=False)


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
