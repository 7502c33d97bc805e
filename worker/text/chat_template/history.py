"""How the model's chat template takes calls and their results back.

    at load:    question, call, result in every form  --render-->  text: are they in it?  →
    HistoryFormat
    a request:  messages as the API has them  --adapt-->  messages as the template takes them

Templates differ in what they want beside calls without content, in arguments, in ids, and in what
they show at all.
"""

import hashlib
import json
import re
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT, ToolCallFormat

Message = dict[str, Any]
# Messages, tools and variables as the template's text; nothing where it raises.
Render = Callable[..., str]
BLOCKS = "blocks"
Ids = Literal["any", "nine", "named"]
ArgumentsAs = Literal["object", "text"]
Content = Literal["absent", "null", "dumped", "empty"]
Results = Literal["shown", "told"]

QUESTION: Message = {"role": "user", "content": "?"}
NINE = re.compile("[A-Za-z0-9]{9}")
# Of turns that are tried, with other names than those of the tools that are offered.
NUMBERS = ("one", "two")
IDS_TRIED = ("call_of_one", "callofone", "functions.name_one:0")
BEFORE = "text_before"
ALL_POINTS = 5


class Null:
    """None, for templates that ask whether content is none: newer versions of transformers leave
    out fields that are None, but put what `model_dump` returns in place of an object that has it.
    Older ones show the object, which reads as the None that no template should show."""

    def model_dump(self) -> None:
        return None

    def __repr__(self) -> str:
        return "None"


CONTENTS: dict[Content, Message] = {
    "absent": {},
    "null": {"content": None},
    "dumped": {"content": Null()},
    "empty": {"content": ""},
}


@dataclass(frozen=True, slots=True)
class HistoryFormat:
    """What a template takes."""

    ids: Ids = "any"  # nine: letters or digits; named: functions.NAME:INDEX
    arguments: ArgumentsAs = "object"
    content: Content = "absent"  # beside calls, where there is none
    apart: bool = False  # content beside calls is a message of its own
    single: bool = False  # one call a message, each with its results
    written: bool = False  # it knows no calls: they are part of the content
    results: Results = "shown"  # or told in the user's words, where it knows none
    thoughts: str = "reasoning_content"  # the key of a message's thoughts, or `blocks` of content

    def call_id(self, name: str, index: int) -> str:
        """For a call that the model makes, its conversation's `index`-th."""
        if self.ids == "named":
            return _named(name, index)
        return secrets.token_hex(5)[:9] if self.ids == "nine" else "call_" + secrets.token_hex(12)


