"""How a model writes tool calls: the text around their names and arguments.

    section[0]  call[0] NAME middle ARGUMENTS call[1]  (separator, the next call)*  section[1]

chat_template/inference.py infers it from the text of a chat template. output_format.py derives the
delimiters that start and end calls from it, grammar/tool_calls.py the grammar that constrains them.
INDEX, ID and NAME stand in these texts for a call's index, id and name, KEY and TYPE in the texts
around an argument's value for its key and for the word of its JSON type.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from os.path import commonprefix
from typing import Literal

INDEX, ID, KEY, TYPE, NAME = "\0", "\1", "\2", "\3", "\5"
PLACEHOLDER_PATTERNS = {INDEX: "[0-9]{1,3}", ID: "[A-Za-z0-9_]{1,64}", NAME: "(?P=name)"}
# <tool_call>, <|"|>, [ARGS], ◁think▷
DELIMITER = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]|◁[^◁▷\s]{1,60}▷")

Style = Literal["json", "python", "entries"]
Pair = tuple[str, str]  # the text before and the text after something


@dataclass(frozen=True, slots=True)
class DelimiterSyntax:
    """How a template writes delimiters: <call> or [CALL], and with `brackets` also a word between
    two tokens: <|open|>call<|sep|>. Such tokens are no delimiters themselves."""

    brackets: tuple[Pair, ...] = ()

    @property
    def pattern(self) -> re.Pattern[str]:
        return _delimiter_patterns(self.brackets)[0]

    @property
    def unfinished(self) -> re.Pattern[str]:
        """The beginning of a delimiter, at the end of a text: <invoke name=" """
        return _delimiter_patterns(self.brackets)[1]

    def common_start(self, one: str, other: str) -> str:
        """Return the longest common prefix that cuts no delimiter in two."""
        length = len(commonprefix([one, other]))  # noqa: RUF071  # no paths
        for delimiter in [*self.pattern.finditer(one), *self.pattern.finditer(other)]:
            if delimiter.start() < length < delimiter.end():
                length = delimiter.start()
        return one[:length]

    def common_end(self, one: str, other: str) -> str:
        """Return the longest common suffix that cuts no delimiter in two."""
        length = len(commonprefix([one[::-1], other[::-1]]))  # noqa: RUF071  # no paths
        for text in (one, other):
            for delimiter in self.pattern.finditer(text):
                if delimiter.start() < len(text) - length < delimiter.end():
                    length = len(text) - delimiter.end()
        return one[len(one) - length :]


