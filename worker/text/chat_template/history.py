"""The format in which a chat template takes earlier tool calls, their results and reasoning.

    at load:    question, call, result in every format  --render-->  is it shown?  → HistoryFormat
    a request:  messages of the API  --HistoryAdapter.adapt-->  messages of the template

Templates differ in the content they expect beside calls, in the type of arguments, in ids, and in
which of these they show at all; and in whether system messages may follow the first turn
(MessageOrder). Equal histories give equal messages, and those of a longer history begin with those
of a shorter one, so that prompts share their prefix.
"""

import hashlib
import json
import re
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby, product
from typing import Any, Literal, cast, get_args

import numpy as np

from worker.text.tool_call_format import DEFAULT_TOOL_CALL_FORMAT, ToolCallFormat

Message = dict[str, Any]
# From messages, tools and variables to the template's text; "" where the template raises.
Render = Callable[..., str]
CallIds = Literal["any", "nine", "counted", "named"]
ArgumentsAs = Literal["object", "text"]
EmptyContent = Literal["absent", "null", "empty"]
ResultsAs = Literal["tool", "user"]  # the role of their messages
REASONING_BLOCKS = "blocks"  # reasoning as a block of the content

SURROGATE = re.compile("[\ud800-\udfff]")
# The ids that a template takes, where it does not take all.
VALID_IDS: dict[CallIds, re.Pattern[str]] = {
    "nine": re.compile("[A-Za-z0-9]{9}"),
    "counted": re.compile(r"functions\.\S+:[0-9]+"),
}


# None, for templates that test whether content is none: transformers removes fields that are None
# before it renders, and replaces numpy's numbers, among which this one is None, when it does.
NULL = np.datetime64("NaT")
EMPTY_CONTENT: dict[EmptyContent, Message] = {
    "absent": {},
    "null": {"content": NULL},
    "empty": {"content": ""},
}


@dataclass(frozen=True, slots=True)
class HistoryFormat:
    """The format of earlier messages that a template takes."""

    # nine: letters or digits; counted: functions.NAME:INDEX, with the index of the call within the
    # conversation; named: the same within the message
    call_ids: CallIds = "any"
    arguments: ArgumentsAs = "object"
    empty_content: EmptyContent = "absent"  # beside calls
    separate_content: bool = False  # content beside calls is a message of its own
    one_call: bool = False  # a message has one call, followed by its results
    calls_in_content: bool = False  # the template shows no calls: they are written as content
    metadata: bool = False  # the name is the message's metadata, and results are observations
    results: ResultsAs = "tool"
    reasoning_key: str = "reasoning_content"  # of a message, or REASONING_BLOCKS

    def call_id(self, name: str, index: int) -> str:
        """Return a new id for the `index`-th call of a conversation."""
        if self.call_ids in ("counted", "named"):
            return _named_id(name, index)
        if self.call_ids == "nine":
            return secrets.token_hex(5)[:9]
        return "call_" + secrets.token_hex(12)


