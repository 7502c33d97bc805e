"""What is known of a model's templates, found out once at load; and a conversation as its text.

A *template* is what a checkpoint carries: a chat template, perhaps a response template. A *form*
is what is known from them: how answers and their calls are written (answer_form.py), and how calls
and results are taken back (turns.py). Rendering runs in pool threads.
"""

import inspect
import re
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.filters import FILTERS
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput
from worker.protocol import Calls, Chat
from worker.text.answer_form import (
    PLAIN,
    PLAIN_CALLS,
    AnswerForm,
    CallForm,
    answer_form,
    call_form,
)
from worker.text.turns import Conversation, Message, TurnForm, turn_form, without_nulls

# For templates that write calls only where there are tools; some want all of this of one.
PROPERTIES = {"given": {"type": "string", "description": "any"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["given"]}
FUNCTION = {"name": "any", "description": "any", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
SWITCHES = ("enable_thinking", "thinking")  # what templates call it
EFFORT = "reasoning_effort"


class ChatTemplate:
    """`answers`, `calls`: None where the templates do not tell, or there are none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        source = str(tokenizer.chat_template)
        known = (EFFORT, *SWITCHES)
        self._variables = [name for name in known if re.search(rf"\b{name}\b", source)]
        self._reserved = _reserved(tokenizer)
        self.answers = answer_form(tokenizer)
        self.calls = call_form(self.answers, partial(self._tried, add_generation_prompt=False))
        self.turns = turn_form(self._tried)
        self.opens_thoughts = self._opens_thoughts(source)

    def forms(self, calls: Calls | None) -> tuple[AnswerForm | None, CallForm | None]:
        """How answers and their calls are written: plainly, where calls are asked for and the
        model's form is not known."""
        form, call = self.answers, self.calls
        if calls and (form is None or form.calls is None or (calls.required and call is None)):
            return PLAIN, PLAIN_CALLS
        return form, call

    def render(self, chat: Chat) -> str:
        """The prompt's text; InvalidInput with the template's own reason, if it gives one."""
        if not self._tokenizer.chat_template:
            raise InvalidInput("this model has no chat template: use /v1/completions", "messages")
        for name in chat.template_kwargs:
            if name in self._reserved:
                param = f"chat_template_kwargs.{name}"
                raise InvalidInput(f"{param}: is not a variable of the template", param)
        variables = self._effort(chat) | dict(chat.template_kwargs)
        messages = [without_nulls(message) for message in chat.messages]
        try:
            if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
                if self.turns is None:
                    cannot = "the model's chat template cannot show calls and their results"
                    raise InvalidInput(cannot, "messages")
                messages = Conversation(self.turns).adapt(messages)
            return self._text(
                messages,
                [dict(tool) for tool in chat.tools],
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **variables,
            )
        except InvalidInput:
            raise
        except Exception as error:  # whatever a template raises
            # What it says by raise_exception is meant to be read; other errors are its insides.
            said = error.message if type(error) is TemplateError else None
            why = f"refuses the messages: {said[:500]}" if said else "cannot render these messages"
            raise InvalidInput(f"the model's chat template {why}", "messages") from error

    def call_id(self, name: str, index: int) -> str:
        """For a call that the model makes, its conversation's `index`-th."""
        return (self.turns or TurnForm()).call_id(name, index)

    def _text(self, messages: list[Message], tools: list[Message], **variables: Any) -> str:
        render: Any = self._tokenizer.apply_chat_template
        text = render(messages, tools=tools or None, tokenize=False, **variables)
        assert isinstance(text, str)
        return text

    def _tried(self, messages: list[Message], **variables: Any) -> str:
        """Nothing where the template raises."""
        try:
            return self._text(messages, [TOOL], **{"add_generation_prompt": True, **variables})
        except Exception:  # whatever it is
            return ""

    def _effort(self, chat: Chat) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        if chat.effort is None:
            return {}
        if not self._variables and chat.effort != "none":
            why = f"{chat.effort_param}: this model's template knows no thinking"
            raise InvalidInput(why, chat.effort_param)
        switch = chat.effort != "none"
        return {name: chat.effort if name == EFFORT else switch for name in self._variables}

    def end_of_thoughts(self, form: AnswerForm | None) -> tuple[int, ...]:
        """The tokens of the mark that ends them; InvalidInput if there is none."""
        reasoning = form.reasoning if form else None
        if reasoning is None or not reasoning.close_literals:
            param = "thinking_token_budget"
            raise InvalidInput(f"{param}: it is not known how this model ends its thoughts", param)
        return tuple(self._tokenizer.encode(reasoning.close_literals[0], add_special_tokens=False))

    def _opens_thoughts(self, source: str) -> int | None:
        """The token by which the model opens its thoughts, if it does so by itself."""
        reasoning = self.answers.reasoning if self.answers else None
        mark = reasoning.open_literals[0] if reasoning and reasoning.open_literals else None
        if self.answers is None or mark is None or mark not in source:
            return None
        prompt = self._tried([{"role": "user", "content": "?"}], enable_thinking=True)
        begun = self.answers.thoughts_in(prompt)
        if not prompt or (begun and not self.answers.ends_thoughts(begun)):
            return None  # the prompt does
        ids = self._tokenizer.encode(mark, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None


def _reserved(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that `chat_template_kwargs` may not set: arguments on the way to the template, which
    would be given twice or do something else, special tokens, and the functions it finds."""
    utils: Any = chat_template_utils
    environment = utils._compile_jinja_template("").environment
    way = (
        type(tokenizer).apply_chat_template,
        ProcessorMixin.apply_chat_template,
        utils.render_jinja_template,
        Template.render,
    )
    return {
        "messages",  # what the renderer calls a conversation
        *(name for function in way for name in inspect.signature(function).parameters),
        *tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
        *tokenizer.special_tokens_map,
        *environment.globals,
        *(name for name, _ in environment.filters.items() - FILTERS.items()),
    }
