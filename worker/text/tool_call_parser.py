"""The text of tool calls, as it is generated, to names and JSON arguments.

    {"name": "weather", "arguments": {"city": "Paris"}}  →  weather, {"city": "Paris"}

parser.py finds where calls begin and end, and feeds their text to one of the parsers here. JSON is
passed on as the model writes it, without surrounding white space, as soon as the name is complete.
Python calls and entries are read once the call is complete; where their text leaves open whether a
value is a string or a number, the tool's schema decides. Models mix Python's literals with JSON's
and with unquoted words, so `ast` does not read them.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from worker.text.tool_call_format import KEY, TYPE, ArgumentFormat, Pair, ToolCallFormat

MAX_DEPTH = 100  # of a value, or of a schema
SPACE = " \t\r\n"
SIGNS_AFTER_STRING = ",:)]}"

# ── JSON types ──

JSON_TYPE_OF: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
JSON_TYPES = frozenset(JSON_TYPE_OF.values())
NUMBER_TYPES = ("integer", "number")

ParameterTypes = Mapping[str, Collection[str]]  # empty where the schema leaves the type open
ToolTypes = Mapping[str, ParameterTypes]  # by the tool's name
ANY: ToolTypes = MappingProxyType({})
ParsedCalls = list[tuple[str, dict[str, Any]]]  # names and arguments


class ToolCallPart(NamedTuple):
    """The start of a call (`name`), or more of its arguments' JSON."""

    name: str | None
    arguments: str = ""


# ── parsers ──


class Brackets:
    """Follows strings and brackets. `quotes`: characters that enclose strings. With several, what
    ends a string stands before a sign, since some models write quotes within quotes."""

    def __init__(self, quotes: str, opening: str, closing: str) -> None:
        self.depth = 0
        self.quote = ""  # of the open string
        self._quotes, self._opening, self._closing = quotes, opening, closing
        self._escaped = self._may_end = False

    def add(self, char: str) -> None:
        if self._may_end and char not in SPACE:
            self._may_end = False
            self.quote = "" if char in SIGNS_AFTER_STRING else self.quote
        if self._escaped:
            self._escaped = False
        elif self.quote:
            self._escaped = char == "\\"
            if char == self.quote and len(self._quotes) > 1:
                self._may_end = True
            elif char == self.quote:
                self.quote = ""
        elif char in self._quotes:
            self.quote = char
        else:
            self.depth += (char in self._opening) - (char in self._closing)


END_OF_STRING = re.compile(r'(?:[^"\\]|\\.)*+"\s*+(\S)', re.DOTALL)
ARGUMENTS_KEYS = ("arguments", "parameters")  # models confuse them
WRAPPER_KEY = "function"  # {"type": "function", "function": {"name": …}}, or the name itself


