"""The types of JSON that a tool's parameters may have, as their schemas say.

What a model writes does not always tell a text from a number; then these do (tool_call_parser.py).
They
are found with the request, in a pool thread, since schemas come from strangers.

Arguments that are not written as JSON, read from the text of a call: Python's, and entries.

What is written does not always tell a text from a number; then the tool's schema does. Models mix
Python's literals with JSON's and with words without quotes, so that `ast` does not read them.

A function call's text, as it comes: the name as soon as it is whole, then its arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

JSON is given as the model writes it, without the white space around it; what is written in
another way is read when the call is whole (tool_call_parser.py).
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from worker.text.tool_call_format import ArgumentFormat, Pair, ToolCallFormat

DEEPEST = 100
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
NAMES |= {type(None): "null", dict: "object"}
JSON = frozenset(NAMES.values())

Types = Mapping[str, Collection[str]]  # of parameters; none where a schema does not say
Tools = Mapping[str, Types]  # by their names


def types_of_parameters(tool: Mapping[str, Any]) -> Types:
    parameters = tool["function"].get("parameters")
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(declared, dict):
        return {}
    known: dict[int, set[str]] = {}
    return {key: types_of(schema, parameters, known) for key, schema in declared.items()}


def types_of(schema: Any, root: Any, known: dict[int, set[str]], depth: int = 0) -> set[str]:
    """The types that a schema within `root` allows. `known`: of what is referred to, by its id."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return set()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    # a type that JSON has not is written as a text
    types = {each if each in JSON else "string" for each in listed if isinstance(each, str)}
    options = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if not types and isinstance(options, list):
        types = {type_of(option) for option in options}
    for several in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(several)
        for each in branches if isinstance(branches, list) else ():
            types |= types_of(each, root, known, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        found = referred(root, reference)
        if id(found) not in known:
            known[id(found)] = set()  # it may refer to itself
            known[id(found)] = types_of(found, root, known, depth + 1)
        types |= known[id(found)]
    if schema.get("nullable"):
        types.add("null")
    return types


def referred(root: Any, reference: str) -> Any:
    """What a `$ref` within a document means; True, which takes anything, where it is none."""
    if not f"{reference}/".startswith("#/"):
        return True
    for key in unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and int(key[:9]) < len(root):
            root = root[int(key[:9])]
        elif isinstance(root, dict) and key in root:
            root = root[key]
        else:
            return True
    return root


def type_of(made: Any) -> str:
    return NAMES[type(made)]


DEEPEST = 100
BACKSLASH, ESCAPES = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuUN01234567\n"
BARE_KEY = re.compile(r'(?<=[{,])([^":,{}\[\]]+):')

TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<call>[\w.:/-]{1,128}+(?<!:)(?=\s*+\())
    |(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<word>[^\W\d][\w./$@-]*|[$@][\w./$@-]+)
    |(?P<sign>\S)""",
    re.VERBOSE | re.DOTALL,
)
END = ""  # the last sign
WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
WORDS |= dict.fromkeys(("None", "null", "none"))
NUMBERS = ("integer", "number")

Calls = list[tuple[str, dict[str, Any]]]


# ── entries ──


def entries(form: ArgumentFormat, text: str, declared: Types) -> dict[str, Any]:
    """Up to what does not go on; ValueError where there is none."""
    if form.quotes:
        return _typed(form, text)
    entry, opens, at = _entry(form), form.open.strip(), 0
    found = {}
    while (start := text.find(opens, at)) >= 0 and (match := entry.match(text, start)):
        if not (key := match["key"].strip()):
            break
        found[key] = value(match["value"], declared.get(key, ()))
        at = match.end()
    if text.strip() and not found:
        raise ValueError("no entries")
    return found


@cache
def _entry(form: ArgumentFormat) -> re.Pattern[str]:
    """With any space where the middle has some. A line feed on either side of the value is not
    part of it, where the form writes one."""
    parts = form.middle.split() or [form.middle]
    middle = r"\s*+".join(map(re.escape, parts))
    before, after = "\n?" * form.middle.endswith("\n"), "\n?" * form.close.startswith("\n")
    return re.compile(
        rf"{re.escape(form.open.strip())}(?P<key>(?:(?!{re.escape(parts[0])}).)++){middle}"
        rf"{before}(?P<value>.*?){after}{re.escape(form.close.strip())}",
        re.DOTALL,
    )


def _typed(form: ArgumentFormat, text: str) -> dict[str, Any]:
    parts = text.split(form.quotes)
    if len(parts) % 2 == 0:
        raise ValueError("a text does not end")
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    parts[0] = "{" + parts[0]
    for n in range(0, len(parts), 2):
        parts[n] = BARE_KEY.sub(lambda key: f"{json.dumps(key[1].strip())}:", parts[n])
    made = literal("".join(parts) + "}")
    assert isinstance(made, dict)
    return made


def value(text: str, types: Collection[str]) -> Any:
    """Of a text that may be a text, or JSON, or what Python shows of it; none of the types: it may
    be of any."""
    if types == {"string"}:
        return text
    stripped, may_be_text = text.strip(), "string" in types
    for read in (_json, literal):
        try:
            made = read(stripped)
        except (ValueError, RecursionError):
            continue
        kind = type_of(made)
        if may_be_text and (kind == "string" or (read is literal and kind in NUMBERS)):
            return text  # as it is, with its quotes, space, or a number's leading zeros
        if not types or kind in types or (kind == "integer" and "number" in types):
            return made
        whole = isinstance(made, float) and made.is_integer()
        if whole and "integer" in types and not may_be_text:
            return int(made)
    return text


def _json(text: str) -> Any:
    """With integers of any size."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(written: str) -> float:
    """ValueError for numbers that JSON cannot show."""
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written} is not of JSON")
    return number