class HistoryAdapter:
    """Adapts the messages of one conversation; calls and their results get the same ids."""

    def __init__(
        self,
        history_format: HistoryFormat,
        content_calls: ToolCallFormat = DEFAULT_TOOL_CALL_FORMAT,
    ) -> None:
        """`content_calls`: the format of calls that are written as content."""
        self._format = history_format
        self._content_calls = content_calls
        self._messages: list[Message] = []
        self._calls: dict[str | None, Message] = {}  # by the ids of the request
        self._used_ids: set[str] = set()

    def adapt(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        remaining = deque(self._with_reasoning(dict(message)) for message in messages)
        while remaining:
            message = remaining.popleft()
            if message["role"] == "tool":
                self._add_result(message)
            elif message.get("tool_calls"):
                results = []
                while remaining and remaining[0]["role"] == "tool":
                    results.append(remaining.popleft())
                self._add_calls(message, results)
            else:
                self._messages.append(message)
        for message in self._messages:
            if message.get("is_result"):
                message["content"] = "\n".join(message["content"])
        return self._messages

    def _with_reasoning(self, message: Message) -> Message:
        """Move a message's reasoning to where the template reads it."""
        key = self._format.reasoning_key
        if key == "reasoning_content" or "reasoning_content" not in message:
            return message
        reasoning, content = message.pop("reasoning_content"), message.get("content") or ""
        if key != REASONING_BLOCKS:
            return {**message, key: reasoning}
        if not isinstance(content, str):
            return message
        blocks = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}]
        return {**message, "content": blocks if content else blocks[:1]}

    def _add_calls(self, message: Message, results: list[Message]) -> None:
        """Add calls and their results in the order of the calls: many templates show no ids."""
        calls = message.pop("tool_calls")
        results_by_call, others = _match_results(calls, results)
        if self._format.separate_content and message.get("content"):
            self._messages.append({"role": "assistant", "content": message.pop("content")})
        size = 1 if self._format.one_call else len(calls)
        for start in range(0, len(calls), size):
            group = [
                self._adapt_call(call, index)
                for index, call in enumerate(calls[start : start + size])
            ]
            first = message if start == 0 else {"role": "assistant"}
            self._messages.append(self._call_message(first, group))
            for call, own in zip(group, results_by_call[start : start + size], strict=True):
                for result in own:
                    self._add_result(result, call)
        for result in others:
            self._add_result(result)

    def _call_message(self, message: Message, calls: list[Message]) -> Message:
        if self._format.metadata:
            function = calls[0]["function"]
            return {**message, "metadata": function["name"], "content": function["arguments"]}
        if self._format.calls_in_content:
            text = self._content_calls.render(
                [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            )
            content = message.get("content")
            return {**message, "content": f"{content}\n{text}" if content else text}
        message = {**message, "tool_calls": calls}
        if not message.get("content"):
            message.pop("content", None)
            message |= EMPTY_CONTENT[self._format.empty_content]
        return message

    def _adapt_call(self, call: Mapping[str, Any], index: int) -> Message:
        name = call["function"]["name"]
        arguments = _adapt_arguments(call["function"]["arguments"], self._format)
        function = {"name": name, "arguments": arguments}
        id = self._call_id(call.get("id"), name, index)
        adapted = {**call, "id": id, "function": function}
        self._calls[call.get("id")] = adapted
        return adapted

    def _add_result(self, message: Message, call: Message | None = None) -> None:
        """Add the result of `call`, or of the call that it names."""
        call = call or self._calls.get(message.get("tool_call_id"))
        if call is not None:
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        elif (id := message.get("tool_call_id")) and not self._is_valid_id(id):
            name = message.get("name", "")
            message = {**message, "tool_call_id": self._replacement_id(id, name)}
        if self._format.metadata:
            message = {**message, "role": "observation"}
        if self._format.results == "user":
            self._add_user_result(message["content"])
        else:
            self._messages.append(message)

    def _add_user_result(self, result: str) -> None:
        """Add a result as a user's message. Consecutive ones share a message, since many templates
        want roles to alternate."""
        text = f"<tool_response>\n{result}\n</tool_response>"
        if not (self._messages and self._messages[-1].get("is_result")):
            self._messages.append({"role": "user", "content": [], "is_result": True})
        self._messages[-1]["content"].append(text)

    def _call_id(self, id: str | None, name: str, index: int) -> str:
        if self._format.call_ids == "named":
            return _named_id(name, index)
        if not id or id in self._used_ids or not self._is_valid_id(id):
            id = self._replacement_id(id, name)
        self._used_ids.add(id)
        return id

    def _is_valid_id(self, id: str) -> bool:
        valid = VALID_IDS.get(self._format.call_ids)
        return valid is None or valid.fullmatch(id) is not None

    def _replacement_id(self, id: str | None, name: str) -> str:
        """Deterministic, so that a continued conversation keeps its prefix."""
        if self._format.call_ids == "counted":
            numbers = count(len(self._used_ids))
            return next(id for n in numbers if (id := _named_id(name, n)) not in self._used_ids)
        seed = f"{len(self._used_ids)} {id}".encode(errors="replace")
        digits = hashlib.sha256(seed).hexdigest()
        return digits[:9] if self._format.call_ids == "nine" else "call_" + digits[:24]


def _named_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def _match_results(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Message]
) -> tuple[list[list[Message]], list[Message]]:
    """Return the results of each call, and those of none. Results without an id match by order."""
    by_call: list[list[Message]] = [[] for _ in calls]
    others: list[Message] = []
    indices: dict[str | None, deque[int]] = defaultdict(deque)
    for index, call in enumerate(calls):
        indices[call.get("id")].append(index)
    for position, result in enumerate(results):
        id = result.get("tool_call_id")
        if matching := indices.get(id):
            by_call[matching.popleft() if len(matching) > 1 else matching[0]].append(result)
        elif id is None and position < len(calls):
            by_call[position].append(result)
        else:
            others.append(result)
    return by_call, others


