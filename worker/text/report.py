"""What was learned from a model's templates, and what could not be, for people and as JSON.

ChatTemplate → report, a dict → as_text. All that is known of the learning's insides is here.
"""

import json
from collections.abc import Mapping
from typing import Any

from batching.errors import InvalidInput
from worker.protocol import Calls, Chat
from worker.text.chat_template import ChatTemplate, thoughts_in
from worker.text.turns import TurnForm

QUESTION = {"role": "user", "content": "?"}
ANSWER = "an_answer"
TOOL_NAME = "name_of_a_tool"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "any",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
CONTENTS = {"absent": "left out", "null": "null", "dumped": "null", "empty": "an empty text"}
IDS = {"any": "any", "nine": "nine letters or digits", "named": "functions.NAME:INDEX"}


def report(template: ChatTemplate, end_tokens: tuple[str, ...]) -> dict[str, Any]:
    """`end_tokens`: the checkpoint's; what ends a turn in the template is told beside them."""
    lacks = [*template.notes]
    made = {
        "calls": _calls(template),
        "thoughts": _thoughts(template, lacks),
        "history": _history(template, lacks),
        "tools_shown": template.shows_tools,
        "end_tokens": list(end_tokens),
        "end_of_turn": end_of_turn(template),
    }
    if not end_tokens and not made["end_of_turn"]:
        lacks.append("no token ends an answer")
    return {**made, "lacks": lacks}


def _calls(template: ChatTemplate) -> dict[str, Any]:
    """How they are written where they may be made, and whether that was learned."""
    _, form = template.forms(Calls((TOOL_NAME,), required=True))
    assert form is not None
    several = template.example(several=True) if form.separator is not None else None
    made = {"learned": bool(template.examples), "arguments": form.arguments.style}
    return {**made, "one": template.example(), "two": several}


def _thoughts(template: ChatTemplate, lacks: list[str]) -> dict[str, Any] | None:
    """The marks, and what the prompt has written of them with each value of `enable_thinking`."""
    form = template.answers
    if form.thoughts is None:
        lacks.append("thoughts: no marks of them were found: an answer has none")
        return None
    switches: dict[str, dict[str, Any]] = {"default": {}}
    switches |= {str(way).lower(): {"enable_thinking": way} for way in (True, False)}
    prompts = {name: _prompt(template, (), **given) for name, given in switches.items()}
    return {
        "open": form.thoughts[0],
        "close": form.thoughts[1],
        "in_prompt": {name: thoughts_in(form, text) for name, text in prompts.items()},
    }


def _history(template: ChatTemplate, lacks: list[str]) -> dict[str, Any] | None:
    """What the template takes of calls that were made before."""
    turns: TurnForm | None = template.turns
    if turns is None:
        return None
    if turns.single:
        lacks.append(
            "turns: the template shows one call a message: several become several messages"
        )
    if turns.apart:
        lacks.append(
            "turns: the template shows no text beside a call: it becomes a message of its own"
        )
    return {
        "content_of_null": CONTENTS[turns.content],
        "arguments": turns.arguments,
        "ids": IDS[turns.ids],
        "text_and_calls": "two messages" if turns.apart else "one message",
        "calls_in_a_message": "one" if turns.single else "several",
    }


def end_of_turn(template: ChatTemplate) -> str | None:
    """What stands after an assistant's last message."""
    turns = (QUESTION, {"role": "assistant", "content": ANSWER})
    text = _rendered(template, turns, (), add_generation_prompt=False)
    text = text or _rendered(template, turns, (TOOL,), add_generation_prompt=False)
    _, shown, rest = text.rpartition(ANSWER)
    return (rest.strip() or None) if shown else None


def _prompt(template: ChatTemplate, tools: tuple[Any, ...], **variables: Any) -> str:
    return _rendered(template, (QUESTION,), tools, template_kwargs=variables)


def _rendered(
    template: ChatTemplate, messages: tuple[Any, ...], tools: tuple[Any, ...], **fields: Any
) -> str:
    """Nothing where the template refuses."""
    try:
        return template.render(Chat(messages, tools, **fields))
    except InvalidInput:
        return ""


# ── for people ──


def as_text(made: Mapping[str, Any]) -> str:
    """A line a fact, and a line for all that is lacking."""
    calls, thoughts = made["calls"], made["thoughts"]
    lines = [
        ("calls", "learned" if calls["learned"] else "not learned"),
        ("  one", _shown(calls["one"])),
        ("  two", _shown(calls["two"])),
        ("  arguments", calls["arguments"]),
    ]
    if thoughts:
        lines.append(("thoughts", f"{_shown(thoughts['open'])} … {_shown(thoughts['close'])}"))
        for switch, begun in thoughts["in_prompt"].items():
            lines.append((f"  prompt, {switch}", _shown(begun)))
    lines.append(("tools shown", _yes(made["tools_shown"])))
    for fact, value in (made["history"] or {}).items():
        lines.append((fact.replace("_", " "), value))
    lines.append(("end of a turn", _shown(made["end_of_turn"])))
    lines.append(("end tokens", ", ".join(made["end_tokens"]) or "none"))
    lines += [("lacks", each) for each in made["lacks"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _shown(text: str | None) -> str:
    """On one line, with what cannot be seen escaped."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"') if text else "none"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
