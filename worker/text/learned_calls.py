"""The form of a model's calls, found in a turn with one call and a turn with two.

    <call>nameone{"keyone": "valueone", "keytwo": 12}</call>
    <call>nameone{…}</call>\n<call>nametwo{…}</call>

Here a call stands in <call> … </call>, nothing is between its name and its arguments, these are
JSON, and "\n" separates calls. Three ways to write arguments are tried, one after another.
"""

import json
import re
from typing import Any, NamedTuple

from worker.text.call_form import ID, INDEX, Arguments, CallForm, Pair, common_end, common_start
from worker.text.probes import ARGUMENTS, NAMES, NUMBER, TEXT

OBJECT = re.compile(
    r'\{\s*"keyone"(?P<colon>\s*:\s*)"valueone"(?P<comma>\s*,\s*)"keytwo"\s*:\s*12\s*\}'
)
PYTHON = re.compile(
    rf"{NAMES[0]}\((?P<written>\s*keyone\s*=\s*(?P<quote>[\"']?){TEXT}(?P=quote)"
    rf"(?P<comma>\s*,\s*)keytwo\s*=\s*(?P<other>[\"']?){NUMBER}(?P=other)\s*)\)"
)
ENTRIES = re.compile(rf"{NAMES[0]}(.*?)keyone(.*?){TEXT}(.*?)keytwo(.*?){NUMBER}(.*)$", re.DOTALL)


class Found(NamedTuple):
    """Arguments as they are written in a text. So many letters `before` a call's name and `after`
    its arguments are part of its JSON or its Python."""

    written: str
    arguments: Arguments
    before: int = 0
    after: int = 0
    keys: Pair | None = None


def call_form(one: str, two: str) -> CallForm | None:
    """`two`: nothing if one call is all there can be. None: not understood."""
    ways = (way(one) for way in (_json, _python, _entries))
    forms = (_form(one, two, found) for found in ways if found)
    return next((form for form in forms if form), None)


def _json(text: str) -> Found | None:
    """{"name": "nameone", "arguments": {"keyone": …}}, or the arguments alone."""
    name = text.index(NAMES[0])
    found = OBJECT.search(text, name)
    if found is None:
        return None
    arguments = Arguments("json", found["colon"], found["comma"])
    around = _object_around(text, name, found.end())
    if around is None:
        return Found(found[0], arguments)
    start, end, made = around
    keys = _keys(made)
    return keys and Found(found[0], arguments, name - start, end - found.end(), keys)


def _object_around(text: str, name: int, end: int) -> tuple[int, int, dict[str, Any]] | None:
    """The innermost object of JSON with both a name and what ends at `end`."""
    start = text.rfind("{", 0, name)
    while start >= 0:
        try:
            made, length = json.JSONDecoder().raw_decode(text.replace(ID, "i")[start:])
        except ValueError:
            made, length = None, 0
        if isinstance(made, dict) and start + length > end:
            return start, start + length, made
        start = text.rfind("{", 0, start)
    return None


def _keys(made: dict[str, Any]) -> Pair | None:
    """Those of the name and the arguments; "" where the name itself is the arguments' key."""
    if made.get(NAMES[0]) == ARGUMENTS:
        return "", ""
    name = [key for key, value in made.items() if value == NAMES[0]]
    arguments = [key for key, value in made.items() if value == ARGUMENTS]
    return (name[0], arguments[0]) if name and arguments else None


def _python(text: str) -> Found | None:
    """nameone(keyone="valueone", keytwo=12)"""
    found = PYTHON.search(text)
    if found is None:
        return None
    quotes = "" if found["other"] else found["quote"]
    arguments = Arguments("python", comma=found["comma"], quotes=quotes)
    return Found(found["written"], arguments, after=len(")"))


def _entries(text: str) -> Found | None:
    """What stands around two keys and two values, a text and a number. In

        nameone{keyone:<|"|>valueone<|"|>,keytwo:12}

    the middle is ":", a text's is more by the quotes, and "," is what stands before the second key
    and not before the first. In

        nameone<key>keyone</key><value>valueone</value><key>keytwo</key><value>12</value></call>

    what stands after both values closes an entry, and what stands before both keys opens one."""
    found = ENTRIES.search(text)
    if found is None:
        return None
    first, to_text, between, middle, rest = found.groups()
    quotes = to_text[len(middle) :]
    if to_text != middle + quotes or not between.startswith(quotes):
        return None
    between = between[len(quotes) :]
    close = common_start(between, rest)
    between = between[len(close) :]
    opens = common_end(first, between)
    comma = between[: len(between) - len(opens)]
    texts = {"open": opens, "middle": middle, "close": close}
    arguments = Arguments("entries", comma=comma, quotes=quotes, **texts)
    start = found.start(1) + len(first) - len(opens)
    return Found(text[start : found.start(5) + len(close)], arguments)


def _form(one: str, two: str, found: Found) -> CallForm | None:
    """What stands around the call, and between two of them."""
    before, _, rest = one.partition(NAMES[0])
    middle, written, after = rest.partition(found.written)
    if not written:
        return None
    start = len(before) - found.before
    head, tail = before[start:], after[: found.after]
    between = None
    rest = two.partition(NAMES[0])[2].partition(found.written)[2]
    second_before, _, rest = rest.partition(NAMES[1])
    second_middle, written, _ = rest.partition(found.written)
    if written:
        second = len(second_before) - found.before
        between = second_before[found.after : second]
        heads, middles = _counted(head, second_before[second:]), _counted(middle, second_middle)
        if heads is None or middles is None:
            return None
        head, middle = heads, middles
    section, each, separator = split(before[:start], between, after[found.after :])
    return CallForm(section, each, middle, separator, found.arguments, (head, tail), found.keys)


def _counted(one: str, other: str) -> str | None:
    """A text of the first call and the second, with INDEX where these are counted; None where they
    differ in something else."""
    if one == other:
        return one
    counted = re.sub(r"\b0\b", INDEX, one)
    return counted if counted == re.sub(r"\b1\b", INDEX, other) else None


def split(before: str, between: str | None, after: str) -> tuple[Pair, Pair, str | None]:
    """Section, call and separator of what stands before, between and after two calls."""
    if between is None:
        return ("", ""), (before, after), None
    opens = common_end(before, between)
    between = between[: len(between) - len(opens)]
    closes = common_start(between, after)
    section = before[: len(before) - len(opens)], after[len(closes) :]
    return section, (opens, closes), between[len(closes) :]