class JsonCallParser:
    """Streams one JSON call, or several.

    `name_key` and `arguments_key` are the model's. With an empty `name_key`, the name itself is the
    key of the arguments. With `name`, the text is the arguments of one call and nothing else."""

    def __init__(
        self, name_key: str, arguments_key: str, name: str | None = None, *, tools: ToolTypes = ANY
    ) -> None:
        self._tools = tools
        self.started = False  # a name is complete
        self.rest = 0  # characters at the end of the last text that follow the calls
        self.may_continue = True  # the text so far may be the beginning of calls
        self._name_keys = (name_key, "name", WRAPPER_KEY) if name_key else ()
        self._arguments_keys = (arguments_key, *ARGUMENTS_KEYS) if name_key else ()
        self._fixed_name = name
        self._call_depth = 1  # of a call's members
        self._brackets = Brackets('"', "{[", "}]")
        self._opened = False  # an object or a list has started
        self._named = False  # the current call has a name
        self._has_arguments = False  # the current call has
        # Its arguments begin as no object, and are not returned before they end.
        self._is_held = False
        self._key: str | None = None  # None while a key is read
        self._string: list[str] = []  # characters of a key or a name
        self._arguments: list[str] = []  # characters not yet returned, perhaps before the name
        self._space: list[str] = []  # white space that may end the arguments
        self._parts: list[ToolCallPart] = []
        self._text: list[str] = []  # before a name

    @property
    def in_string(self) -> bool:
        return self._brackets.quote != ""

    def feed(self, text: str, delimited: bool = False) -> list[ToolCallPart]:
        """Return the parts that this text completes. `delimited`: a delimiter ends the calls, so
        text after the JSON is skipped; else it is counted in `rest`."""
        self._parts, self.rest = [], 0
        if self._fixed_name is not None and not self.started:
            self._start_call(self._fixed_name)
        may_follow = SPACE if self._fixed_name is not None else SPACE + ",;{"
        for position, char in enumerate(text):
            depth, nested = self._brackets.depth, self.in_string
            if self._opened and depth == 0 and char not in may_follow:
                if delimited:
                    continue
                self.rest = len(text) - position
                break
            self._brackets.add(char)
            self._opened |= self._brackets.depth > depth
            self.may_continue &= self._brackets.depth > 0 if self._opened else char in SPACE
            nested |= max(depth, self._brackets.depth) > self._call_depth
            if self._fixed_name is not None:
                self._add_argument(char)
            elif depth < self._call_depth:
                if char == "[" and depth == 0:
                    self._call_depth = 2  # a list of calls
            elif nested or char not in ":,}":
                self._add_member(char)
            elif char == ":":
                self._key, self._string = _json_string(self._string), []
                if self._key and not self._name_keys:
                    self._start_call(self._key)
            else:
                self._key, self._string, self._space = None, [], []
                if char == "}":
                    self._end_call()
        self._flush()
        self._text += [] if self.started else [text]
        return self._parts

    def close(self, cut: bool) -> list[ToolCallPart]:
        """Return the parts that the end of the text completes. `cut`: it ends too early."""
        self._parts, text = [], "".join(self._text)
        if self._is_held and self._named:
            self._flush(ended=True)
        elif self._fixed_name is not None and not (cut or self._has_arguments):
            self._parts.append(ToolCallPart(None, "{}"))
        elif not (self.started or cut):  # some models write calls in another style
            read = lambda *_: _read_any_calls(text, self._tools, cut)  # noqa: E731
            self._parts += BufferedCallParser(read).close(cut)
        return self._parts

    def _add_member(self, char: str) -> None:
        if char == "{" and self._key == WRAPPER_KEY and self._name_keys and not self._named:
            self._call_depth += 1  # name and arguments are members of an object in the call's
            self._key, self._string = None, []
        elif self._key in self._arguments_keys or (self._key and not self._name_keys):
            self._add_argument(char)
        elif self._key is None or self._key in self._name_keys:
            self._string.append(char)
            if self._key is not None and char == '"' and not self.in_string:
                name, self._key = _json_string(self._string), ""
                if name:
                    self._start_call(name)

    def _start_call(self, name: str) -> None:
        self._flush()  # of a call that did not end
        self._has_arguments = bool(self._arguments)
        self._named = self.started = True
        self._parts.append(ToolCallPart(name))

    def _add_argument(self, char: str) -> None:
        if char not in SPACE or self.in_string:
            self._is_held = char != "{" if not self._has_arguments else self._is_held
            self._arguments += *self._space, char
            self._space, self._has_arguments = [], True
        elif self._has_arguments:
            self._space.append(char)

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._arguments += "{}"
        self._flush(ended=True)
        self._named = self._has_arguments = self._is_held = False
        self._arguments = []

    def _flush(self, ended: bool = False) -> None:
        """Return the arguments so far. Some models write their JSON as a string, or nothing in its
        place, which the end decides."""
        if self._is_held and ended:
            text = "".join(self._arguments)
            inner = _json_string(text) or text.strip('"')
            known = {"": "{}", "null": "{}"}.get(inner.strip(), inner)
            self._arguments = [known if known.lstrip().startswith("{") else text]
        if self._named and self._arguments and ended >= self._is_held:
            self._parts.append(ToolCallPart(None, "".join(self._arguments)))
            self._arguments = []


