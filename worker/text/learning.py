"""The form of a model's answers, learned from its chat template.

    turns made for the purpose (probes.py)  --Render-->  texts  --compare-->  forms

The form of calls is found in such texts by learned_calls.py, what the template takes of calls that
were made before by turns.py, thoughts and content here. The template renders turns with and without
calls, thoughts and text, with names and values that occur nowhere else; what stands around those is
the form. There is no table of families, but for <think>, where a template names its end
and shows no thoughts. What is found is proved by reading back what the template has written.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from worker.text import probes, response_template
from worker.text.answer_form import AnswerForm, Channels, learned_form
from worker.text.call_form import ID, MARK, PLAIN_CALLS, CallForm, Pair, common_end, common_start
from worker.text.learned_calls import call_form
from worker.text.probes import ARGUMENTS, CONTENT, NAMES, THOUGHT, TOOLS, Example, assistant
from worker.text.turns import BLOCKS, QUESTION, Conversation, Message, Render, TurnForm, turn_form

INSTEAD = "taken as JSON in <tool_call>"
SWITCHES = ("enable_thinking", "thinking")  # what templates call it
THOUGHTS_KEYS = ("reasoning_content", "reasoning", "thinking", BLOCKS)
# A word before a list of calls, as in functools[{"name": …
WORD = re.compile(r"([^\s<>\[\]{}\"'`(]{3,40})\[\s*\{\s*\"name\"")
# Thoughts that are shown as the list of blocks that was given: {'type': 'thinking', …
DUMPED = re.compile(rf"\W(?:type|thinking)\W\s*:\s*\W(?:thinking|{THOUGHT})")
# At the end of a text: a mark and perhaps a word, as in <|channel>thought
LAST_MARK = re.compile(rf"(?:{MARK.pattern})\w*\s*$")
# At the end of a prompt: <think> or <think></think>, [THINK] or [THINK][/THINK]
OPENED = re.compile(r"(<([\w:]{1,40})>|\[([A-Z]{2,40})\])\s*(?:</\2>|\[/\3\])?\s*$")


class Learned(NamedTuple):
    """What is known of a template, as ChatTemplate has it."""

    answers: AnswerForm
    turns: TurnForm | None
    shows_tools: bool
    examples: list[Example]
    lacks: list[str]


def learn(
    render: Render, lenient: Render, source: str, response: Mapping[str, Any] | None
) -> Learned:
    """What the response template says, where there is one; else, what the chat template shows.
    `lenient`: for a template that shows no calls otherwise."""
    learner = Learner(render, source)
    turns, shows_tools = learner.turns, names_tools(learner.asked)
    calls = learner.calls()
    if calls is None and (turns is None or turns.written):
        learner = Learner(lenient, source)
        calls = learner.calls()
    made = probes.examples(learner.written, calls) if calls else []
    lacks = []
    if response:
        answers = replace(response_template.answer_form(response), calls=calls)
        if answers.call_marks and calls and not probes.reads_back(answers, made):
            answers = replace(answers, calls=None)
            lacks.append("calls: the response template reads others; they are not held to a form")
    else:
        answers = learner.answers(calls)
        if calls is None:
            lacks.append(f"calls: the template writes none that are understood; {INSTEAD}")
        elif not probes.reads_back(answers, made):
            lacks.append(f"calls: those that the template writes are not read back; {INSTEAD}")
        if lacks:
            answers, made = plain_calls(answers), []
    if turns is None:
        lacks.append("turns: the template cannot show calls and their results; refused")
    elif turns.written:
        lacks.append("turns: the template cannot show calls; told in the content")
    if turns and turns.results == "told":
        lacks.append("turns: the template cannot show results; told in the user's words")
    return Learned(answers, turns, shows_tools, made, lacks)


def plain_calls(form: AnswerForm) -> AnswerForm:
    """With calls as JSON in <tool_call>, in place of those that a template seemed to write."""
    plain = learned_form(form.thoughts, form.content, PLAIN_CALLS, None)
    return replace(plain, may_close=form.may_close)


def names_tools(text: str) -> bool:
    """Whether the tools of probes.py are shown in it."""
    return all(name in text for name in (*NAMES, "keyone"))


class Learner:
    """`turns`: how the template takes calls and thoughts; None: it takes no calls. `thoughts`: the
    marks around them. `asked`: a question, with tools unless the template fails where there are
    any, and the generation prompt."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        with_tools = render([QUESTION], TOOLS)
        self._offered, self._tools = (TOOLS, probes.TYPED_TOOLS) if with_tools else ([], [])
        self.asked = with_tools or render([QUESTION])
        self.turns = turn_form(lambda turns: render(turns, self._offered), self.asked.count("None"))
        self._plain = self._turn(assistant(content=CONTENT))
        self._thinking = ""  # a turn with thoughts and content
        for key in THOUGHTS_KEYS:
            if text := self._shown_thoughts(key):
                self._thinking = text
                self.turns = self.turns and replace(self.turns, thoughts=key)
                break
        self.thoughts = self._thoughts(source)

    def _turn(self, turn: Message, key: str = "reasoning_content", **variables: Any) -> str:
        """A question and this turn, with its thoughts under this key."""
        form = replace(self.turns or TurnForm(), thoughts=key)
        messages = Conversation(form).adapt([QUESTION, turn])
        return self._render(messages, self._tools, add_generation_prompt=False, **variables)

    def answers(self, calls: CallForm | None) -> AnswerForm:
        """With these calls, or plain ones. Thoughts may be closed that nothing has opened where a
        variable turns thinking on and off."""
        found = self.thoughts, self._content(), calls or PLAIN_CALLS, self._channels(calls)
        form = learned_form(*found)
        on, off = (
            self._render([QUESTION], **dict.fromkeys(SWITCHES, way)) for way in (True, False)
        )
        return replace(form, may_close=form.thoughts is not None and on != off)

    # ── calls ──

    def calls(self) -> CallForm | None:
        """None where the template writes none, or none that is understood."""
        if self.turns is None or self.turns.written:
            return None
        one, two = self._one_id(1), "" if self.turns.single else self._one_id(2)
        if NAMES[0] not in one:
            return None
        if NAMES[1] not in two or two.find(NAMES[1]) < two.find(NAMES[0]):
            two = ""
        form = call_form(one, two)
        if form and form.unmarked and form.keys and (word := WORD.search(self.asked)):
            return replace(form, marker=word[1])  # as in the prompt's example of a call
        return form

    def _one_id(self, count: int) -> str:
        """So many calls, with ID for each one's."""
        return re.sub("|".join(probes.IDS), ID, self.written(*(ARGUMENTS,) * count))

    def written(self, *arguments: dict[str, Any]) -> str:
        """A turn's calls with these arguments, and all that stands around them."""
        text = self._turn(assistant(*arguments)).rstrip()
        plain = (self._plain or self.asked).rstrip()
        text = text[len(common_start(text, plain)) :]
        text = text[: len(text) - len(common_end(text, plain))]
        if self.thoughts:  # there are none between their marks
            mark = rf"^\s*(?:{'|'.join(map(re.escape, self.thoughts))})\s*"
            text = re.sub(mark, "", re.sub(mark, "", text))
        return text

    # ── thoughts and content ──

    def _shown_thoughts(self, key: str) -> str:
        """A turn with thoughts and content, or a call if only that shows them; nothing where none
        are shown."""
        turns = [assistant(content=CONTENT, thought=THOUGHT)]
        turns += [assistant(ARGUMENTS, thought=THOUGHT)] if key != BLOCKS else []
        texts = (self._turn(turn, key, enable_thinking=True) for turn in turns)
        shown = (text for text in texts if THOUGHT in text and not DUMPED.search(text))
        return next(shown, "").replace(NAMES[0], CONTENT)

    def _thoughts(self, source: str) -> Pair | None:
        """What stands around them; else, what a prompt ends with, or what the source names."""
        before, _, after = self._thinking.partition(THOUGHT)
        opens, closes = LAST_MARK.search(before), MARK.search(after.partition(CONTENT)[0])
        if opens and closes:
            plain = LAST_MARK.search(self._plain.partition(CONTENT)[0])
            if plain is None or plain[0] != opens[0]:
                return opens[0].strip(), closes[0]
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            if found := OPENED.search(self._render([QUESTION], **variables)):
                return found[1], found[1][0] + "/" + found[1][1:]
        return ("<think>", "</think>") if "</think>" in source else None

    def _content(self) -> Pair | None:
        """The marks around it, if there are any."""
        messages = [QUESTION, assistant(content=CONTENT)]
        text = self._render(messages, add_generation_prompt=False)
        before, _, after = text.partition(CONTENT)
        opens, closes = LAST_MARK.search(before), MARK.match(after.lstrip())
        if opens is None or closes is None:
            return None
        mark = opens[0].strip()
        if not MARK.fullmatch(mark) or mark in (self.thoughts or ()):
            return None
        return None if mark in self._render([QUESTION]) else (mark, closes[0])

    def _channels(self, calls: CallForm | None) -> Channels | None:
        """Thoughts are a message, and the generation prompt's text stands before each:

        <|start|>assistant<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant…"""
        before, _, after = self._thinking.partition(THOUGHT)
        between, _, rest = after.partition(CONTENT)
        if not between or (calls and "=" not in calls.call[0]):
            return None
        unasked = self._render([QUESTION], self._offered, add_generation_prompt=False)
        prompt = self.asked[len(common_start(self.asked, unasked)) :].strip()
        if not prompt or prompt not in between:
            return None
        end, _, content = between.partition(prompt)
        headers = before.rpartition(prompt)[2], content
        marks = [MARK.findall(header) for header in headers]
        if len(marks[0]) != 2 or marks[0] != marks[1]:
            return None
        channel, body = marks[0]
        thinking, told = (MARK.split(header)[1].strip() for header in headers)
        ends = [*MARK.findall(end), *MARK.findall(rest)[:1]]
        ends += MARK.findall(calls.call[1]) if calls else []
        recipient = calls.call[0] if calls else ""
        ends = list(dict.fromkeys(ends))
        return Channels(prompt, channel, body, tuple(ends), thinking, told, recipient)
