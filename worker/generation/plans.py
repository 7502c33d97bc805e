"""What holds the answers to a request to what it asks: calls, a format, a budget of thoughts.

    calls, constraint, thinking_tokens → grammars, compiled → Plan, which a guide follows

For requests that ask for any of it; in pool threads, like frontend.py. What a checkpoint's template
shows of calls proves itself here, by its grammar.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.generation_input import Calls, Chat, GenerationInput
from worker.grammar.calls import accepts, calls_grammar
from worker.grammar.compiler import Grammar, Grammars
from worker.grammar.guide import Plan
from worker.grammar.notation import either, unusable
from worker.text.answer_form import AnswerForm
from worker.text.call_form import CallForm
from worker.text.chat_template import ChatTemplate
from worker.text.learning import SWITCHES
from worker.text.probes import ARGUMENTS, TOOLS


class Plans:
    """By the forms of a model's template. `vocab_size`: the model's; `ends`: tokens that end it."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        ends: Sequence[int],
    ) -> None:
        self.grammars = Grammars(tokenizer, vocab_size, ends)
        self._template = template

    def of(self, request: GenerationInput, begun: str) -> Plan | None:
        """`begun`: what the prompt has already written of the answer. InvalidInput with the reason;
        Pending until the grammars that it takes are compiled."""
        calls, constraint, budget = request.calls, request.constraint, request.thinking_tokens
        form, call_form = self._template.forms(calls)
        answer: Grammar | None = None  # holds the answer as a whole
        call: Grammar | None = None  # holds a call that the model begins by itself
        if calls and call_form:
            answer, call = self._grammars_of_calls(request, calls, form, call_form)
        elif constraint:
            chat = isinstance(request.prompt, Chat)
            answer = self.grammars.matcher(constraint, self._before(form) if chat else "")
        single = calls is not None and not calls.parallel
        if not (answer or call or single or budget is not None):
            return None
        opens = answer and shall_think(request) and not form.ends_thoughts(begun)
        return Plan(
            tokenizer=self.grammars.tokenizer("tools") if answer or call else None,
            answer=answer,
            document=answer is not None and not (calls and calls.required),
            call=call,
            may_think=self._template.opens_thoughts if opens else (),
            budget=budget,
            close=self._template.end_of_thoughts(form) if budget is not None else (),
            single_call=single,
        )

    def _grammars_of_calls(
        self, request: GenerationInput, calls: Calls, answers: AnswerForm, form: CallForm
    ) -> tuple[Grammar | None, Grammar | None]:
        """Of the answer as a whole, or of a call that the model begins by itself."""
        constraint, tools, grammars = request.constraint, request.called_tools, self.grammars
        begun = not (calls.required or constraint)
        several = calls.parallel and (not begun or form.several_in_mark)
        starts = [answers.start] if answers.start else []
        try:
            written = calls_grammar(form, tools, several, grammars.quoted, starts, begun)
            compiled = grammars.compiled(written, "tools")
        except InvalidInput:
            if not calls.required and not constraint:
                return None, None  # what the model makes of it is not constrained
            assert isinstance(request.prompt, Chat)
            for tool in tools:  # which of them is it?
                param = f"tools[{request.prompt.tools.index(tool)}]"
                try:
                    alone = calls_grammar(form, [tool], False, grammars.quoted)
                except InvalidInput as error:
                    raise unusable(str(error), param) from None
                grammars.check(alone, param)
            raise
        if calls.required:
            return compiled, None
        if constraint is None:
            return None, compiled
        if answers.unmarked:
            both = "this model's calls cannot be told from JSON: leave out either this or tools"
            raise InvalidInput(f"{constraint.param}: {both}", constraint.param)
        whole = either(constraint, written, self._before(answers))
        return grammars.compiled(whole, constraint.param), None

    def _before(self, form: AnswerForm) -> str:
        """What may stand before content, in the notation."""
        headers = (form.start, form.content and form.content[0])
        return "".join(f"({self.grammars.quoted(text)})? " for text in headers if text)


def proved(template: ChatTemplate) -> ChatTemplate:
    """The grammar of its calls takes those that it writes; else their form is not used. Where it
    writes Python without its quotes, there is nothing to compare."""
    form = template.answers.calls
    if form and (form.arguments.style != "python" or form.arguments.quotes):
        written = [text for text, calls in template.examples if calls[0][1] == ARGUMENTS]
        if not all(accepts(form, TOOLS, text) for text in written):
            template.refuse_calls("their grammar does not take what the template writes")
    return template


def shall_think(request: GenerationInput) -> bool:
    """Whether thinking is asked for: else an answer with a grammar begins with it."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return False
    switched = any(chat.template_kwargs.get(switch) for switch in SWITCHES)
    return switched or chat.effort not in (None, "none") or request.thinking_tokens is not None
