"""How a request's answers are to be read and held to what it asks: an AnswerPlan.

Made in pool threads, once the grammars it needs are compiled; an unusable one is the client's
error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.grammar.cache import Grammar
from worker.grammar.compiler import Grammars
from worker.grammar.guide import Guide, Plan
from worker.grammar.tool_calls import PLAIN_CALLS, CallForm, call_form
from worker.protocol import Calls, Chat, GenerationInput
from worker.text.parser import Parser
from worker.text.response_template import PLAIN, AnswerForm, answer_form

SWITCHES = ("enable_thinking", "thinking")  # what templates call it
EFFORT = "reasoning_effort"
# For templates that write calls only where there are tools.
TOOL = {
    "type": "function",
    "function": {"name": "any", "description": "", "parameters": {"type": "object"}},
}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """For all choices of a prompt."""

    form: AnswerForm | None = None  # None: an answer is nothing but text
    begun: str = ""  # what the prompt has already written of the answer
    calls: Calls | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    plan: Plan | None = None

    def parser(self) -> Parser | None:
        if self.form is None:
            return None
        document = self.plan is not None and self.plan.document
        return Parser(self.form, self.begun, self.calls is not None, self.tools, document)

    def guide(self, parser: Parser | None) -> Guide | None:
        return Guide(self.plan, parser) if self.plan else None


class Answering:
    """What the tokenizer's templates tell about answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammars: Grammars) -> None:
        self.grammars = grammars
        self.form = answer_form(tokenizer)
        self._tokenizer = tokenizer
        self._call_form = call_form(self.form, self._rendered)

    def effort(self, chat: Chat) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        if chat.effort is None:
            return {}
        text = str(self._tokenizer.chat_template)
        given: dict[str, Any] = {}
        if re.search(rf"\b{EFFORT}\b", text):
            given[EFFORT] = chat.effort
        for switch in SWITCHES:
            if re.search(rf"\b{switch}\b", text):
                given[switch] = chat.effort != "none"
        if not given and chat.effort != "none":
            why = f"{chat.effort_param}: this model's template knows no thinking"
            raise InvalidInput(why, chat.effort_param)
        return given

    def plan(self, request: GenerationInput, prompt: str) -> AnswerPlan:
        """`prompt` as the template has written it."""
        if not isinstance(request.prompt, Chat):
            answer = self.grammars.matcher(request.constraint) if request.constraint else None
            return AnswerPlan(plan=Plan(answer=answer) if answer else None)
        calls, form, call = request.calls, self.form, self._call_form
        if calls and (form is None or form.calls is None or (calls.required and call is None)):
            form, call = PLAIN, PLAIN_CALLS
        named = calls.names if calls else ()
        tools = tuple(tool for tool in request.prompt.tools if tool["function"]["name"] in named)
        begun = _begun(form, request.prompt, prompt) if form else ""
        plan = self._plan(request, form, begun, tools, call)
        return AnswerPlan(form, begun, calls, tools, plan)

    def _plan(
        self,
        request: GenerationInput,
        form: AnswerForm | None,
        begun: str,
        tools: tuple[Mapping[str, Any], ...],
        call: CallForm | None,
    ) -> Plan | None:
        calls, budget = request.calls, request.thinking_tokens
        single = calls is not None and not calls.parallel
        answer, one_call = self._grammars_for(request, form, tools, call)
        if not (answer or one_call or single or budget is not None):
            return None
        required = calls is not None and calls.required
        thinks = answer is not None and _shall_think(request)
        return Plan(
            tokenizer=self.grammars.tokenizer("tools") if answer or one_call else None,
            answer=answer,
            document=answer is not None and not required,
            call=one_call,
            may_think=self._may_think(form, begun) if thinks else None,
            budget=budget,
            close=self._close(form) if budget is not None else (),
            single_call=single,
        )

    def _grammars_for(
        self,
        request: GenerationInput,
        form: AnswerForm | None,
        tools: tuple[Mapping[str, Any], ...],
        call: CallForm | None,
    ) -> tuple[Grammar | None, Grammar | None]:
        """What holds the answer as a whole, and a call that the model begins by itself."""
        calls, constraint = request.calls, request.constraint
        assert isinstance(request.prompt, Chat)
        if calls is None or call is None:
            return self.grammars.matcher(constraint) if constraint else None, None
        several = calls.parallel and (calls.required or call.several_in_mark or bool(constraint))
        grammar = call.grammar(tools, several, self.grammars.quoted)
        try:
            compiled = self.grammars.compiled(grammar, "tools")
        except InvalidInput:
            if not calls.required and not constraint:
                return None, None  # what the model makes of it is not held to it
            for n, tool in enumerate(request.prompt.tools):  # which of them is it?
                if tool in tools:
                    single = call.grammar([tool], False, self.grammars.quoted)
                    self.grammars.check(single, f"tools[{n}]")
            raise
        if calls.required:
            return compiled, None
        if constraint and form and form.unmarked:
            both = "this model's calls cannot be told from JSON: leave out either this or tools"
            raise InvalidInput(f"{constraint.param}: {both}", constraint.param)
        if constraint:
            return self.grammars.either(constraint, grammar), None
        return None, compiled

    def _close(self, form: AnswerForm | None) -> tuple[int, ...]:
        reasoning = form.reasoning if form else None
        if reasoning is None or not reasoning.close_literals:
            param = "thinking_token_budget"
            raise InvalidInput(f"{param}: it is not known how this model ends its thoughts", param)
        return tuple(self._tokenizer.encode(reasoning.close_literals[0], add_special_tokens=False))

    def _may_think(self, form: AnswerForm | None, begun: str) -> int | None:
        """The token by which the model opens its thoughts, if it does so by itself."""
        if form is None or not self._opens_thoughts or (form.reasoning is None):
            return None
        closed = form.reasoning.close_re is not None and form.reasoning.close_re.search(begun)
        return None if closed else self._opens_thoughts

    @cached_property
    def _opens_thoughts(self) -> int | None:
        reasoning = self.form.reasoning if self.form else None
        if reasoning is None or not reasoning.open_literals:
            return None
        mark = reasoning.open_literals[0]
        if mark not in str(self._tokenizer.chat_template):
            return None
        assert self.form is not None
        user = {"role": "user", "content": "?"}
        try:
            prompt = self._rendered([user], prompt=True, enable_thinking=True)
        except Exception:  # whatever a template raises
            return None
        if Parser(self.form, self.form.thoughts_in(prompt), False).phase == "thinking":
            return None  # the prompt does
        ids = self._tokenizer.encode(mark, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def _rendered(
        self, messages: list[dict[str, Any]], prompt: bool = False, **variables: Any
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, [TOOL], add_generation_prompt=prompt, tokenize=False, **variables
        )
        assert isinstance(text, str)
        return text


def _begun(form: AnswerForm, chat: Chat, prompt: str) -> str:
    """What of the answer the prompt has already written."""
    if chat.continue_final_message:
        content = chat.messages[-1].get("content")
        return content if isinstance(content, str) else ""
    return form.thoughts_in(prompt) if chat.add_generation_prompt else ""


def _shall_think(request: GenerationInput) -> bool:
    """Whether thinking is asked for: otherwise an answer that is held to a form begins with it."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return False
    switched = any(chat.template_kwargs.get(switch) for switch in SWITCHES)
    return switched or chat.effort not in (None, "none") or request.thinking_tokens is not None