class PlainCallParser(JsonCallParser):
    """Streams JSON calls whose end is that of their JSON."""

    def feed(self, text: str, delimited: bool = False) -> list[ToolCallPart]:
        return super().feed(text)


class BufferedCallParser:
    """Reads one call, or a list of calls, once it is complete.

    `read` returns names and arguments of a text, which may be cut short; it raises ValueError for
    an invalid one. `single`: the arguments of a call that is cut short stay open. `value`: the
    texts around each value."""

    started = False
    may_continue = True
    rest = 0

    def __init__(
        self,
        read: Callable[[str, bool], ParsedCalls],
        single: bool = False,
        value: Pair = ("", ""),
    ) -> None:
        self._read, self._single = read, single
        self._opens, self._closes = value
        self._text: list[str] = []

    @property
    def in_string(self) -> bool:
        """Whether the text ends inside a value."""
        if not (self._opens and self._closes):
            return False
        self._text = [text := "".join(self._text)]
        if self._opens == self._closes:
            return text.count(self._opens) % 2 > 0
        return text.rfind(self._opens) > text.rfind(self._closes)

    def feed(self, text: str, delimited: bool = False) -> list[ToolCallPart]:
        self._text.append(text)
        return []

    def close(self, cut: bool) -> list[ToolCallPart]:
        """Return the calls; none if the text is invalid. `cut`: it ends too early."""
        end = -1 if cut and self._single else None
        try:
            return [
                # json, since faster libraries refuse large integers
                ToolCallPart(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)[:end])
                for name, arguments in self._read("".join(self._text), cut)
            ]
        except (ValueError, RecursionError):
            return []


class PythonCallParser(BufferedCallParser):
    """Reads a list of Python calls. Its closing bracket ends it, unless a delimiter does."""

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(lambda text, cut: _read_any_calls(text, tools, cut))
        self._brackets = Brackets("\"'", "([{", ")]}")

    def feed(self, text: str, delimited: bool = False) -> list[ToolCallPart]:
        self.rest = 0
        for position, char in enumerate("" if delimited else text):
            if not self.may_continue and char not in SPACE + ",":
                self.rest = len(text) - position
                break
            depth = self._brackets.depth
            self._brackets.add(char)
            closes = self._brackets.depth < depth
            self.may_continue &= self._brackets.depth > 0 or not closes
        return super().feed(text[: len(text) - self.rest])


ToolCallParser = JsonCallParser | BufferedCallParser


def make_call_parser(
    call_format: ToolCallFormat, groups: Mapping[str, str], tools: ToolTypes
) -> ToolCallParser:
    """Return a parser of calls in this format. `groups`: of the match that opens them; of one
    call's arguments if that has its `name`."""
    arguments, name = call_format.arguments, groups.get("name")
    if call_format.any_style:
        return BufferedCallParser(lambda text, cut: _read_any_calls(text, tools, cut))
    if groups.get("python"):
        return PythonCallParser(tools)
    if call_format.keys is not None or groups.get("json"):
        return JsonCallParser(*(call_format.keys or ("name", "arguments")), tools=tools)
    if arguments.style == "json":
        return JsonCallParser("", "", name)
    if name is None:
        return PythonCallParser(tools)
    value = arguments.open.strip(), arguments.close.partition(KEY)[0].strip()
    if quotes := arguments.value_quotes:
        value = quotes, quotes
    types = tools.get(name, {})
    return BufferedCallParser(
        lambda text, _: [(name, read_entries(arguments, text, types))], single=True, value=value
    )


def continues_json(text: str) -> bool | None:
    """Return whether the text may be the rest of a JSON string and more JSON; None if too short."""
    match = END_OF_STRING.match(text)
    return match and match[1] in ",:}]"


def _json_string(chars: Iterable[str]) -> str:
    try:
        value = json.loads("".join(chars))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


