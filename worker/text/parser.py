"""One answer's text, as it comes, as what it is: content, reasoning, calls.

Reads by a response template as `tokenizer.parse_response` does, but gives each stretch of text
as soon as it is certain what it belongs to. White space around reasoning and calls belongs to
nobody. A call that makes no sense is content.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from worker.deltas import Kind
from worker.text.call_parser import CallReader
from worker.text.response_template import CALLS, CONTENT, REASONING, AnswerForm, Mark

Match = Any  # of the regex package
MOST_HELD = 4096  # characters that may become a mark; then they are what they are


class Found(NamedTuple):
    kind: Kind
    text: str
    name: str | None = None  # of a call that begins
    at: int = 0  # of content: where it stands in the whole text


class Reader:
    """`begun`: what the prompt has already written of the answer. `calls`: whether there may be
    any; if not, what looks like one is content."""

    def __init__(
        self, form: AnswerForm, begun: str, calls: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.calls_begun = self.calls_ended = 0
        self.calls_held = False  # to a grammar: their strings end where they should
        self._form = form
        self._tools: list[Any] = [dict(tool) for tool in tools]
        outside = [field for field in form.template.fields.values() if field.open_re is None]
        self._outside = outside[0] if outside else None
        self._inside = self._outside
        self._marks_outside = [m for name, m in form.opens.items() if calls or name != CALLS]
        if self._outside and (end := form.closes.get(self._outside.name)):
            self._marks_outside.append(end)
        self._first_only = False  # a mark counts only where nothing stands before it
        self._at = 0  # of the whole text, so much is read
        self._told = False  # there is content
        self._apart = False  # a mark stood before: white space is nobody's
        self._call: CallReader | None = None
        self._call_text = ""  # of the call that is being read, with its marks
        self._opened = 0  # how much of it is the first mark
        self._since = ""  # the mark before, up to the first content
        self._held = ""  # may be the beginning of a mark
        self._space = ""  # may be the last before a mark
        self._retold: list[Found] = []  # of a call that the prompt has begun
        if begun:
            self._retold = self._open_call(self.push(begun))
            self.calls_begun, self.calls_ended = int(bool(self._retold)), 0
            self._space = ""
            self._at = -len(self._held)

    def sibling(self) -> "Reader":
        """Another answer to the same prompt, as far as this one has been read."""
        made = copy.copy(self)
        made._call = self._call and self._call.sibling()
        made._retold = [*self._retold]
        return made

    def hold(self, marks: bool) -> None:
        """From here on the text is held to a grammar, of a document: nothing in it is a mark but,
        with `marks`, in the beginning."""
        self._told = self._apart = False
        self._first_only = True
        if not marks:
            self._marks_outside = []

    @property
    def thinking(self) -> bool:
        return self._inside is not None and self._inside.name in REASONING

    @property
    def calling(self) -> bool:
        return self._inside is not None and self._inside.name == CALLS

    @property
    def since_mark(self) -> str:
        """The text of the call that is being read, with its mark; or what follows the last mark,
        up to the first content."""
        return (self._call_text if self.calling else self._since) + self._held

    @property
    def at(self) -> int:
        """All text before this is told, or belongs to nobody."""
        open_call = self.calling and not (self._call and self._call.begun)
        return self._at - len(self._call_text) if open_call else self._at

    def push(self, text: str) -> list[Found]:
        self._held += text
        found, self._retold = self._retold, []
        while match := self._read(found, ended=False):
            self._turn(match, found)
        return found

    def flush(self) -> list[Found]:
        """What was held back, at the end."""
        found, self._retold = self._retold, []
        while match := self._read(found, ended=True):
            self._turn(match, found)
        self._say_space(found)
        if self.calling and not self._cut_short:
            self._end_call(found)
        return found

    @property
    def _cut_short(self) -> bool:
        """Whether the call that is being read is one as far as it goes, but has no name yet."""
        opening = self._call_text[self._opened :].lstrip()[:1]
        return self._call is not None and not self._call.begun and opening in ("", "{", "[")

    def _read(self, found: list[Found], ended: bool) -> tuple[Mark, Match] | None:
        """Tell what stands before the next mark, or cannot become part of one."""
        mark, certain = self._next_mark(ended)
        text, self._held = self._held[:certain], self._held[certain:]
        self._tell(text, found)
        return mark

    def _next_mark(self, ended: bool) -> tuple[tuple[Mark, Match] | None, int]:
        """The first mark that is certain, and how much of the held text stands before it or
        anything that may become one."""
        best: tuple[Mark, Match] | None = None
        pending = len(self._held)
        for mark in self._marks():
            match = mark.pattern.search(self._held, partial=not ended)
            if match is None or not self._counts(match):
                continue
            may_grow = mark.grows or not match.group()
            if not ended and (match.partial or (may_grow and match.end() == len(self._held))):
                pending = min(pending, match.start())
            elif not match.group() and mark.field is self._outside:
                continue
            elif best is None or match.start() < best[1].start():
                best = mark, match
        if best is not None and best[1].start() < pending:
            return best, best[1].start()
        return None, pending if len(self._held) - pending < MOST_HELD else len(self._held)

    def _counts(self, match: Match) -> bool:
        """Some marks are marks only before everything else, lest they are seen in what is said."""
        if self._inside is not self._outside:
            return True
        first = not self._told and not self._held[: match.start()].strip()
        return first or not (self._first_only or (self._form.unmarked and not match.group()))

    def _marks(self) -> list[Mark]:
        if self._inside is self._outside:
            return self._marks_outside
        assert self._inside is not None
        end = self._form.closes.get(self._inside.name)
        return [end] if end else []

    def _turn(self, mark: tuple[Mark, Match], found: list[Found]) -> None:
        """One stretch ends with a mark, another begins."""
        field, match = mark[0].field, mark[1]
        taken = match.group()
        self._held = self._held[len(taken) :]
        if self.calling and self.calls_held and self._call and self._call.quoted:
            self._tell(taken, found)  # a text that looks like one
            return
        self._forget_space()
        self._since = ""
        self._at += len(taken)
        self._apart = True
        if self._inside is not self._outside:
            if self.calling:
                self._call_text += taken
                self._end_call(found)
            self._inside = self._outside
        elif field is not self._outside:
            self._inside = field
            if self.calling:
                self._call, self._call_text = self._call_reader(field, match), taken
                self._opened = len(taken)
                self._tell_call("", found)

    def _tell(self, text: str, found: list[Found]) -> None:
        name = self._inside.name if self._inside else ""
        if self._apart and self._inside is self._outside:
            self._since += text
        if name == CALLS:
            if not (self._call and self._call.begun and len(self._call_text) > MOST_HELD):
                self._call_text += text
            self._at += len(text)
            self._tell_call(text, found)
        elif name == CONTENT or name in REASONING:
            self._tell_text("content" if name == CONTENT else "reasoning", text, found)
        else:
            self._at += len(text)

    def _tell_text(self, kind: Kind, text: str, found: list[Found]) -> None:
        stripped = text.rstrip()
        if stripped:
            shown = self._space + stripped
            if self._apart:
                bare = len(shown) - len(shown.lstrip())
                self._at += bare
                shown = shown[bare:]
            found.append(Found(kind, shown, None, self._at))
            self._at += len(shown)
            self._space, self._apart = "", False
            self._told = self._told or kind == "content"
        self._space += text[len(stripped) :]

    def _say_space(self, found: list[Found]) -> None:
        """The end of the text is not between anything."""
        if self._space and not self._apart and not self.calling:
            kind: Kind = "reasoning" if self.thinking else "content"
            found.append(Found(kind, self._space, None, self._at))
        self._forget_space()

    def _forget_space(self) -> None:
        self._at += len(self._space)
        self._space = ""

    # ── calls ──

    def _open_call(self, found: list[Found]) -> list[Found]:
        """What has been told of the call that is being read."""
        if not (self.calling and self._call and self._call.begun):
            return []
        first = max(n for n, each in enumerate(found) if each.name is not None)
        return found[first:]

    def _call_reader(self, field: ResponseTemplateField, match: Match) -> CallReader | None:
        """Reads calls as they come; None where the form lets them be read only as a whole."""
        shape = field.transform.get("function") if isinstance(field.transform, dict) else None
        if field.content != "json" or field.content_args:
            return None
        if shape == "{content}":
            return CallReader("name", "arguments")
        if not isinstance(shape, dict):
            return None
        name, arguments = str(shape.get("name")), str(shape.get("arguments"))
        if arguments == "{content}":
            return CallReader("", "", match.groupdict().get(name.strip("{}")) or "")
        return CallReader(*(key.strip("{}").removeprefix("content.") for key in (name, arguments)))

    def _tell_call(self, text: str, found: list[Found]) -> None:
        if self._call is None:
            return
        for said in self._call.push(text):
            self.calls_begun += said.name is not None
            found.append(Found("call", said.text, said.name))

    def _end_call(self, found: list[Found]) -> None:
        whole, self._call_text = self._call_text, ""
        calls = self._parsed(whole) if self._call is None else []
        for name, arguments in calls:
            self.calls_begun += 1
            found += [Found("call", "", name), Found("call", arguments)]
        if calls or (self._call and self._call.begun):
            self.calls_ended += 1
        else:
            found.append(Found("content", whole, None, self._at - len(whole)))
            self._apart = False

    def _parsed(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments, as the library reads the text of a call."""
        try:
            message = parse_response(text, self._form.template, prefix="", tools=self._tools)
            functions = [call["function"] for call in message[CALLS]]
            return [(each["name"], orjson.dumps(each["arguments"]).decode()) for each in functions]
        except (KeyError, TypeError, ValueError):
            return []
