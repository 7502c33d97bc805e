"""What a chat template takes of calls and results, found by having it render some in every form.

    question, call, result  --render-->  text: are name, key, value and result in it?

The form with the most of that is taken; then it is tried with text before the call, and two calls.
"""

from dataclasses import replace
from itertools import product
from typing import get_args

from worker.text.probes import QUESTION, Render, call
from worker.text.turns import CONTENTS, ArgumentsAs, Conversation, Ids, Message, Results, TurnForm

# Other names than those of the tools that are offered, which are in the text in any case.
NUMBERS = ("one", "two")
IDS_TRIED = ("call_of_one", "callofone", "functions.name_one:0")
BEFORE = "text_before"
ALL_POINTS = 5


def turn_form(render: Render, nones: int) -> TurnForm | None:
    """The form in which a template shows calls and results best; None if it can show none.
    `nones`: how often it writes None where no message has any."""
    for results in get_args(Results):
        best, most = TurnForm(written=True, results=results), 0
        for ids, arguments, content in product(get_args(Ids), get_args(ArgumentsAs), CONTENTS):
            form = TurnForm(ids, arguments, content, results=results)
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


def _arranged(render: Render, best: TurnForm) -> TurnForm:
    """In messages of their own, where the template does not show all that is in one."""
    apart, single = replace(best, apart=True), replace(best, single=True)
    if not _shows(render, best, BEFORE, 1) and _shows(render, apart, BEFORE, 1):
        best, single = apart, replace(apart, single=True)
    return single if not _shows(render, best, "", 2) and _shows(render, single, "", 2) else best


def _shows(render: Render, form: TurnForm, content: str, calls: int) -> bool:
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


def _conversation(form: TurnForm, content: str = "", calls: int = 1) -> list[Message]:
    """A question, calls and their results, as the form has them."""
    made, results = [], []
    for number in NUMBERS[:calls]:
        id = f"call_of_{number}" if form.ids == "any" else f"callof{number}"
        made.append(call(id, f"name_{number}", {f"key_{number}": f"value_{number}"}))
        results.append({"role": "tool", "tool_call_id": id, "content": f"result_{number}"})
    turn: Message = {"role": "assistant", "content": content, "tool_calls": made}
    if content:
        turn["reasoning_content"] = "thought"
    return Conversation(form).adapt([QUESTION, turn, *results])
