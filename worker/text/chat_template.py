"""What is known of a model's templates, found out once at load; and a conversation as its text.

    at load:    templates  --learning.py-->  forms  --proof.py-->  forms that are used
    a request:  messages  --turns.py-->  messages in the template's form  --renderer.py-->  text

A *template* is what a checkpoint carries: a chat template, perhaps a response template. A *form*
is what is known from them: how answers and their calls are written (answer_form.py, call_form.py),
and how calls and results are taken back (turns.py). Rendering runs in pool threads.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from batching.errors import InvalidInput
from worker.protocol import Calls, Chat
from worker.text import response_template
from worker.text.answer_form import PLAIN, AnswerForm, learned
from worker.text.call_form import PLAIN_CALLS, CallForm
from worker.text.learning import Learner
from worker.text.probes import NAMES, QUESTION, TOOLS
from worker.text.proof import Example, examples, reads_back
from worker.text.renderer import EFFORT, SWITCHES, Renderer
from worker.text.turns import Conversation, Message, TurnForm

log = logging.getLogger("onequeue.template")

INSTRUCTIONS = """# Tools

You may call functions. Each is described by a line of JSON between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, write its name and a value for each of its parameters just so:
{example}"""
PLACEHOLDERS = {  # of what was made up, in an example that is shown
    **{"nameone": "FUNCTION", "nametwo": "OTHER_FUNCTION", "callidone": "ID"},
    **{"keyone": "PARAMETER", "keytwo": "OTHER", "valueone": "VALUE", "callidtwo": "OTHER_ID"},
}


class ChatTemplate:
    """`answers`: how they are written. `turns`: how calls and results are taken; None: not at all.
    `examples`: calls as the template writes them, with the names and arguments that went in.
    `notes`: what the template lacks, and what is done instead."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self.tried = self._renderer.tried
        self.notes: list[str] = []
        self.examples: list[Example] = []
        learner = Learner(self.tried, self._renderer.source)
        self.turns = learner.turns
        self.shows_tools = _names_tools(learner.asked)
        self.answers = self._learned(learner)
        self.takes_tools = self.shows_tools or self._takes_instructions()
        self._note_lacks()
        self.opens_thoughts = self._opens_thoughts()

    # ── at load ──

    def _learned(self, learner: Learner) -> AnswerForm:
        """What the tokenizer's response template says; else, what the chat template shows."""
        calls = learner.calls()
        if calls is None and (self.turns is None or self.turns.written):
            learner = Learner(self._renderer.lenient(), self._renderer.source)
            calls = learner.calls()
            if self.turns and learner.turns and calls:
                self.turns = replace(self.turns, ids=learner.turns.ids)
        if calls:
            self.examples = examples(learner, calls.separator is not None)
        if spec := getattr(self._tokenizer, "response_template", None):
            form = replace(response_template.answer_form(spec), calls=calls)
            if form.call_marks and calls and not reads_back(form, self.examples):
                form = replace(form, calls=None)
                self._note("calls: the response template reads others; they are not held to a form")
            return form
        channels = learner.channels(calls)
        form = learned(learner.thoughts, learner.content(), calls or PLAIN_CALLS, channels)
        form = replace(form, may_close=bool(form.thoughts) and self._switches())
        if calls is None:
            return self._plain(form, "the template writes none that are understood")
        if not reads_back(form, self.examples):
            return self._plain(form, "those that the template writes are not read back")
        return form

    def _plain(self, form: AnswerForm, why: str) -> AnswerForm:
        self._note(f"calls: {why}; taken as JSON in <tool_call>")
        self.examples = []
        plain = learned(form.thoughts, form.content, PLAIN_CALLS, None)
        return replace(plain, may_close=form.may_close)

    def refuse_calls(self, why: str) -> None:
        """The form of calls is not used: it does not prove itself elsewhere."""
        self.answers = self._plain(self.answers, why)

    def _takes_instructions(self) -> bool:
        """Tools in a system message. A template that takes nothing says so itself."""
        instructed = self._instructed([QUESTION], TOOLS)
        return _names_tools(self.tried(instructed)) or not self.tried([QUESTION])

    def _switches(self) -> bool:
        """Whether a variable turns thinking on and off."""
        on: dict[str, Any] = dict.fromkeys(SWITCHES, True)
        off: dict[str, Any] = dict.fromkeys(SWITCHES, False)
        return self.tried([QUESTION], **on) != self.tried([QUESTION], **off)

    def _opens_thoughts(self) -> tuple[int, ...]:
        """The tokens by which the model opens its thoughts; none if the prompt does, or it has
        none."""
        form = self.answers
        if form.thoughts is None:
            return ()
        prompt = self.tried([QUESTION], enable_thinking=True)
        begun = thoughts_in(form, prompt)
        if not prompt or (begun and not form.ends_thoughts(begun)):
            return ()
        return self._tokens(form.thoughts[0])

    def _note_lacks(self) -> None:
        if not self.takes_tools:
            self._note("tools: the template shows neither tools nor a system message; refused")
        elif not self.shows_tools:
            self._note("tools: the template does not show them; told in the system message")
        if self.turns is None:
            self._note("turns: the template cannot show calls and their results; refused")
        elif self.turns.written:
            self._note("turns: the template cannot show calls; told in the content")
        if self.turns and self.turns.results == "told":
            self._note("turns: the template cannot show results; told in the user's words")

    def _note(self, lack: str) -> None:
        """A checkpoint without a template lacks nothing: it takes no chats."""
        if self._renderer.source:
            self.notes.append(lack)
            log.warning("chat template: %s", lack)

    # ── requests ──

    def forms(self, calls: Calls | None) -> tuple[AnswerForm, CallForm | None]:
        """How answers and their calls are written: plainly, where calls must be made and the
        model's form is not known."""
        form = self.answers
        if calls and (not form.call_marks or (calls.required and form.calls is None)):
            return PLAIN, PLAIN_CALLS
        return form, form.calls

    def render(self, chat: Chat) -> str:
        """The prompt's text; InvalidInput with the template's own reason, if it gives one."""
        if not self._tokenizer.chat_template:
            raise InvalidInput("this model has no chat template: use /v1/completions", "messages")
        for name in chat.template_kwargs:
            if name in self._renderer.reserved:
                param = f"chat_template_kwargs.{name}"
                raise InvalidInput(f"{param}: is not a variable of the template", param)
        variables = self._effort(chat) | dict(chat.template_kwargs)
        # Newer versions of transformers show a template no None; older ones do.
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in chat.messages
        ]
        try:
            if any(_special(message) for message in messages):
                if self.turns is None:
                    cannot = "the model's chat template cannot show calls and their results"
                    raise InvalidInput(cannot, "messages")
                messages = self._conversation(messages)
            tools = [dict(tool) for tool in chat.tools]
            if tools and not self.takes_tools:
                cannot = "the model's chat template can show neither tools nor a system message"
                raise InvalidInput(f"tools: {cannot}", "tools")
            if tools and not self.shows_tools:
                messages, tools = self._instructed(messages, tools), []
            return self._renderer.text(
                messages,
                tools,
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

    def _conversation(self, messages: list[Message]) -> list[Message]:
        assert self.turns is not None
        calls = self.answers.calls
        written = calls if calls and calls.arguments.style == "json" else PLAIN_CALLS
        return Conversation(self.turns, written).adapt(messages)

    def _instructed(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
        """With the tools in the system's message, for a template that does not show them."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = INSTRUCTIONS.format(tools=listed, example=self.example())
        first, *others = messages
        if first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": told}, *messages]
        content = first["content"]
        if isinstance(content, str):
            return [{**first, "content": f"{content}\n\n{told}"}, *others]
        return [{**first, "content": [*content, {"type": "text", "text": told}]}, *others]

    def example(self, several: bool = False) -> str:
        """Of a call or two, as they are written."""
        count = 2 if several else 1
        made = (text for text, calls in self.examples if len(calls) == count)
        if not (written := next(made, "").strip()):
            return PLAIN_CALLS.text([("FUNCTION", '{"PARAMETER": "VALUE"}')] * count)
        for name, shown in PLACEHOLDERS.items():
            written = written.replace(name, shown)
        return written

    def _effort(self, chat: Chat) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        if chat.effort is None:
            return {}
        if not self._renderer.thinking and chat.effort != "none":
            why = f"{chat.effort_param}: this model's template knows no thinking"
            raise InvalidInput(why, chat.effort_param)
        switch = chat.effort != "none"
        return {name: chat.effort if name == EFFORT else switch for name in self._renderer.thinking}

    def end_of_thoughts(self, form: AnswerForm) -> tuple[int, ...]:
        """The tokens of the mark that ends them; InvalidInput if there is none."""
        if form.thoughts is None:
            param = "thinking_token_budget"
            raise InvalidInput(f"{param}: it is not known how this model ends its thoughts", param)
        return self._tokens(form.thoughts[1])

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _names_tools(text: str) -> bool:
    return all(name in text for name in (*NAMES, "keyone"))


def thoughts_in(form: AnswerForm, prompt: str) -> str:
    """The marks of thoughts that a prompt ends with: they have begun, or are over."""
    if form.thoughts is None:
        return ""
    opens, closes = (text.strip() for text in form.thoughts)
    start = prompt.rfind(opens)
    tail = prompt[start:] if start >= 0 else ""
    rest = tail.replace(closes, "").replace(opens, "")
    return "" if rest.strip() else tail


def _special(message: Mapping[str, Any]) -> bool:
    """Whether a message is one that templates take in different ways."""
    return message["role"] == "tool" or bool(
        message.get("tool_calls") or message.get("reasoning_content")
    )
