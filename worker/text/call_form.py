"""How a model writes calls: its chat template is asked to write some, and what stands around names
and arguments is the form.

Where that cannot be told (no tools in the template, arguments that are not JSON), calls that must
be made are written in the plain form. grammar/tool_calls.py holds a model to a form.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker.text.response_template import AnswerForm

Render = Callable[[list[dict[str, Any]]], str]  # a chat template; nothing where it raises

NAME = "name_of_it"
ARGUMENTS = {"first_key": "its_text", "second_key": 12}
WRITTEN = re.compile(
    r'\{\s*"first_key"(?P<colon>\s*:\s*)"its_text"(?P<comma>\s*,\s*)"second_key"\s*:\s*12\s*\}'
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end"""

    begin: str
    middle: str
    between: str | None  # None: one call is all there can be
    end: str
    colon: str = ": "
    comma: str = ", "
    several_in_mark: bool = False  # calls share one pair of marks

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as they are written, of names and arguments."""
        between = self.between or self.end + self.begin
        written = between.join(name + self.middle + arguments for name, arguments in calls)
        return self.begin + written + self.end


PLAIN_CALLS = CallForm(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


def call_form(answers: AnswerForm | None, render: Render) -> CallForm | None:
    """What `render` makes of calls that `answers` reads; None if it cannot be told."""
    if answers is None or answers.calls is None or answers.calls.content != "json":
        return None
    one = _calls_written(answers, render, 1)
    found = WRITTEN.search(one)
    if found is None or one.count(NAME) != 1 or found.start() < one.index(NAME):
        return None
    begin, middle = one[: found.start()].split(NAME)
    call = NAME + middle + found[0]
    two, between = _calls_written(answers, render, 2), None
    if two.startswith(begin + call) and call in (rest := two[len(begin + call) :]):
        between = rest[: rest.index(call)]
    close = answers.closes.get("tool_calls")
    shared = between is not None and (close is None or not close.pattern.search(between))
    end = one[found.end() :]
    return CallForm(begin, middle, between, end, found["colon"], found["comma"], shared)


def _calls_written(answers: AnswerForm, render: Render, count: int) -> str:
    """From the mark that opens the first call to the one that closes the last; nothing where no
    such call is shown."""
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    calls = [{**call, "id": f"call0000{n}"} for n in range(count)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render([{"role": "user", "content": "?"}, turn])
    try:
        opens = answers.opens["tool_calls"].pattern.finditer(text)
        first = text.index(NAME)  # what stands before may be told about calls in general
        start = [match.start() for match in opens if match.start() <= first][-1]
        close = answers.closes.get("tool_calls")
        ends = [match.end() for match in close.pattern.finditer(text)] if close else []
        if ends and ends[-1] > text.rindex(NAME):
            return text[start : ends[-1]]
        return text[start : list(WRITTEN.finditer(text))[-1].end()] + _closing(text[start:first])
    except (ValueError, LookupError):
        return ""


def _closing(text: str) -> str:
    """The brackets that a text leaves open, closed."""
    left_open: list[str] = []
    for letter in text:
        if letter in "{[":
            left_open.append("}" if letter == "{" else "]")
        elif letter in "}]":
            left_open.pop()
    return "".join(reversed(left_open))
