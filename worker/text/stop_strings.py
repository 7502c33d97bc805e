"""Stop strings: where the content of an answer ends, though it comes in parts."""

from collections.abc import Collection


class StopStrings:
    """Looks for stop strings in a text that comes in parts; how it is cut makes no difference.

    The stop that is complete first wins, as if the text came character by character; of several
    complete at the same character, the one that begins first (the longest).
    """

    def __init__(self, stops: Collection[str]) -> None:
        """`stops`: none of them empty."""
        self.matched: str | None = None  # all that precedes it is shown; it and the rest are not
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now: what could become a stop is held back."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        text, self._held = self._held + text, ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            return text[:at]
        at = max(0, len(text) - self._longest + 1)
        while not any(stop.startswith(text[at:]) for stop in self._stops):
            at += 1
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """What was held back, when the sequence ends otherwise."""
        held, self._held = self._held, ""
        return held
