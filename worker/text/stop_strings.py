"""Stop strings: where the content of an answer ends."""

from collections.abc import Collection

from worker.text.detokenizer import Piece


class StopStrings:
    """Looks for stop strings in a text that comes in pieces; how it is cut makes no difference.

    The stop that is complete first wins, as if the text came character by character; of several
    complete at the same character, the one that begins first (the longest).
    """

    def __init__(self, stops: Collection[str]) -> None:
        """`stops`: none of them empty."""
        self.matched: str | None = None  # all that precedes it is shown; it and the rest are not
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._pending = Piece("")

    def push(self, piece: Piece) -> Piece:
        """What may be shown now: what could become a stop is pending."""
        if self.matched is not None:
            return Piece("")
        if not self._pending.text and self._first_chars.isdisjoint(piece.text):
            return piece
        self._pending.append(piece)
        text = self._pending.text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._pending = self._pending.take(at), Piece("")
            return shown
        at = max(0, len(text) - self._longest + 1)
        while not any(stop.startswith(text[at:]) for stop in self._stops):
            at += 1
        return self._pending.take(at)

    def ends_with(self, text: str) -> bool:
        """Whether a stop string is complete once this text comes."""
        return any(stop in self._pending.text + text for stop in self._stops)

    def flush(self) -> Piece:
        """What was pending, when the content ends otherwise."""
        return self._pending.take(len(self._pending.text))
