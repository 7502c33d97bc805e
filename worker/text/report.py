"""What was learned from a model's templates, and what could not be, for people and as JSON.

ChatTemplate → report, a dict → as_text
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from worker.generation_input import Calls
from worker.text.chat_template import ChatTemplate
from worker.text.probes import CONTENT, TOOLS, assistant, shown_calls
from worker.text.turns import QUESTION, Render

CONTENTS = {"absent": "left out", "null": "null", "dumped": "null", "empty": "an empty text"}
IDS = {"any": "any", "nine": "nine letters or digits", "named": "functions.NAME:INDEX"}


def report(template: ChatTemplate, end_tokens: tuple[str, ...]) -> dict[str, Any]:
    """`end_tokens`: the checkpoint's; what ends a turn in the template is told beside them."""
    made = {
        "calls": _calls(template),
        "thoughts": _thoughts(template),
        "history": _history(template),
        "tools_shown": template.shows_tools,
        "end_tokens": list(end_tokens),
        "end_of_turn": end_of_turn(template.tried),
    }
    lacks = [*template.notes]
    turns = template.turns
    if not made["thoughts"]:
        lacks.append("thoughts: no marks of them were found; an answer has none")
    if turns and turns.single:
        lacks.append("turns: the template shows one call a message; each gets a message")
    if turns and turns.apart:
        lacks.append("turns: the template shows no text beside a call; it gets a message")
    if not end_tokens and not made["end_of_turn"]:
        lacks.append("end: no token ends an answer")
    return {**made, "lacks": lacks}


def _calls(template: ChatTemplate) -> dict[str, Any]:
    """How they are written where they must be made, and whether that was learned."""
    _, form = template.forms(Calls((), required=True))
    assert form is not None
    one, two = (shown_calls(template.examples, count) for count in (1, 2))
    made = {"learned": bool(template.examples), "arguments": form.arguments.style, "one": one}
    return {**made, "two": two if form.separator is not None else None}


def _thoughts(template: ChatTemplate) -> dict[str, Any] | None:
    """The marks, and what the prompt has written of them with each value of `enable_thinking`."""
    form = template.answers
    if form.thoughts is None:
        return None
    switches: dict[str, dict[str, Any]] = {"default": {}}
    switches |= {str(way).lower(): {"enable_thinking": way} for way in (True, False)}
    prompts = {name: template.tried([QUESTION], **given) for name, given in switches.items()}
    begun = {name: form.thoughts_in(prompt) for name, prompt in prompts.items()}
    return {"open": form.thoughts[0], "close": form.thoughts[1], "in_prompt": begun}


def _history(template: ChatTemplate) -> dict[str, Any] | None:
    """What the template takes of calls that were made before."""
    turns = template.turns
    if turns is None or turns.written:
        return None
    return {
        "content_of_null": CONTENTS[turns.content],
        "arguments": turns.arguments,
        "ids": IDS[turns.ids],
        "text_and_calls": "two messages" if turns.apart else "one message",
        "calls_in_a_message": "one" if turns.single else "several",
    }


def end_of_turn(render: Render) -> str | None:
    """What a template writes after an assistant's last message."""
    turns = [QUESTION, assistant(content=CONTENT)]
    text = render(turns, add_generation_prompt=False)
    text = text or render(turns, TOOLS, add_generation_prompt=False)
    _, shown, rest = text.rpartition(CONTENT)
    return (rest.strip() or None) if shown else None


# ── for people ──


def as_text(made: Mapping[str, Any]) -> str:
    """A line a fact, and a line for all that is lacking."""
    lines = [*_facts(made, "")]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _facts(made: Mapping[str, Any], of: str) -> Iterator[tuple[str, str]]:
    for key, value in made.items():
        name = f"{of}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}: ")
        else:
            for each in value if isinstance(value, list) else [value]:
                # on one line, with what cannot be seen escaped
                shown = json.dumps(each, ensure_ascii=False).replace('\\"', '"')
                yield name, shown[1:-1] if isinstance(each, str) else shown
