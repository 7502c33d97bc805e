"""Deltas: the additions to one choice since its reader last asked.

The worker's thread adds tokens, the event loop takes deltas (engines/generation/output.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "tool_calls"]
Kind = Literal["content", "reasoning", "call"]
MAX_UNREAD = 64  # tokens of a choice whose text is then written for a slow reader


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the output or of an echoed prompt, with its log-probability.

    The joined texts are the whole text. `top` has the most likely tokens, best first. The first
    token of a prompt has no `logprob`.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()
    rank: int = 0  # among all tokens, from 1; unset in `top`


@dataclass(slots=True)
class DeltaPart:
    """A piece of text of one kind. The joined texts of a tool call are its arguments as JSON."""

    kind: Kind
    text: str
    name: str | None = None  # starts a call of this function; None continues the last part


@dataclass(slots=True)
class Delta:
    """The additions to one choice since its last delta."""

    choice: int
    parts: list[DeltaPart] = field(default_factory=list)  # in order; neighbours differ in kind
    tokens: int = 0  # output tokens, including those without text
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # set in a choice's last delta
    stop_reason: str | int | None = None  # the stop string or token id that ended the choice
    prompt_tokens: int = 0  # once per prompt
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    audio_tokens: int = 0  # prompt tokens that stand for recordings
    ends_reasoning: bool = False  # the text before this was reasoning, without an opening delimiter
    reasoning_tokens: int = 0  # included in `tokens`
    token_ids: list[int] = field(default_factory=list)  # of `tokens`, if requested
    probabilities: Sequence[float] = ()  # of a decision's options: its whole response
    # Of the prompt, in a choice's first delta, if requested.
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        """The content, without reasoning and tool calls."""
        return "".join(part.text for part in self.parts if part.kind == "content")

    def add(self, kind: Kind, text: str, name: str | None = None) -> None:
        """Add text. `name` starts a tool call."""
        if self.parts and name is None and self.parts[-1].kind == kind:
            part = self.parts[-1]
            joined, part.text = part.text, ""  # CPython extends a string with one reference
            joined += text
            part.text = joined
        elif text or name is not None:
            self.parts.append(DeltaPart(kind, text, name))

    def end_reasoning(self) -> None:
        """Turn the content so far into reasoning: a closing delimiter came without an opening one.
        Content that has already been sent stays content."""
        self.ends_reasoning = True
        parts, self.parts, self.logprobs = self.parts, [], []
        for part in parts:
            self.add("reasoning" if part.kind == "content" else part.kind, part.text, part.name)

    def merge(self, later: "Delta") -> None:
        if later.ends_reasoning:
            self.end_reasoning()
        for part in later.parts:
            self.add(part.kind, part.text, part.name)
        self.tokens += later.tokens
        self.reasoning_tokens += later.reasoning_tokens
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.prompt_tokens += later.prompt_tokens
        self.cached_tokens += later.cached_tokens
        self.audio_tokens += later.audio_tokens
        self.token_ids += later.token_ids


class DeltaSource(Protocol):
    """A choice as the event loop sees it. It hears of the first unread token, of the end, and from
    MAX_UNREAD unread tokens on of some, a few choices in a step."""

    choice: int
    finished: bool  # no token follows the unread ones; set once the last one is there

    @property
    def unread(self) -> int:
        """The number of unread tokens."""

    def take_delta(self) -> Delta:
        """Return what was added since the last call. Raises an OnequeueError."""
