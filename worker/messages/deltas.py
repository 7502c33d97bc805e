"""What a generation step adds to a choice: made by the worker, sent by the loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]
Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the output, or of an echoed prompt, and how likely the model found it.

    `text` is what it added to the text, so that joined texts are the whole; `top` has the most
    likely tokens, best first. The first token of a prompt has no `logprob`.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()
    rank: int = 0  # among all tokens, from 1 on; of `top`, its place tells


@dataclass(slots=True)
class DeltaPart:
    """A stretch of an answer. A call's text is its arguments, as JSON, whole when joined."""

    kind: Kind
    text: str
    name: str | None = None  # a call of this function begins; None: what came before goes on


@dataclass(slots=True)
class Delta:
    """What was added to one choice since the last delta."""

    choice: int
    parts: list[DeltaPart] = field(default_factory=list)  # in order; neighbours differ
    tokens: int = 0  # output tokens, counted with or without text of their own
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # set in a choice's last delta
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    prompt_tokens: int = 0  # of the choice's prompt; once per prompt
    cached_tokens: int = 0  # of them, taken from the prefix cache
    ends_thoughts: bool = False  # that nothing had opened
    reasoning_tokens: int = 0  # of `tokens`, those that were not for the reader
    token_ids: list[int] = field(default_factory=list)  # of `tokens`, if they are asked for
    probabilities: Sequence[float] = ()  # of a question's options, which is all of its answer
    # Of the prompt, in a choice's first delta, if they are asked for.
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        """The content alone."""
        return "".join(part.text for part in self.parts if part.kind == "content")

    def add(self, kind: Kind, text: str, name: str | None = None) -> None:
        if self.parts and name is None and self.parts[-1].kind == kind:
            part = self.parts[-1]
            said, part.text = part.text, ""  # CPython lets a text that only a local name has grow
            said += text
            part.text = said
        elif text or name is not None:
            self.parts.append(DeltaPart(kind, text, name))

    def end_thoughts(self) -> None:
        """What has been said so far were thoughts, which nothing had opened: as far as nobody has
        been told otherwise, which is all of it where an answer is told as a whole."""
        self.ends_thoughts = True
        parts, self.parts, self.logprobs = self.parts, [], []
        for part in parts:
            self.add("reasoning" if part.kind == "content" else part.kind, part.text, part.name)

    def merge(self, later: "Delta") -> None:
        if later.ends_thoughts:
            self.end_thoughts()
        for part in later.parts:
            self.add(part.kind, part.text, part.name)
        self.tokens += later.tokens
        self.reasoning_tokens += later.reasoning_tokens
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.prompt_tokens += later.prompt_tokens
        self.cached_tokens += later.cached_tokens
        self.token_ids += later.token_ids
