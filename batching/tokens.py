"""A sequence's tokens: the prompt, which all choices of a request share, and an output of its own.

Read like one list. Nothing of a prompt is copied, however long it is and however many choices
there are.
"""

from collections.abc import Sequence
from typing import overload


class Tokens(Sequence[int]):
    __slots__ = ("output", "prompt")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self.output: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        border = len(self.prompt)
        if isinstance(at, int):
            at += len(self) if at < 0 else 0
            return self.prompt[at] if at < border else self.output[at - border]
        start, stop, _ = at.indices(len(self))
        if stop <= border:
            return self.prompt[start:stop]
        if start >= border:
            return self.output[start - border : stop - border]
        return [*self.prompt[start:], *self.output[: stop - border]]
