"""How the answers to a request are to be read: what its prompt has begun of them, what calls they
may make, and whether thoughts come first.
"""

from collections.abc import Mapping
from typing import Any

from worker.grammar.calls import accepts
from worker.protocol import Chat, GenerationInput
from worker.text.answer_form import ANSWER, AnswerForm
from worker.text.chat_template import ChatTemplate, thoughts_in
from worker.text.parser import Parser
from worker.text.probes import ARGUMENTS, TOOLS
from worker.text.renderer import SWITCHES


def proved(template: ChatTemplate) -> ChatTemplate:
    """The grammar of its calls takes those that it writes; else their form is not used. Where it
    writes Python without its quotes, there is nothing to compare."""
    form = template.answers.calls
    if form and (form.arguments.style != "python" or form.arguments.quotes):
        written = [text for text, calls in template.examples if calls[0][1] == ARGUMENTS]
        if not all(accepts(form, TOOLS, text) for text in written):
            template.refuse_calls("their grammar does not take what the template writes")
    return template


def begun_answer(template: ChatTemplate, request: GenerationInput, text: str) -> str:
    """What a chat's prompt has already written of the answer."""
    chat = request.prompt
    assert isinstance(chat, Chat)
    if chat.continue_final_message:
        content = chat.messages[-1].get("content")
        return content if isinstance(content, str) else ""
    form, _ = template.forms(request.calls)
    return thoughts_in(form, text) if chat.add_generation_prompt else ""


def answer_parser(
    template: ChatTemplate, request: GenerationInput, begun: str, document: bool = False
) -> Parser | None:
    """What reads the answers to a chat; None: they are nothing but text."""
    form, _ = template.forms(request.calls)
    if form.begins == ANSWER and not form.marks and not request.calls:
        return None
    return Parser(form, begun, bool(request.calls), called_tools(request), document)


def content_headers(form: AnswerForm) -> tuple[str, ...]:
    """What may stand before content."""
    return tuple(filter(None, (form.start, form.content and form.content[0])))


def called_tools(request: GenerationInput) -> list[Mapping[str, Any]]:
    """Those of the request's tools that may be called."""
    names = request.calls.names if request.calls else ()
    tools = request.prompt.tools if isinstance(request.prompt, Chat) else ()
    return [tool for tool in tools if tool["function"]["name"] in names]


def shall_think(request: GenerationInput) -> bool:
    """Whether thinking is asked for: else an answer with a grammar begins with it."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return False
    switched = any(chat.template_kwargs.get(switch) for switch in SWITCHES)
    return switched or chat.effort not in (None, "none") or request.thinking_tokens is not None