# ── Python ──


def literal(text: str) -> Any:
    """The one that a text is, of Python or JSON; ValueError where it is none. Words without quotes
    are texts."""
    reader = _Reader(text)
    made = reader.value()
    reader.must(END)
    return made


def python_calls(text: str, tools: Tools, cut: bool) -> Calls:
    """Of `[name(key=value, …), …]`; ValueError where it is none. `cut`: it may end too early, with
    the calls that are whole."""
    made: Calls = []
    try:
        for call in _Reader(text).calls(tools):
            made.append(call)  # those before an error count
    except ValueError:
        if not (cut and made):
            raise
    return made


class _Reader:
    """Follows tokens; ValueError where they are not what must come."""

    def __init__(self, text: str) -> None:
        self._tokens = ((str(m.lastgroup), m[0]) for m in TOKEN.finditer(text))
        self._token = next(self._tokens, ("sign", END))
        self._depth = 0

    def calls(self, tools: Tools) -> Iterator[tuple[str, dict[str, Any]]]:
        close = "]" if self._takes("[") else END
        for _ in self._items(close):
            kind, name = self._next()
            if kind != "call":
                raise ValueError("no name")
            self.must("(")
            yield name, self._arguments(tools.get(name, {}))
        if close:
            self.must(END)

    def value(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("too deep")
        made = self._value()
        self._depth -= 1
        return made

    def must(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"no {sign}")

    def _next(self) -> tuple[str, str]:
        taken, self._token = self._token, next(self._tokens, ("sign", END))
        return taken

    def _word(self) -> str:
        kind, word = self._next()
        if kind != "word":
            raise ValueError("no name")
        return word

    def _takes(self, sign: str) -> bool:
        if self._token != ("sign", sign):
            return False
        self._next()
        return True

    def _items(self, close: str) -> Iterator[None]:
        """A turn for each, up to what closes them."""
        while not self._takes(close):
            yield
            if self._takes(close):
                return
            self.must(",")

    def _arguments(self, declared: Types) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for _ in self._items(")"):
            key = self._word()
            self.must("=")
            made[key] = self._typed(declared.get(key, ()))
        return made

    def _typed(self, types: Collection[str]) -> Any:
        """Some models quote all values, some none."""
        kind, _ = self._token
        if kind == "number" and "string" in types and not {*types} & {*NUMBERS}:
            return self._next()[1]
        made = self.value()
        quoted = kind == "text" and types and "string" not in types
        return value(made, types) if quoted else made

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "text":
            return _unquoted(text)
        if kind == "number":
            return _finite(text) if {*text} & {*".eE"} else int(text)
        if kind == "word":
            return WORDS.get(text, text)
        if text == "{":
            return {self._key(): self.value() for _ in self._items("}")}
        if text and text in "[(":
            return [self.value() for _ in self._items("]" if text == "[" else ")")]
        raise ValueError(f"no value: {text}")

    def _key(self) -> str:
        key = self.value()
        self.must(":")
        return str(key)


def _unquoted(written: str) -> str:
    """It may have several lines, and backslashes that are none of Python's."""
    quotes = written[0] * 2
    known = BACKSLASH.sub(lambda found: "\\" * (found[1] not in ESCAPES) + found[0], written)
    try:
        return str(ast.literal_eval(quotes + known + quotes))
    except (SyntaxError, ValueError):
        return written[1:-1]


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


def body_parser(form: ToolCallFormat, name: str | None, tools: Tools) -> BodyParser:
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
