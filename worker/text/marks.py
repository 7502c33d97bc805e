"""Marks in an answer's text: each leads from one phase of it to another; parser.py follows them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from worker.text.call_parser import BodyParser, CallParser
from worker.text.parameter_types import Tools

Match: TypeAlias = Any  # of the regex package
# Of the groups of the match that opens calls, and the tools that may be called.
MakeParser = Callable[[dict[str, str], Tools], CallParser | BodyParser]

ANSWER, THINKING, CALL, NOBODY = "answer", "thinking", "call", "nobody"
LEAST_OF_MARK = 3  # characters of one, which are not shown if no more come
MAX_PENDING = 4096  # characters that may become a mark; then they are what they are
MAX_DOUBTFUL = 8192  # from a call in open thoughts on, or from the end of a call in a string


class Mark(NamedTuple):
    """What leads from a phase to another."""

    within: frozenset[str]  # the phases it is looked for in
    to: str
    pattern: Any  # of the regex package
    grows: bool = False  # a match at the end of a text may become longer
    first: frozenset[str] = frozenset()  # characters that begin it; none: they are not known
    parser: MakeParser | None = None  # of the calls that it opens
    leads: bool = False  # it counts only before everything else
    trigger: Any = None  # a pattern: with this, no matter what follows, a call has begun
    known: bool = False  # it counts only with the name of a tool
    apart: bool = False  # within content it counts only at the start of a line

    def begun_in(self, text: str) -> str | None:
        """What follows the part of it by which it is clear that a call begins."""
        match = self.trigger and self.trigger.search(text)
        return text[match.end() :] if match else None

    def cut_in(self, text: str, follows: bool) -> int:
        """Where the beginning of a call's mark starts that a text ends in, cut short, and that is
        not shown; where the text `follows` calls, of any mark. Its length if there is none."""
        if (self.to != CALL or self.leads) and not follows:
            return len(text)
        match = self.pattern.search(text, partial=True)
        alone = match and follows and not text[: match.start()].strip()
        cut = match and match.partial and len(match.group()) >= (alone or LEAST_OF_MARK)
        return int(match.start()) if cut else len(text)


def first_mark(
    marks: Iterable[Mark],
    text: str,
    inside: str,
    counts: Callable[[Mark, Match], bool],
    ended: bool,
) -> tuple[tuple[Mark, Match] | None, int]:
    """The first mark that is certain, and how much of the text stands before it or before anything
    that may become one. `inside`: the phase."""
    best: tuple[Mark, Match] | None = None
    doubtful: tuple[Mark, Match] | None = None
    pending = len(text)
    for mark in marks:
        if mark.first and mark.first.isdisjoint(text):
            continue
        match = mark.pattern.search(text, partial=not ended)
        while match is not None and not counts(mark, match):
            others = (mark.known or mark.apart) and not match.partial
            match = mark.pattern.search(text, match.end(), partial=not ended) if others else None
        if match is None:
            continue
        may_grow = mark.grows or not match.group()
        if not ended and (match.partial or (may_grow and match.end() == len(text))):
            pending = min(pending, match.start())
        elif not match.group() and mark.to == inside:
            continue
        elif mark.to == CALL and inside == THINKING:
            doubtful = doubtful or (mark, match)
        elif best is None or match.start() < best[1].start():
            best = mark, match
    if best is not None and best[1].start() < pending:
        return best, best[1].start()
    longest = MAX_PENDING
    if best is None and doubtful is not None:
        # A call in open thoughts is one if they are never closed.
        if ended:
            return doubtful, doubtful[1].start()
        pending, longest = min(pending, doubtful[1].start()), MAX_DOUBTFUL
    return None, pending if len(text) - pending < longest else len(text)
