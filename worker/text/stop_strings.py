"""Stop strings in a text that is being generated."""

from collections.abc import Collection

from worker.text.detokenizer import TextSpan


class StopStrings:
    """Finds stop strings in a text that comes in spans, wherever it is cut.

    The stop that is complete first wins, as if the text came character by character; of several
    complete at the same character, the one that begins first (the longest).
    """

    def __init__(self, stops: Collection[str], shows_match: bool = False) -> None:
        """`stops`: none of them empty. The text before a match is shown, the rest is not;
        `shows_match`: the match is."""
        self.matched: str | None = None
        self._shows_match = shows_match
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_length = max(map(len, stops), default=0)
        self._pending = TextSpan("")

    def push(self, span: TextSpan) -> TextSpan:
        """Return what may be shown now, without an end that may become a stop string."""
        if self.matched is not None:
            return TextSpan("")
        if not self._pending.text and self._first_chars.isdisjoint(span.text):
            return span
        self._pending.append(span)
        text = self._pending.text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start, self.matched = min(matches)
            shown = self._pending.take(end if self._shows_match else start)
            self._pending = TextSpan("")
            return shown
        start = max(0, len(text) - self._max_length + 1)
        while not any(stop.startswith(text[start:]) for stop in self._stops):
            start += 1
        return self._pending.take(start)

    def ends_with(self, text: str) -> bool:
        """Return whether a stop string is complete once this text follows."""
        return any(stop in self._pending.text + text for stop in self._stops)

    def flush(self) -> TextSpan:
        """Return what is pending, when the content ends without a stop string."""
        return self._pending.take(len(self._pending.text))