class HistoryAdapter:
    """Adapted message by message, so that calls and their results get the same ids."""

    def __init__(
        self, form: HistoryFormat, written: ToolCallFormat = DEFAULT_TOOL_CALL_FORMAT
    ) -> None:
        """`written`: how calls are that the template does not show."""
        self.form = form
        self._written = written
        self._made: list[Message] = []
        self._known: dict[str | None, Message] = {}  # calls by the ids they came with
        self._used: set[str] = set()

    def adapt(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        left = deque(map(self._thinking, map(dict, messages)))
        while left:
            message = left.popleft()
            if message["role"] == "tool":
                self._result(message)
            elif message.get("tool_calls"):
                results = []
                while left and left[0]["role"] == "tool":
                    results.append(left.popleft())
                self._turn(message, results)
            else:
                self._made.append(message)
        return self._made

    def _thinking(self, message: Message) -> Message:
        """A message with its thoughts where the template looks for them."""
        key = self.form.thoughts
        if key == "reasoning_content" or "reasoning_content" not in message:
            return message
        thought, content = message.pop("reasoning_content"), message.get("content") or ""
        if key != BLOCKS:
            return {**message, key: thought}
        if not isinstance(content, str):
            return message
        blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
        return {**message, "content": blocks if content else blocks[:1]}

    def _turn(self, message: Message, results: list[Message]) -> None:
        """Results come in the order of their calls: many templates show no ids."""
        given = message.pop("tool_calls")
        answers, others = _matched(given, results)
        if self.form.apart and message.get("content"):
            self._made.append({"role": "assistant", "content": message.pop("content")})
        size = 1 if self.form.single else len(given)
        for start in range(0, len(given), size):
            group = given[start : start + size]
            calls = [self._call(call, place) for place, call in enumerate(group)]
            first = message if start == 0 else {"role": "assistant"}
            self._made.append(self._calling(first, calls))
            for call, found in zip(calls, answers[start : start + size], strict=True):
                for result in found:
                    self._result(result, call)
        for result in others:
            self._result(result)

    def _calling(self, message: Message, calls: list[Message]) -> Message:
        if self.form.written:
            written = self._written.render(
                [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            )
            content = message.get("content")
            return {**message, "content": f"{content}\n{written}" if content else written}
        made = {**message, "tool_calls": calls}
        if not message.get("content"):
            made.pop("content", None)
            made |= CONTENTS[self.form.content]
        return made

    def _call(self, given: Mapping[str, Any], place: int) -> Message:
        name = given["function"]["name"]
        arguments = _arguments(given["function"]["arguments"], self.form)
        function = {"name": name, "arguments": arguments}
        made = {**given, "id": self._id(given.get("id"), name, place), "function": function}
        self._known[given.get("id")] = made
        return made

    def _result(self, message: Message, call: Message | None = None) -> None:
        """Of `call`, or of the one that it names."""
        call = call or self._known.get(message.get("tool_call_id"))
        if call is not None:
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        elif (id := message.get("tool_call_id")) and not self._fits(id):
            message = {**message, "tool_call_id": self._fresh(id)}
        if self.form.results == "told":
            self._tell(message["content"])
        else:
            self._made.append(message)

    def _tell(self, result: str) -> None:
        """As the user's words; those of one turn together, since many templates want turns."""
        told = f"<tool_response>\n{result}\n</tool_response>"
        if self._made and self._made[-1].get("told"):
            told = f"{self._made.pop()['content']}\n{told}"
        self._made.append({"role": "user", "content": told, "told": True})

    def _id(self, given: str | None, name: str, place: int) -> str:
        if self.form.ids == "named":
            return _named(name, place)
        if not given or given in self._used or not self._fits(given):
            given = self._fresh(given)
        self._used.add(given)
        return given

    def _fits(self, id: str) -> bool:
        return self.form.ids != "nine" or NINE.fullmatch(id) is not None

    def _fresh(self, given: str | None) -> str:
        """The same each time, so that a conversation that goes on begins as it did."""
        seed = f"{len(self._used)} {given}".encode(errors="replace")
        digits = hashlib.sha256(seed).hexdigest()
        return digits[:9] if self.form.ids == "nine" else "call_" + digits[:24]


def _named(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def _matched(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Message]
) -> tuple[list[list[Message]], list[Message]]:
    """Each call's results, and those of none. Where ids are missing, their order tells."""
    answers: list[list[Message]] = [[] for _ in calls]
    others: list[Message] = []
    places: dict[str | None, deque[int]] = defaultdict(deque)
    for place, call in enumerate(calls):
        places[call.get("id")].append(place)
    for position, result in enumerate(results):
        id = result.get("tool_call_id")
        if found := places.get(id):
            answers[found.popleft() if len(found) > 1 else found[0]].append(result)
        elif id is None and position < len(calls):
            answers[position].append(result)
        else:
            others.append(result)
    return answers, others


def _arguments(given: str | dict[str, Any], form: HistoryFormat) -> str | dict[str, Any]:
    """What is no object, cut off or made up, is shown as it is."""
    if form.arguments == "text" or form.written:
        return (given or "{}") if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if isinstance(given, dict):
        return given
    try:
        parsed = json.loads(given or "{}")  # integers of any size
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


# ── at load: what a template takes ──


def history_format(render: Render, nones: int) -> HistoryFormat | None:
    """The form in which a template shows calls and results best; None if it can show none.
    `nones`: how often it writes None where no message has any."""
    for results in get_args(Results):
        best, most = HistoryFormat(written=True, results=results), 0
        for ids, arguments, content in product(get_args(Ids), get_args(ArgumentsAs), CONTENTS):
            form = HistoryFormat(ids, arguments, content, results=results)
            if (points := _points(render(_conversation(form)), nones)) > most:
                best, most = form, points
            if most == ALL_POINTS:
                break
        if most or _points(render(_conversation(best)), nones):
            return _arranged(render, best)
    return None


def _points(text: str, nones: int) -> int:
    """How well a call and its result are shown; 0: not both of them."""
    if "name_one" not in text or "result_one" not in text:
        return 0
    misquoted = "'key_one'" in text or '\\"key_one' in text
    arguments = "key_one" in text and text.count("value_one") == 1 and not misquoted
    tied = all(text.count(id) != 1 for id in IDS_TRIED)  # as often with the call as its result
    named = text.index("name_one") < text.find("value_one")  # the call is, not its result alone
    return 1 + named + arguments + tied + (text.count("None") == nones)


def _arranged(render: Render, best: HistoryFormat) -> HistoryFormat:
    """In messages of their own, where the template does not show all that is in one."""
    apart, single = replace(best, apart=True), replace(best, single=True)
    if not _shows(render, best, BEFORE, 1) and _shows(render, apart, BEFORE, 1):
        best, single = apart, replace(apart, single=True)
    return single if not _shows(render, best, "", 2) and _shows(render, single, "", 2) else best


def _shows(render: Render, form: HistoryFormat, content: str, calls: int) -> bool:
    """Whether all calls and the content before them are shown, with an answer after them too."""
    messages = _conversation(form, content, calls)
    text = render(messages)
    shown = all(
        f"name_{each}" in text and text.count(f"value_{each}") == text.count(f"result_{each}") == 1
        for each in NUMBERS[:calls]
    )
    in_order = 0 <= text.find(content) < text.find("name_one")
    messages += [{"role": "assistant", "content": "!"}, QUESTION]
    return shown and in_order and "name_one" in render(messages)


def call(id: str, name: str, arguments: dict[str, Any]) -> Message:
    """As the API has it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def _conversation(form: HistoryFormat, content: str = "", calls: int = 1) -> list[Message]:
    """A question, calls and their results, as the form has them."""
    made, results = [], []
    for number in NUMBERS[:calls]:
        id = f"call_of_{number}" if form.ids == "any" else f"callof{number}"
        made.append(call(id, f"name_{number}", {f"key_{number}": f"value_{number}"}))
        results.append({"role": "tool", "tool_call_id": id, "content": f"result_{number}"})
    turn: Message = {"role": "assistant", "content": content, "tool_calls": made}
    if content:
        turn["reasoning_content"] = "thought"
    return HistoryAdapter(form).adapt([QUESTION, turn, *results])
