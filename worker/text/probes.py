"""Turns and tools that are made up to see what a chat template makes of them.

Their names and values occur nowhere else, so that they are found again in what it writes. The
calls among that are examples: they prove what was learned, if they are read back, and prompts show
them where a template does not show tools itself (chat_template.py).
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from worker.deltas import Delta
from worker.text.answer_form import AnswerForm
from worker.text.call_form import PLAIN_CALLS, CallForm
from worker.text.detokenizer import Piece
from worker.text.parser import Parser
from worker.text.turns import Message, call

Example = tuple[str, list[tuple[str, Any]]]  # calls as written, their names and arguments

CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES, IDS = ("nameone", "nametwo"), ("callidone", "callidtwo")
TEXT, NUMBER = "valueone", 12
ARGUMENTS = {"keyone": TEXT, "keytwo": NUMBER}
# One of each type of JSON, and a text that looks like a number.
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
TRIED: tuple[tuple[dict[str, Any], ...], ...] = (
    (ARGUMENTS,),
    (ARGUMENTS, ARGUMENTS),
    ({},),
    (TYPED,),
    (TYPED, TYPED),
)
PLACEHOLDERS = {  # of what was made up, in an example that is shown
    **{"nameone": "FUNCTION", "nametwo": "OTHER_FUNCTION", "callidone": "ID"},
    **{"keyone": "PARAMETER", "keytwo": "OTHER", "valueone": "VALUE", "callidtwo": "OTHER_ID"},
}


# ── turns and tools ──


def assistant(*calls: dict[str, Any], content: str = "", thought: str = "") -> Message:
    """A turn, in the API's form, with calls of these arguments."""
    turn: Message = {"role": "assistant", "content": content}
    if thought:
        turn["reasoning_content"] = thought
    if calls:
        made = zip(IDS, NAMES, calls, strict=False)
        turn["tool_calls"] = [call(id, name, arguments) for id, name, arguments in made]
    return turn


def _tool(name: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"description": "any", "type": type_} for key, type_ in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": "any", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(name, {"keyone": "string", "keytwo": "integer"}) for name in NAMES]
TYPED_TOOLS = [_tool(name, dict(zip(TYPED, TYPES, strict=True))) for name in NAMES]


# ── examples ──


def examples(written: Callable[..., str], form: CallForm) -> list[Example]:
    """Calls as the template writes them, and the names and arguments that went in."""
    return [
        (written(*tried), [*zip(NAMES, tried, strict=False)])
        for tried in TRIED
        if form.separator is not None or len(tried) == 1
    ]


def shown_calls(examples: Iterable[Example], count: int) -> str:
    """So many calls as a template writes them, to be shown as an example; plain ones if it writes
    none."""
    written = next((text for text, calls in examples if len(calls) == count), "").strip()
    if not written:
        return PLAIN_CALLS.text([("FUNCTION", '{"PARAMETER": "VALUE"}')] * count)
    for name, shown in PLACEHOLDERS.items():
        written = written.replace(name, shown)
    return written


def reads_back(form: AnswerForm, examples: Iterable[Example]) -> bool:
    """Whole, and letter by letter."""
    return all(
        _read(form, pieces) == calls for text, calls in examples for pieces in ([text], text)
    )


def _read(form: AnswerForm, pieces: Iterable[str]) -> list[tuple[str | None, Any]] | None:
    """The calls of an answer that is nothing else; None if there is more, or no JSON."""
    parser, made = Parser(form, "", True, TYPED_TOOLS), Delta(0)
    for event in [event for each in pieces for event in parser.feed(Piece(each))] + parser.finish():
        if event.kind != "call" and event.piece.text:
            return None
        made.add("call", event.piece.text, event.name)
    try:
        return [(part.name, json.loads(part.text)) for part in made.parts]
    except ValueError:
        return None