# ── arguments as entries ──

CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)  # XML's quotes
WORD = r"\w+"  # of a type
MAX_KEYS = 64  # whose entries end a value that nothing closes: a pattern of thousands takes long
BARE_KEY = re.compile(r'(?<=[{,])([^":,{}\[\]]+):')


def read_entries(
    argument_format: ArgumentFormat, text: str, types: ParameterTypes
) -> dict[str, Any]:
    """Return the arguments up to the first text that is no entry; ValueError if there are none."""
    if argument_format.value_quotes:
        return _read_quoted_entries(argument_format, text, types)
    if argument_format.item:
        return {
            key: _read_nested_value(argument_format, value, types.get(key, ()))
            for key, value in _nested_entries(argument_format, text)
        }
    entry = _entry_pattern(argument_format, tuple(islice(types, MAX_KEYS)))
    opens = argument_format.open.strip()
    arguments, position = {}, 0
    while (start := text.find(opens, position)) >= 0 and (match := entry.match(text, start)):
        if not (key := match["key"].strip()):
            break
        allowed = types.get(key, ())
        if argument_format.types:
            allowed = _types_of(argument_format, match["type"], allowed)
        arguments[key] = read_value(match["value"], allowed)
        position = match.end()
    return arguments if arguments or not text.strip() else _read_object(text)


def _nested_entries(argument_format: ArgumentFormat, text: str) -> Iterator[Pair]:
    """Yield keys and the text of their values, up to the first text that is no entry; ValueError if
    there are none."""
    opens, position = re.escape(argument_format.open.strip()), 0
    middle = re.escape(argument_format.middle.strip())
    while match := re.compile(rf"\s*+{opens}([^\s<>]++){middle}").match(text, position):
        key, depth = match[1], 1
        closes = re.escape(argument_format.closing(key).strip())
        for edge in re.compile(rf"({opens}{re.escape(key)}{middle})|{closes}").finditer(
            text, match.end()
        ):
            depth += 1 if edge[1] else -1
            if depth == 0:
                break
        if depth:
            return
        yield key, text[match.end() : edge.start()]
        position = edge.end()
    if position == 0 and text.strip():
        raise ValueError("no entries")