@cache
def _delimiter_patterns(brackets: tuple[Pair, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of delimiters and of the beginning of one."""
    whole, unfinished = DELIMITER.pattern, r"<[^<>]{1,60}$"
    if brackets:
        bracket = "|".join(re.escape(text) for pair in brackets for text in pair)
        whole = rf"(?!{bracket})(?:{whole})"
        for before, after in brackets:
            opening = rf"{re.escape(before)}(?:(?!{bracket})"
            whole += rf"|{opening}\S){{1,60}}{re.escape(after)}"
            unfinished += rf"|{opening}.){{1,60}}$"
    return re.compile(whole), re.compile(unfinished)


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """A JSON object; Python's `key=value, …`; or entries: `open` KEY `middle` VALUE `close`.

    In entries, `quotes` may surround strings; values of other types are JSON or Python literals.
    `types`: pairs of a JSON type and its word, where `middle` has a TYPE. `close` may have a KEY.
    `item`: the key of a list's items, where lists and objects are written as entries themselves.
    """

    style: Style = "json"
    colon: str = ": "  # of JSON
    comma: str = ", "  # of JSON, or between entries
    open: str = ""
    middle: str = ""
    close: str = ""
    quotes: str = ""
    types: tuple[Pair, ...] = ()
    item: str = ""

    @property
    def value_quotes(self) -> str:
        """The delimiter on both sides of strings, or of all values; "" if there is none."""
        same = self.style == "entries" and not self.open and self.close.strip()
        return self.quotes or (self.close if same and self.middle.endswith(self.close) else "")

    def type_word(self, json_type: str) -> str:
        """Return the word of a JSON type; that of the others if it has no own one."""
        words = {word for name, word in self.types if name != "string"}
        return dict(self.types).get(json_type) or (words.pop() if len(words) == 1 else json_type)

    def opening(self, key: str, json_type: str) -> str:
        """Return the text before a value."""
        return self.open + key + self.middle.replace(TYPE, self.type_word(json_type))

    def closing(self, key: str) -> str:
        """Return the text after a value."""
        return self.close.replace(KEY, key)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    section: Pair
    call: Pair
    middle: str
    separator: str | None  # None: a message has at most one call
    arguments: ArgumentFormat = ArgumentFormat()
    # Where a call is a JSON object: its text before the name and after the arguments, and the keys
    # of both. The name's key is "" where the name itself is the key of the arguments.
    braces: Pair = ("", "")
    keys: Pair | None = None
    prefix_word: str = ""  # may stand before calls without delimiters
    any_style: bool = False  # JSON, Python calls or tags may stand between the delimiters
    first_index: int = 0
    message_start: str = ""  # each call is a message that begins with it; the prompt has the first
    syntax: DelimiterSyntax = DelimiterSyntax()

    def render(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls. `calls`: names and arguments."""
        before, after = self.call[0] + self.braces[0], self.braces[1] + self.call[1]
        texts = [
            (before + name + self.middle_of(name)).replace(INDEX, str(n)) + arguments + after
            for n, (name, arguments) in enumerate(calls, self.first_index)
        ]
        return self.section[0] + (self.separator or "").join(texts) + self.section[1]

    def middle_of(self, name: str) -> str:
        """Return the text between a call's name and its arguments."""
        return self.middle.replace(NAME, name)

    def call_prefix(self, name: str) -> str:
        """Return the text of a call up to its arguments; "" without delimiters."""
        text = "" if self.undelimited else self.call[0] + name + self.middle_of(name)
        return text.replace(INDEX, str(self.first_index)).replace(ID, "id")

    @property
    def trigger(self) -> str:
        """The beginning of a call that identifies it: up to its first delimiter, if it has one; of
        a list of calls, up to its last."""
        if self.is_list:
            text, opens = self.section[0] + self.call[0], self.opening[1]
            return text[: text.rfind(opens) + len(opens)]
        delimiter = self.syntax.pattern.search(self.call[0])
        return self.call[0][: delimiter.end()] if delimiter else self.call[0]

    def beginnings(self, names: Sequence[str]) -> list[str]:
        """Return the texts with which the model has begun a call, of one of the names if only a
        name identifies it."""
        if self.undelimited:
            before = (self.section[0] + self.call[0] + self.braces[0]).lstrip()
            return [before + name + self.middle_of(name)[:1] for name in names]
        text = self.opening[1] if self.is_list else self.trigger.strip()
        return [text] if text and PLACEHOLDER_PATTERNS.keys().isdisjoint(text) else []

    @property
    def is_list(self) -> bool:
        """Whether the delimiters enclose one list: of JSON objects, or of Python calls."""
        return self.keys is not None or self.arguments.style == "python"

    @property
    def opening(self) -> tuple[list[str], str]:
        """The text before a call or a list of calls: optional parts, and the part that identifies
        it, which is "" where calls begin with their JSON or their name."""
        section, call = self.section[0], self.call[0].rstrip()
        if not call:
            section, call = "", section.rstrip()
        call = call.removesuffix("[").strip() if self.is_list else call.strip()
        syntax = self.syntax
        delimiters = [*syntax.pattern.finditer(call), *syntax.unfinished.finditer(call)]
        start = delimiters[-1].start() if delimiters else 0
        before = (section, *re.split(f"({DELIMITER.pattern})", call[:start]))
        return [text.strip() for text in before if text.strip()], call[start:]

    @property
    def closing(self) -> tuple[str, list[str]]:
        """The text after a call: the part that ends it, and delimiters that may follow."""
        after = (self.call[1] + self.section[1]).strip()
        after = after.removeprefix("]").lstrip() if self.is_list else after
        in_arguments = self.arguments.open + self.arguments.close  # these end no call
        all_ = [*self.syntax.pattern.finditer(after)]
        own = [delimiter for delimiter in all_ if delimiter[0] not in in_arguments]
        if not own:
            return after, []
        following = [delimiter[0] for delimiter in own[1:]]
        if len(own) < len(all_):
            following = [after[a.end() : b.end()].strip() for a, b in pairwise(own)]
        return after[: own[0].end()], following

    @property
    def undelimited(self) -> bool:
        return not (self.opening[1] or self.message_start)

    @property
    def shares_delimiters(self) -> bool:
        """Whether one pair of delimiters encloses several calls, which are read as one list."""
        separator = self.separator
        return self.is_list and separator is not None and not self.syntax.pattern.search(separator)


DEFAULT_TOOL_CALL_FORMAT = ToolCallFormat(
    section=("", ""),
    call=("<tool_call>\n", "\n</tool_call>"),
    middle='", "arguments": ',
    separator="\n",
    braces=('{"name": "', "}"),
    keys=("name", "arguments"),
)
