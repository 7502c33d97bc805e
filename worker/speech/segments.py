"""What a window's tokens say of time: its segments, and where the next window begins.

As `generate` of transformers has it for long recordings: what comes after the last pair of
timestamps is heard again, unless the window ends with a single one, or has no pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Frames of the features that a timestamp counts.
FRAMES = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `begin` to `end` of a window, and from which frame of it to which they are said."""

    begin: int
    end: int
    first: int
    last: int


def split(said: Sequence[int], timestamps: int, frames: int) -> tuple[list[Part], int]:
    """Parts of what was said in a window of so many frames, the end of text left out, and how many
    of them it covers. `timestamps` is the first token that is one."""
    timed = [token >= timestamps for token in said]
    pairs = [at + 1 for at in range(len(said) - 1) if timed[at] and timed[at + 1]]
    if not pairs:
        times = [token - timestamps for token in said if token >= timestamps]
        last = times[-1] if times and times[-1] else frames // FRAMES
        return [Part(0, len(said), 0, last * FRAMES)], frames
    single = timed[-2:] == [False, True]
    ends = [*pairs, len(said)] if single else [*pairs[:-1], pairs[-1] + 1]
    parts = []
    begin = 0
    for end in ends:
        closing = end - 1 if end != ends[-1] or single else end - 2
        first, last = (said[at] - timestamps for at in (begin, closing))
        parts.append(Part(begin, end, first * FRAMES, last * FRAMES))
        begin = end
    covered = frames if single else (said[begin - 2] - timestamps) * FRAMES
    return parts, covered