def _read_nested_value(
    argument_format: ArgumentFormat, text: str, types: Collection[str], depth: int = 0
) -> Any:
    """Read a value that may be a list or an object of entries. Their own values have no types."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if "string" in types:
        return read_value(text, types)
    if not text.strip() and "array" in types:
        return []
    if not text.strip() and "object" in types:
        return {}
    if not text.strip().startswith(argument_format.open.strip()):
        return read_value(text, types or (*NUMBER_TYPES, "boolean", "string"))
    entries = [
        (key, _read_nested_value(argument_format, value, (), depth + 1))
        for key, value in _nested_entries(argument_format, text)
    ]
    is_list = {key for key, _ in entries} == {argument_format.item}
    if is_list and (not types or "array" in types):
        return [value for _, value in entries]
    return dict(entries)


def _types_of(
    argument_format: ArgumentFormat, word: str, allowed: Collection[str]
) -> Collection[str]:
    """Return the types that both the entry's word and the schema allow; the schema's if none."""
    named = {name for name, own in argument_format.types if own == word}
    if "string" not in named:
        named = {*JSON_TYPES} - {"string"}
    return {*(allowed or JSON_TYPES)} & named or allowed


@lru_cache(maxsize=256)
def _entry_pattern(argument_format: ArgumentFormat, keys: tuple[str, ...]) -> re.Pattern[str]:
    """Any white space matches that of `middle`. A line feed on either side of the value belongs to
    the format if the format has one there. The start of an entry with one of these keys ends a
    value that nothing closes."""
    parts = argument_format.middle.replace("><", "> <").split() or [argument_format.middle]
    middle = r"\s*+".join(map(re.escape, parts))
    before = "\n?" * argument_format.middle.endswith("\n")
    after = "\n?" * argument_format.close.startswith("\n")
    opens, closes = (
        re.escape(text.strip()) for text in (argument_format.open, argument_format.close)
    )
    known = "|".join(map(re.escape, keys)) or r"(?!)"
    follows = rf"(?=\s?{opens}(?:{known}){middle.replace(TYPE, WORD)})"
    middle, closes = middle.replace(TYPE, f"(?P<type>{WORD})"), closes.replace(KEY, "(?P=key)")
    return re.compile(
        rf"{opens}(?P<key>(?:(?!{re.escape(parts[0])}).)++){middle}"
        rf"{before}(?P<value>{CDATA.pattern}|.*?)(?:{after}{closes}|{follows})",
        re.DOTALL,
    )


def _read_quoted_entries(
    argument_format: ArgumentFormat, text: str, types: ParameterTypes
) -> dict[str, Any]:
    parts = text.split(argument_format.value_quotes)
    if len(parts) % 2 == 0:
        raise ValueError("a string is not closed")
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    parts[0] = "{" + parts[0]
    for n in range(0, len(parts), 2):
        parts[n] = BARE_KEY.sub(lambda key: f"{json.dumps(key[1].strip())}:", parts[n])
    arguments = read_literal("".join(parts) + "}")
    if not isinstance(arguments, dict):
        raise ValueError("no entries")
    if not argument_format.quotes:  # values of all types have them
        for key, value in arguments.items():
            if isinstance(value, str):
                arguments[key] = read_value(value, types.get(key, ()))
    return arguments


def read_value(text: str, types: Collection[str]) -> Any:
    """Read a value that may be a plain string, JSON or a Python literal. `types`: those that the
    schema allows; empty: any."""
    if (quoted := CDATA.fullmatch(text)) and (not types or "string" in types):
        return quoted[1]
    if types == {"string"}:
        return text
    stripped, may_be_string = text.strip(), "string" in types
    # Words in brackets are a value where the schema says so.
    for read in (_read_json, partial(read_literal, words=bool(types))):
        try:
            value = read(stripped)
        except (ValueError, RecursionError):
            continue
        kind = json_type(value)
        if may_be_string and (
            kind == "string" or (read is not _read_json and kind in NUMBER_TYPES)
        ):
            return text  # unchanged: quotes, white space, a number's leading zeros
        if not types or kind in types or (kind == "integer" and "number" in types):
            return value
        is_whole = isinstance(value, float) and value.is_integer()
        if is_whole and "integer" in types and not may_be_string:
            return int(value)
    return text


def _read_json(text: str) -> Any:
    """Parse JSON, integers of any size. ValueError for numbers that JSON cannot write."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _read_object(text: str) -> dict[str, Any]:
    """Parse the JSON object that a text begins with; ValueError if there is none."""
    value, _ = json.JSONDecoder().raw_decode(text.strip())
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is not JSON")
    return number


# ── Python literals and calls ──

TOKEN = re.compile(
    # Some models write quotes within quotes: what ends a string stands before a sign.
    r"""(?P<text>"{3}(?:[^"\\]|\\.|"{1,2}(?!"))*+"{3}|'{3}(?:[^'\\]|\\.|'{1,2}(?!'))*+'{3}
        |"(?:[^"\\]|\\.|"(?!\s*+(?:[,:)\]}]|\Z)))*+"
        |'(?:[^'\\]|\\.|'(?!\s*+(?:[,:)\]}]|\Z)))*+')
    |(?P<call>[\w.:/-]{1,128}+(?<!:)(?=\s*+\())
    |(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<word>[^\W\d][\w./$@-]*|[$@][\w./$@-]+)
    |(?P<sign>\S)""",
    re.VERBOSE | re.DOTALL,
)
END = ""  # the sign after the last token
WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
WORDS |= dict.fromkeys(("None", "null", "none"))
UNSAFE, ESCAPES = re.compile(r'\\(.)|"', re.DOTALL), "\\'\"abfnrtvxuUN01234567\n"


