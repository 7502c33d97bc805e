"""How a model writes its calls: what stands around their names and arguments.

    section[0]  call[0] NAME middle ARGUMENTS call[1]  (separator, the next call)*  section[1]

chat_template/inference.py finds it in a chat template's text. From it come the marks by which
calls are read
(output_format.py) and the grammar that holds a model to them (tool_calls.py). Where a call's index
or id stands in these texts, INDEX or ID does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal

INDEX, ID = "\0", "\1"
VARIABLE = {INDEX: "[0-9]{1,3}", ID: "[A-Za-z0-9_]{1,64}"}
# A stretch in brackets of some kind, as <tool_call>, [ARGS] or <|"|>; or its beginning.
MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")
BEGINNING = re.compile(r"<[^<>]{1,60}$")

Style = Literal["json", "python", "entries"]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """A JSON object; Python's `key=value, …`; or an entry each: `open` KEY `middle` VALUE `close`.

    In entries, texts may stand between `quotes`; values of other types are JSON, or what Python
    shows of them."""

    style: Style = "json"
    colon: str = ": "  # of JSON
    comma: str = ", "  # of JSON, or between entries
    open: str = ""
    middle: str = ""
    close: str = ""
    quotes: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    section: Pair
    call: Pair
    middle: str
    separator: str | None  # None: one call is all there can be
    arguments: ArgumentFormat = ArgumentFormat()
    # Where a call is an object of JSON, what it has before the name and after the arguments, and
    # the keys of both; the name's is "" where the name itself is the key of the arguments.
    braces: Pair = ("", "")
    keys: Pair | None = None
    marker: str = ""  # a word that may stand before calls that have no mark

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as they are written, of names and arguments."""
        before, after = self.call[0] + self.braces[0], self.braces[1] + self.call[1]
        each = [
            (before + name + self.middle).replace(INDEX, str(n)) + arguments + after
            for n, (name, arguments) in enumerate(calls)
        ]
        return self.section[0] + (self.separator or "").join(each) + self.section[1]

    def begun(self, name: str) -> str:
        """What stands before a call's arguments."""
        return (self.call[0] + name + self.middle).replace(INDEX, "0").replace(ID, "id")

    @property
    def trigger(self) -> str:
        """The beginning of a call by which it is sure to be one: its first mark, if it has any."""
        mark = MARK.search(self.call[0])
        return self.call[0][: mark.end()] if mark else self.call[0]

    @property
    def is_list(self) -> bool:
        """What stands between the marks is read as a whole: objects of JSON, or Python's calls."""
        return self.keys is not None or self.arguments.style == "python"

    @property
    def opens(self) -> tuple[list[str], str]:
        """What stands before a call, or before all of a list: what may be left out, and what tells
        that it is one; nothing where calls begin with their JSON or their name."""
        section, call = self.section[0], self.call[0].rstrip()
        if not call:
            section, call = "", section.rstrip()
        call = call.removesuffix("[").strip() if self.is_list else call.strip()
        marks = [*MARK.finditer(call), *BEGINNING.finditer(call)]
        start = marks[-1].start() if marks else 0
        return [text for text in (section.strip(), call[:start].strip()) if text], call[start:]

    @property
    def closes(self) -> tuple[str, list[str]]:
        """What stands after it: what tells that it is over, and marks that may follow."""
        after = (self.call[1] + self.section[1]).strip()
        after = after.removeprefix("]").lstrip() if self.is_list else after
        mark = MARK.search(after)
        return (after[: mark.end()], MARK.findall(after, mark.end())) if mark else (after, [])

    @property
    def unmarked(self) -> bool:
        return not self.opens[1]

    @property
    def several_in_mark(self) -> bool:
        """Calls share one pair of marks, and are read as one list."""
        return self.is_list and self.separator is not None and not MARK.search(self.separator)


PLAIN_CALLS = ToolCallFormat(
    section=("", ""),
    call=("<tool_call>\n", "\n</tool_call>"),
    middle='", "arguments": ',
    separator="\n",
    braces=('{"name": "', "}"),
    keys=("name", "arguments"),
)


def common_start(one: str, other: str) -> str:
    """Of two texts; no mark is cut in two."""
    length = len(commonprefix([one, other]))  # noqa: RUF071  # no paths
    for mark in [*MARK.finditer(one), *MARK.finditer(other)]:
        if mark.start() < length < mark.end():
            length = mark.start()
    return one[:length]


def common_end(one: str, other: str) -> str:
    length = len(commonprefix([one[::-1], other[::-1]]))  # noqa: RUF071  # no paths
    for text in (one, other):
        for mark in MARK.finditer(text):
            if mark.start() < len(text) - length < mark.end():
                length = len(text) - mark.end()
    return one[len(one) - length :]
