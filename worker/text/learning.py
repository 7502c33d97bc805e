"""The form of a model's answers, learned from its chat template.

    conversations made for the purpose  --render-->  texts  --compare-->  AnswerForm

The template renders turns with and without calls, thoughts and text, with names and values that
occur nowhere else; what stands around those is the form. There is no table of families. What is
found is proved (proof.py) before it is used.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from worker.text.answer_form import Channels
from worker.text.call_form import (
    ID,
    INDEX,
    MARK,
    Arguments,
    CallForm,
    Pair,
    common_end,
    common_start,
    split,
)
from worker.text.probes import (
    ARGUMENTS,
    CONTENT,
    IDS,
    NAMES,
    NUMBER,
    TEXT,
    THOUGHT,
    TOOLS,
    assistant,
)
from worker.text.turns import BLOCKS, QUESTION, Conversation, Message, TurnForm

# A chat template, with variables; nothing where it raises.
Render = Callable[..., str]

OBJECT = re.compile(
    r'\{\s*"keyone"(?P<colon>\s*:\s*)"valueone"(?P<comma>\s*,\s*)"keytwo"\s*:\s*12\s*\}'
)
SHOWN = re.compile(r"([^\s<>\[\]{}\"'`(]{3,40})\[\s*\{\s*\"name\"")
DUMPED = re.compile(rf"\W(?:type|thinking)\W\s*:\s*\W(?:thinking|{THOUGHT})")
THOUGHTS_KEYS = ("reasoning_content", "reasoning", "thinking", BLOCKS)
LAST_MARK = re.compile(rf"(?:{MARK.pattern})\w*\s*$")
OPENED = re.compile(r"(<([\w:]{1,40})>|\[([A-Z]{2,40})\])\s*(?:</\2>|\[/\3\])?\s*$")


class Learner:
    """`turns`: how the template takes calls; None: it takes none."""

    def __init__(self, render: Render, source: str, turns: TurnForm | None) -> None:
        self._render, self._turns = render, turns
        self._offers = bool(render([QUESTION], TOOLS))  # some templates fail where there are tools
        tools = TOOLS if self._offers else ()
        self._asked = render([QUESTION], tools, add_generation_prompt=True)
        unasked = render([QUESTION], tools, add_generation_prompt=False)
        self._prompt = self._asked[len(common_start(self._asked, unasked)) :].strip()
        self.thoughts_key = self._thoughts_key()
        self.thoughts = self._thoughts(source)

    def turn(self, turn: Message, tools: Sequence[Any] = TOOLS, **variables: Any) -> str:
        """A question and this turn."""
        messages = [QUESTION, turn]
        if self._turns is not None:
            messages = Conversation(self._turns).adapt(messages)
        variables = {"add_generation_prompt": False, **variables}
        return self._render(messages, tools if self._offers else (), **variables)

    # ── calls ──

    def calls(self) -> CallForm | None:
        """None where the template writes none, or none that is understood."""
        if self._turns is None or self._turns.written:
            return None
        one, two = self._written(1), "" if self._turns.single else self._written(2)
        if NAMES[0] not in one:
            return None
        if NAMES[1] not in two or two.find(NAMES[1]) < two.find(NAMES[0]):
            two = ""
        return self._json(one, two) or self._python(one, two) or self._entries(one, two)

    def _written(self, count: int) -> str:
        text = self.written(*(ARGUMENTS,) * count)
        for id_ in IDS:
            text = text.replace(id_, ID)
        return text

    def written(self, *arguments: dict[str, Any], tools: Sequence[Any] = TOOLS) -> str:
        """A turn's calls with these arguments, and all that stands around them."""
        text = self.turn(assistant(*arguments), tools).rstrip()
        plain = (self.turn(assistant(content=CONTENT), tools) or self._asked).rstrip()
        text = text[len(common_start(text, plain)) :]
        text = text[: len(text) - len(common_end(text, plain))]
        empty = rf"^\s*(?:{'|'.join(map(re.escape, self.thoughts))})\s*" if self.thoughts else "^$"
        return re.sub(empty, "", re.sub(empty, "", text))

    def _json(self, one: str, two: str) -> CallForm | None:
        found = OBJECT.search(one, one.index(NAMES[0]))
        if found is None:
            return None
        arguments = Arguments("json", found["colon"], found["comma"])
        whole = _object_around(one, one.index(NAMES[0]), found.end())
        if whole is None:
            spans = [_span(text, n, found[0]) for text, n in ((one, 0), (two, 0), (two, 1))]
            return _form(one, two, spans, (0, 0), arguments, None)
        start, end, made = whole
        keys = _keys(made)
        if keys is None:
            return None
        before, after = one.index(NAMES[0]) - start, end - found.end()
        spans = [_span(text, n, found[0]) for text, n in ((one, 0), (two, 0), (two, 1))]
        return _form(one, two, spans, (before, after), arguments, keys)

    def _python(self, one: str, two: str) -> CallForm | None:
        first = rf"\(\s*keyone\s*=\s*(?P<quote>[\"']?){TEXT}(?P=quote)"
        second = rf"(?P<comma>\s*,?\s*)keytwo\s*=\s*(?P<other>[\"']?){NUMBER}(?P=other)\s*\)"
        found = re.search(NAMES[0] + first + second, one)
        if found is None:
            return None
        written = found[0].removeprefix(NAMES[0] + "(").removesuffix(")")
        quotes = "" if found["other"] else found["quote"]
        arguments = Arguments("python", comma=found["comma"] or ", ", quotes=quotes)
        spans = [_span(text, n, written) for text, n in ((one, 0), (two, 0), (two, 1))]
        return _form(one, two, spans, (0, 1), arguments, None)

    def _entries(self, one: str, two: str) -> CallForm | None:
        """What stands around two keys and two values, a text and a number."""
        pattern = rf"{NAMES[0]}(.*?)keyone(.*?){TEXT}(.*?)keytwo(.*?){NUMBER}(.*)$"
        found = re.search(pattern, one, re.DOTALL)
        if found is None:
            return None
        first, to_text, between, to_number, rest = found.groups()
        quotes = ""
        if to_text != to_number and to_text.startswith(to_number):
            quotes = to_text[len(to_number) :]
            if not between.startswith(quotes):
                return None
            to_text, between = to_number, between[len(quotes) :]
        close = common_start(between, rest)
        between = between[len(close) :]
        opens = common_end(first, between)
        arguments = Arguments(
            "entries",
            comma=between[: len(between) - len(opens)],
            open=opens,
            middle=to_number,
            text_middle=to_text,
            close=close,
            quotes=quotes,
        )
        start = len(NAMES[0] + first) - len(opens)
        end = len(found[0]) - len(rest) + len(close)
        written = found[0][start:end]
        spans = [_span(text, n, written) for text, n in ((one, 0), (two, 0), (two, 1))]
        return _form(one, two, spans, (0, 0), arguments, None)

    def marker(self, form: CallForm) -> str:
        """A word before calls without a mark, as in the prompt's example of one."""
        found = SHOWN.search(self._asked) if form.unmarked and form.keys else None
        return found[1] if found else ""

    # ── thoughts and content ──

    def _thoughts_key(self) -> str | None:
        """Where a message has its thoughts for the template to show them."""
        return next((key for key in THOUGHTS_KEYS if self._thinking(key)), None)

    def _thinking(self, key: str) -> str:
        """A turn with thoughts and content, or a call if only that shows them; nothing where none
        are shown."""
        turns = [assistant(content=CONTENT, thought=THOUGHT, key=key)]
        turns += [assistant(ARGUMENTS, thought=THOUGHT, key=key)] if key != BLOCKS else []
        texts = (self.turn(turn, enable_thinking=True) for turn in turns)
        shown = (text for text in texts if THOUGHT in text and not DUMPED.search(text))
        return next(shown, "").replace(NAMES[0], CONTENT)

    def _thoughts(self, source: str) -> Pair | None:
        """The marks around them."""
        before, _, after = self._thinking(self.thoughts_key or "").partition(THOUGHT)
        opens, closes = LAST_MARK.search(before), MARK.search(after.partition(CONTENT)[0])
        if opens and closes:
            plain = LAST_MARK.search(self.turn(assistant(content=CONTENT)).partition(CONTENT)[0])
            if plain is None or plain[0] != opens[0]:
                return opens[0].strip(), closes[0]
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            asked = self._render([QUESTION], [], add_generation_prompt=True, **variables)
            if found := OPENED.search(asked):
                return found[1], found[1][0] + "/" + found[1][1:]
        return ("<think>", "</think>") if "</think>" in source else None

    def content(self) -> Pair | None:
        """The marks around it, if there are any."""
        before, _, after = self.turn(assistant(content=CONTENT), []).partition(CONTENT)
        opens, closes = LAST_MARK.search(before), MARK.match(after.lstrip())
        asked = self._render([QUESTION], [], add_generation_prompt=True)
        if opens is None or closes is None or not after:
            return None
        found = MARK.match(opens[0])
        if found is None or found[0] != opens[0].strip() or found[0] in asked:
            return None
        return None if found[0] in (self.thoughts or ()) else (found[0], closes[0])

    def channels(self, calls: CallForm | None) -> Channels | None:
        """Thoughts are a message, and the generation prompt's text stands before each."""
        before, _, after = self._thinking(self.thoughts_key or "").partition(THOUGHT)
        between, _, rest = after.partition(CONTENT)
        if not self._prompt or self._prompt not in between:
            return None
        end, _, content = between.partition(self._prompt)
        thinking = before.rpartition(self._prompt)[2]
        marks = [MARK.findall(text) for text in (thinking, content)]
        if any(len(each) != 2 for each in marks) or marks[0] != marks[1]:
            return None
        channel, body = marks[0]
        words = [re.split(MARK, text)[1].strip() for text in (thinking, content)]
        ends = [*MARK.findall(end), *MARK.findall(rest)[:1]]
        ends += MARK.findall(calls.call[1]) if calls else []
        recipient = calls.call[0] if calls else ""
        if calls and "=" not in recipient:
            return None
        thoughts, told = words
        ends = list(dict.fromkeys(ends))
        return Channels(self._prompt, channel, body, tuple(ends), thoughts, told, recipient)


