"""Calls as a chat template writes them: they prove what was learned from it, if they are read back.

Prompts show them as well, where a template does not show tools itself (chat_template.py).
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from worker.text.answer_form import AnswerForm
from worker.text.call_form import PLAIN_CALLS, CallForm
from worker.text.detokenizer import Piece
from worker.text.parser import Parser
from worker.text.probes import ARGUMENTS, NAMES, TYPED, TYPED_TOOLS

Example = tuple[str, list[tuple[str, Any]]]  # calls as written, their names and arguments

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


def _read(form: AnswerForm, pieces: Iterable[str]) -> list[tuple[str, Any]] | None:
    """The calls of an answer that is nothing else; None if there is more, or no JSON."""
    parser = Parser(form, "", True, TYPED_TOOLS)
    events = [event for piece in pieces for event in parser.feed(Piece(piece))] + parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if event.kind == "call":
            calls += [(event.name, "")] if event.name is not None else []
            calls[-1] = calls[-1][0], calls[-1][1] + event.piece.text
        elif event.piece.text:
            return None
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return None