def _adapt_arguments(
    arguments: str | dict[str, Any], history_format: HistoryFormat
) -> str | dict[str, Any]:
    """Convert arguments, as text with the spaces that templates write. Those that are no JSON
    object stay as they are."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            return arguments
        text = json.dumps(parsed, ensure_ascii=False)
        if history_format.arguments == "object" and not history_format.calls_in_content:
            if SURROGATE.search(text):  # half a pair, which no tokenizer takes
                parsed = json.loads(SURROGATE.sub("\ufffd", text))
            return cast(dict[str, Any], parsed)
        text.encode()  # an escaped surrogate stays escaped
    except (ValueError, RecursionError):
        return arguments
    return text


# ── system messages after the first turn ──

SYSTEM_TEXT = "<system>\n{}\n</system>"  # in a user's message


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """Which messages a template takes where."""

    system: bool = True  # system messages at the beginning
    system_in_place: bool = True  # system messages anywhere
    user_after_result: bool = True  # a user's message right after the result of a call


def fold_messages(messages: Sequence[Message], order: MessageOrder) -> list[Message]:
    """Write the messages that the template does not take into their neighbours: system messages
    into the user's message beside them, or into one of their own, and what follows a result into
    the result. The place of a message depends on nothing after its own turn."""
    folded: list[list[Message]] = []  # each inner list becomes one message
    is_system = False  # the last message has a system message in it
    for position, message in enumerate(messages):
        is_later_system = message["role"] == "system" and not order.system_in_place
        last = folded[-1][0] if folded else {}
        last_role = last.get("role")
        if is_later_system and order.system and last_role in (None, "system"):
            folded = folded or [[]]
            folded[0].append(message)
            continue
        if is_later_system:
            message = {"role": "user", "content": SYSTEM_TEXT.format(_text(message))}
        is_user = message["role"] == "user"
        after_result = last_role == "tool" or last.get("is_result")
        next_role = messages[position + 1]["role"] if position + 1 < len(messages) else None
        joins = last_role == "user" and (is_later_system or is_system)
        if after_result and is_user:
            joins = not order.user_after_result or (is_later_system and next_role == "tool")
        is_system = is_later_system or (is_system and joins)
        if joins and is_user:
            folded[-1].append(message)
        else:
            folded.append([message])
    return [_joined(group) for group in folded]


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def _joined(messages: Sequence[Message]) -> Message:
    """Return the first message with the content of all."""
    if len(messages) == 1:
        return messages[0]
    parts: list[Any] = []
    for is_text, run in groupby((m["content"] for m in messages), lambda c: isinstance(c, str)):
        if is_text:
            parts.append({"type": "text", "text": "\n\n".join(run)})
        else:
            parts += chain.from_iterable(run)
    all_text = all(isinstance(message["content"], str) for message in messages)
    return {**messages[0], "content": parts[0]["text"] if all_text else parts}


# ── at load: the format of a template ──


QUESTION: Message = {"role": "user", "content": "?"}
# Of probing conversations; TOOLS in inference.py have other names.
NUMBERS = ("one", "two")
PROBED_IDS = ("id_one", "callofone", "functions.name_one:7", "functions.name_one:0")
TEXT_BEFORE = "text_before"
MAX_SCORE = 5


def infer_history_format(render: Render, none_count: int) -> HistoryFormat | None:
    """Return the format in which a template shows calls and results best; None if it shows none.
    `none_count`: how often it writes None where no message has one."""
    metadata = HistoryFormat(
        separate_content=True, one_call=True, calls_in_content=True, metadata=True
    )
    if _score(render(_conversation(metadata)), none_count) == MAX_SCORE:
        return metadata
    for results in get_args(ResultsAs):
        best, best_score = HistoryFormat(calls_in_content=True, results=results), 0
        for ids, arguments, content in product(
            get_args(CallIds), get_args(ArgumentsAs), get_args(EmptyContent)
        ):
            history_format = HistoryFormat(ids, arguments, content, results=results)
            score = _score(render(_conversation(history_format)), none_count)
            if score > best_score:
                best, best_score = history_format, score
            if best_score == MAX_SCORE:
                break
        if best_score or _score(render(_conversation(best)), none_count):
            return _with_own_messages(render, best)
    return None


def _score(text: str, none_count: int) -> int:
    """Rate how well a text shows a call and its result; 0 if not both."""
    if "name_one" not in text or "result_one" not in text:
        return 0
    misquoted = "'key_one'" in text or '\\"key_one' in text
    has_arguments = "key_one" in text and text.count("value_one") == 1 and not misquoted
    # An id appears with the call as often as with its result.
    has_matching_ids = all(text.count(id) != 1 for id in PROBED_IDS)
    # The name is the call's, and not only the result's.
    names_call = text.index("name_one") < text.find("value_one")
    has_no_none = text.count("None") == none_count
    return 1 + names_call + has_arguments + has_matching_ids + has_no_none


def _with_own_messages(render: Render, best: HistoryFormat) -> HistoryFormat:
    """Separate content and calls where the template does not show all parts of one message."""
    for field, content, calls in (("separate_content", TEXT_BEFORE, 1), ("one_call", "", 2)):
        shows_all = partial(_shows_all, render, content=content, calls=calls)
        changes: Any = {field: True}
        if not shows_all(best) and shows_all(changed := replace(best, **changes)):
            best = changed
    return best


def _shows_all(render: Render, history_format: HistoryFormat, content: str, calls: int) -> bool:
    """Return whether all calls and the content before them are shown, with a later message too."""
    messages = _conversation(history_format, content, calls)
    text = render(messages)
    shown = all(
        f"name_{number}" in text
        and text.count(f"value_{number}") == text.count(f"result_{number}") == 1
        for number in NUMBERS[:calls]
    )
    in_order = 0 <= text.find(content) < text.find("name_one")
    messages += [{"role": "assistant", "content": "!"}, QUESTION]
    return shown and in_order and "name_one" in render(messages)


def infer_message_order(render: Render, history_format: HistoryFormat | None) -> MessageOrder:
    """Return which messages a template shows in their place."""

    def shows(*messages: Message) -> bool:
        text, contents = render([*messages]), [message.get("content") for message in messages]
        shown = [content for content in contents if content and isinstance(content, str)]
        positions = [text.find(content) for content in shown]
        return positions == sorted(positions) and all(text.count(each) == 1 for each in shown)

    first, later, last, asked, again, answer = (
        {"role": role, "content": f"{role}_{number}"}
        for role, numbers in (("system", "123"), ("user", "12"), ("assistant", "1"))
        for number in numbers
    )
    system = first["content"] in render([first, asked]) or not render([asked])
    in_place = shows(first, asked, answer, later, again, last)
    if history_format is None:
        return MessageOrder(system, in_place)
    _, *called = _conversation(history_format)
    in_place = in_place and shows(first, asked, *called, later)
    return MessageOrder(system, in_place, shows(asked, *called, again))


def make_call(id: str, name: str, arguments: dict[str, Any]) -> Message:
    """Return a call in the API's format."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def _conversation(
    history_format: HistoryFormat, content: str = "", calls: int = 1
) -> list[Message]:
    """Return a question, calls and their results in this format."""
    tool_calls, results = [], []
    for number in NUMBERS[:calls]:
        ids = {"any": f"id_{number}", "counted": f"functions.name_{number}:7"}
        id = ids.get(history_format.call_ids, f"callof{number}")
        tool_calls.append(make_call(id, f"name_{number}", {f"key_{number}": f"value_{number}"}))
        results.append({"role": "tool", "tool_call_id": id, "content": f"result_{number}"})
    message: Message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    if content:
        message["reasoning_content"] = "thought"
    return HistoryAdapter(history_format).adapt([QUESTION, message, *results])