def read_literal(text: str, words: bool = True) -> Any:
    """Read one Python or JSON literal; ValueError if it is none. Unquoted `words` are strings."""
    reader = _PythonReader(text, words)
    value = reader.value()
    reader.expect(END)
    return value


def read_python_calls(text: str, tools: ToolTypes, cut: bool) -> ParsedCalls:
    """Read `[name(key=value, …), …]`; ValueError if it is invalid. `cut`: the text may end too
    early, and the complete calls are returned."""
    calls: ParsedCalls = []
    try:
        for call in _PythonReader(text).calls(tools):
            calls.append(call)  # calls before an error are kept
    except ValueError:
        if not (cut and calls):
            raise
    return calls


def _read_any_calls(text: str, tools: ToolTypes, cut: bool) -> ParsedCalls:
    """Read JSON calls, Python calls, or a call in tags; ValueError if the text is none of them."""
    text = AROUND_CALLS.sub("", text)
    if not text.lstrip("[" + SPACE).startswith("{"):
        if not ((head := ANY_HEAD.match(text)) and head[1] in tools):
            return read_python_calls(text, tools, cut)
        if (rest := text[head.end() :]).startswith("("):
            return read_python_calls(text, tools, cut)
        if rest.startswith("{"):
            return [(head[1], _read_object(rest))]
        return [(head[1], _read_any_entries(rest, tools[head[1]]))]
    try:
        try:
            values = [_read_json(text)]
        except ValueError:
            values = [_read_json(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        values = [read_literal(text)]
    calls = values[0] if values and isinstance(values[0], list) else values
    try:
        calls = [call[WRAPPER_KEY] if "name" not in call else call for call in calls]
        if not all(isinstance(call["name"], str) and call["name"] for call in calls):
            raise TypeError
        return [
            (call["name"], dict(next(call[key] for key in ARGUMENTS_KEYS if key in call)))
            for call in calls
        ]
    except (KeyError, TypeError, StopIteration) as error:
        raise ValueError("no calls") from error


# A code fence, or a token at the end
AROUND_CALLS = re.compile(r"^\s*```\w{0,20}\s|(?:```|<\|[^<>\s]{1,60}\|>)\s*$")
# a, <function=a> or <invoke name="a">
ANY_HEAD = re.compile(
    r'\s*(?:<\w{1,20}(?:=|\s+name=)"?)?([\w.:/-]{1,128})(?:"?>)?\s*(?:```\w{0,20}\s*)?'
)
# <x=KEY>VALUE</x>, <x name="KEY">VALUE</x>, or <key>KEY</key><value>VALUE</value>
ANY_ENTRY = re.compile(
    r"""\s*+(?:<(\w{1,20})(?:=|\s+name=)"?(?P<one>[^<>"]{1,200}?)"?>
    |<(\w{1,20})>(?P<two>[^<>]{1,200})</\3>\s*+<(\w{1,20})>)\n?(?P<value>.*?)\n?</(?:\1|\5)>""",
    re.DOTALL | re.VERBOSE,
)


def _read_any_entries(text: str, types: ParameterTypes) -> dict[str, Any]:
    arguments, position = {}, 0
    while match := ANY_ENTRY.match(text, position):
        key = match["one"] or match["two"]
        arguments[key] = read_value(match["value"], types.get(key, ()))
        position = match.end()
    if text.strip() and not arguments:
        raise ValueError("no entries")
    return arguments


class _PythonReader:
    """Recursive descent over tokens; raises ValueError for an unexpected one."""

    def __init__(self, text: str, words: bool = True) -> None:
        self._words = words
        self._tokens = ((str(m.lastgroup), m[0]) for m in TOKEN.finditer(text))
        self._token = next(self._tokens, ("sign", END))
        self._depth = 0

    def calls(self, tools: ToolTypes) -> Iterator[tuple[str, dict[str, Any]]]:
        close = "]" if self._skip("[") else END
        while not self._skip(close):
            kind, name = self._next()
            if kind != "call":
                raise ValueError("no function name")
            self.expect("(")
            yield name, self._arguments(tools.get(name, {}))
            self._skip(",")  # some models write each call on a line of its own
        if close:
            self.expect(END)

    def value(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("too deep")
        value = self._value()
        self._depth -= 1
        return value

    def expect(self, sign: str) -> None:
        if not self._skip(sign):
            raise ValueError(f"no {sign}")

    def _next(self) -> tuple[str, str]:
        token, self._token = self._token, next(self._tokens, ("sign", END))
        return token

    def _skip(self, sign: str) -> bool:
        if self._token != ("sign", sign):
            return False
        self._next()
        return True

    def _items(self, close: str) -> Iterator[None]:
        """Yield before each item of a list, up to its closing sign."""
        while not self._skip(close):
            yield
            if self._skip(close):
                return
            self.expect(",")

    def _arguments(self, types: ParameterTypes) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for _ in self._items(")"):
            kind, key = self._next()
            if kind != "word":
                raise ValueError("no argument name")
            self.expect("=")
            arguments[key] = self._typed_value(types.get(key, ()))
        return arguments

    def _typed_value(self, types: Collection[str]) -> Any:
        """Some models quote all values, some none."""
        kind, _ = self._token
        if kind == "number" and "string" in types and not {*types} & {*NUMBER_TYPES}:
            return self._next()[1]
        value = self.value()
        is_quoted = kind == "text" and types and "string" not in types
        return read_value(value, types) if is_quoted else value

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "text":
            return _unquote(text)
        if kind == "number":
            return _finite(text) if {*text} & {*".eE"} else int(text)
        if kind == "word" and (self._words or text in WORDS):
            return WORDS.get(text, text)
        if text == "{":
            return self._members()
        if text and text in "[(":
            return [self.value() for _ in self._items("]" if text == "[" else ")")]
        raise ValueError(f"no value: {text}")

    def _members(self) -> Any:
        """Read an object; or a set, which is a list in JSON."""
        keys, values = [], []
        for _ in self._items("}"):
            keys.append(self.value())
            values += [self.value()] if self._skip(":") else []
        return dict(zip(map(str, keys), values, strict=True)) if values or not keys else keys


def _unquote(string: str) -> str:
    """Return the value of a quoted string, of several lines and with any backslashes."""
    size = 3 if len(string) > 5 and string[:3] == string[-3:] == string[0] * 3 else 1
    text = string[size:-size]
    escaped = UNSAFE.sub(lambda m: m[0] if m[1] and m[1] in ESCAPES else "\\" + m[0], text)
    try:
        return str(ast.literal_eval(f'"""{escaped}"""'))
    except (SyntaxError, ValueError):
        return text


# ── types in a tool's schema ──


def parameter_types(tool: Mapping[str, Any]) -> ParameterTypes:
    """Return the JSON types that an untrusted schema allows by parameter. For pool threads."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    cache: dict[int, set[str]] = {}
    return {key: schema_types(property_, schema, cache) for key, property_ in properties.items()}


def schema_types(schema: Any, root: Any, cache: dict[int, set[str]], depth: int = 0) -> set[str]:
    """Return the JSON types that a schema within `root` allows. `cache`: those of the targets of
    references, by id."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    # A type that JSON does not have is written as a string.
    types = {name if name in JSON_TYPES else "string" for name in names if isinstance(name, str)}
    options = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if not types and isinstance(options, list):
        types = {json_type(option) for option in options}
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types |= schema_types(branch, root, cache, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        target = resolve_reference(root, reference)
        if id(target) not in cache:
            cache[id(target)] = set()  # it may refer to itself
            cache[id(target)] = schema_types(target, root, cache, depth + 1)
        types |= cache[id(target)]
    if schema.get("nullable"):
        types.add("null")
    return types


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the target of a `$ref` within a document; True, the schema of anything, if none."""
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


def json_type(value: Any) -> str:
    return JSON_TYPE_OF[type(value)]
