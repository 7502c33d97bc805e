"""What holds a request's answers to what it asks: made only where it asks for anything.

In pool threads; what cannot be used is the client's error. grammar/guide.py follows a plan.
"""

from collections.abc import Mapping
from typing import Any

from batching.errors import InvalidInput
from worker.grammar.compiler import Grammar, Grammars
from worker.grammar.guide import Plan
from worker.grammar.notation import calls_grammar, either
from worker.protocol import Calls, Chat, GenerationInput
from worker.text.call_form import CallForm
from worker.text.chat_template import SWITCHES, ChatTemplate


def make_plan(
    request: GenerationInput, begun: str, template: ChatTemplate, grammars: Grammars
) -> Plan | None:
    """`begun`: what the prompt has already written of the answer. InvalidInput with the reason;
    Pending until the grammars that it takes are compiled."""
    calls, constraint, budget = request.calls, request.constraint, request.thinking_tokens
    form, call_form = template.forms(calls)
    answer: Grammar | None = None  # holds the answer as a whole
    call: Grammar | None = None  # holds a call that the model begins by itself
    if calls and call_form:
        unmarked = form is not None and form.unmarked
        answer, call = _grammars_of_calls(request, calls, call_form, unmarked, grammars)
    elif constraint:
        answer = grammars.matcher(constraint)
    single = calls is not None and not calls.parallel
    if not (answer or call or single or budget is not None):
        return None
    opens = answer and _shall_think(request) and not (form and form.ends_thoughts(begun))
    return Plan(
        tokenizer=grammars.tokenizer("tools") if answer or call else None,
        answer=answer,
        document=answer is not None and not (calls and calls.required),
        call=call,
        may_think=template.opens_thoughts if opens else None,
        budget=budget,
        close=template.end_of_thoughts(form) if budget is not None else (),
        single_call=single,
    )


def called_tools(request: GenerationInput) -> list[Mapping[str, Any]]:
    """Those of the request's tools that may be called."""
    names = request.calls.names if request.calls else ()
    tools = request.prompt.tools if isinstance(request.prompt, Chat) else ()
    return [tool for tool in tools if tool["function"]["name"] in names]


def _grammars_of_calls(
    request: GenerationInput, calls: Calls, form: CallForm, unmarked: bool, grammars: Grammars
) -> tuple[Grammar | None, Grammar | None]:
    """Of the answer as a whole, or of a call that the model begins by itself."""
    constraint, tools = request.constraint, called_tools(request)
    several = calls.parallel and (calls.required or form.several_in_mark or bool(constraint))
    written = calls_grammar(form, tools, several, grammars.quoted)
    try:
        compiled = grammars.compiled(written, "tools")
    except InvalidInput:
        if not calls.required and not constraint:
            return None, None  # what the model makes of it is not held to it
        assert isinstance(request.prompt, Chat)
        for tool in tools:  # which of them is it?
            alone = calls_grammar(form, [tool], False, grammars.quoted)
            grammars.check(alone, f"tools[{request.prompt.tools.index(tool)}]")
        raise
    if calls.required:
        return compiled, None
    if constraint is None:
        return None, compiled
    if unmarked:
        both = "this model's calls cannot be told from JSON: leave out either this or tools"
        raise InvalidInput(f"{constraint.param}: {both}", constraint.param)
    return grammars.compiled(either(constraint, written), constraint.param), None


def _shall_think(request: GenerationInput) -> bool:
    """Whether thinking is asked for: else an answer that is held to a grammar begins with it."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return False
    switched = any(chat.template_kwargs.get(switch) for switch in SWITCHES)
    return switched or chat.effort not in (None, "none") or request.thinking_tokens is not None