def _span(text: str, n: int, written: str) -> tuple[int, int, int]:
    """Where the n-th call's name begins, and its arguments begin and end; zeros if nowhere."""
    name = text.find(NAMES[n])
    start = text.find(written, name)
    return (name, start, start + len(written)) if 0 <= name < start else (0, 0, 0)


def _form(
    one: str,
    two: str,
    spans: Sequence[tuple[int, int, int]],
    braces: tuple[int, int],
    arguments: Arguments,
    keys: Pair | None,
) -> CallForm | None:
    """`spans`: of the one call, and of two. `braces`: how much belongs to a call before its name
    and after its arguments."""
    (name, start, end), (_, first, first_end), (second_name, second, _) = spans
    if not start:
        return None
    middle = one[name + len(NAMES[0]) : start]
    head, tail = one[name - braces[0] : name], one[end : end + braces[1]]
    before, after, between = one[: name - braces[0]], one[end + braces[1] :], None
    if first and second:
        other = two[second_name + len(NAMES[1]) : second]
        between = two[first_end + braces[1] : second_name - len(head)]
        other_head = two[second_name - len(head) : second_name]
        if middle != other:
            middle, other = _numbered(middle, 0), _numbered(other, 1)
        if head != other_head:
            head, other_head = _numbered(head, 0), _numbered(other_head, 1)
        if middle != other or head != other_head:
            return None
    section, each, separator = split(before, between, after)
    return CallForm(section, each, middle, separator, arguments, (head, tail), keys)


def _numbered(text: str, n: int) -> str:
    return re.sub(rf"\b{n}\b", INDEX, text)


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
    """The keys of the name and the arguments."""
    if made.get(NAMES[0]) == ARGUMENTS:
        return "", ""
    name = [key for key, value in made.items() if value == NAMES[0]]
    arguments = [key for key, value in made.items() if value == ARGUMENTS]
    return (name[0], arguments[0]) if name and arguments else None
