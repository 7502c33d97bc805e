"""Whether what was learned from a chat template is so: calls that it writes are read back."""

import json
from collections.abc import Iterable
from typing import Any

from worker.text.answer_form import AnswerForm
from worker.text.detokenizer import Piece
from worker.text.learning import Learner
from worker.text.parser import Event, Parser
from worker.text.probes import ARGUMENTS, NAMES, tool

# One of each type of JSON.
TYPED = {
    "keyone": "value-1.b",
    "keytwo": 12,
    "keythree": 1.5,
    "keyfour": True,
    "keyfive": ["ab", 2],
    "keysix": {"inner": "c"},
    "keyseven": "7",
}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "string")
TOOLS = [
    tool(name, {key: {"type": type_} for key, type_ in zip(TYPED, TYPES, strict=True)})
    for name in NAMES
]
TRIED: tuple[tuple[dict[str, Any], ...], ...] = (
    (ARGUMENTS,),
    (ARGUMENTS, ARGUMENTS),
    ({},),
    (TYPED,),
    (TYPED, TYPED),
)


def examples(learner: Learner, several: bool) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Calls as the template writes them, and the names and arguments that went in."""
    return [
        (learner.written(*tried, tools=TOOLS), [*zip(NAMES, tried, strict=False)])
        for tried in TRIED
        if several or len(tried) == 1
    ]


def reads_back(form: AnswerForm, text: str, calls: list[tuple[str, Any]]) -> bool:
    """Whole, and letter by letter."""
    return all(read(form, pieces, TOOLS) == ("", "", calls) for pieces in ([text], text))


def read(
    form: AnswerForm, pieces: Iterable[str], tools: list[Any], begun: str = ""
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls of an answer. What is no JSON stays as it is."""
    parser = Parser(form, begun, bool(tools), tools)
    events = [event for piece in pieces for event in parser.feed(Piece(piece))] + parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if event.kind == "call" and event.name is not None:
            calls.append((event.name, ""))
        if event.kind == "call":
            calls[-1] = calls[-1][0], calls[-1][1] + event.piece.text
    texts = {kind: _text(events, kind) for kind in ("content", "reasoning")}
    return texts["content"], texts["reasoning"], [(name, _value(text)) for name, text in calls]


def _text(events: list[Event], kind: str) -> str:
    return "".join(event.piece.text for event in events if event.kind == kind)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
