"""Text that knows its tokens: what goes from the detokenizer through the parser to the client.

Where log-probabilities are asked for, a piece carries those of the tokens that made it. Whoever
splits a piece splits them too, and what is dropped takes its tokens along.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from worker.deltas import TokenLogprob

# A token that has text, after those that have none of their own: part of its first character.
Tokens: TypeAlias = tuple[TokenLogprob, ...]


class Share(NamedTuple):
    """What a piece has of one token's text. All shares of a token have the same `tokens`."""

    text: str
    tokens: Tokens
    ends: bool = True  # with the end of the token's text


@dataclass(slots=True)
class Piece:
    """A stretch of text, and the shares of tokens that it is made of; none if nobody asks."""

    text: str
    shares: list[Share] = field(default_factory=list)

    def append(self, other: "Piece") -> None:
        self.text += other.text
        self.shares += other.shares

    def take(self, count: int) -> "Piece":
        """The first `count` characters, which leave this piece."""
        taken = Piece(self.text[:count])
        self.text = self.text[count:]
        if self.shares:
            whole = 0
            while whole < len(self.shares) and len(self.shares[whole].text) <= count:
                count -= len(self.shares[whole].text)
                whole += 1
            taken.shares, self.shares = self.shares[:whole], self.shares[whole:]
            if count and self.shares:
                text, tokens, ends = self.shares[0]
                taken.shares.append(Share(text[:count], tokens, ends=False))
                self.shares[0] = Share(text[count:], tokens, ends)
        return taken
