"""One continuation of a prompt: from sampled tokens to text, log-probabilities and its end.

The same for the paged engine and the static fallback. On the worker's thread.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from batching.request_queue import WorkItem
from worker.detokenize import StopStrings, Vocabulary
from worker.prompts import Prepared
from worker.sampling import Choice as Sampled
from worker.sampling import Draws, Row
from worker.streams import Delta, FinishReason, TokenLogprob

# Some decoders look back: the first token's text depends on the prompt's end.
CONTEXT = 8


class Choice:
    def __init__(self, item: WorkItem, number: int, draw: int, vocabulary: Vocabulary) -> None:
        """`number` is the choice's within the request, `draw` within its prompt."""
        prepared: Prepared = item.prepared
        self.item = item
        self.number = number
        self.draw = draw
        self.prepared = prepared
        self.vocabulary = vocabulary
        self.draws = Draws(prepared.params, draw, prepared.ids)
        self.count = 0  # output tokens so far
        self.begun = False
        self.ended = False
        self._text = vocabulary.stream(prepared.ids[-CONTEXT:])
        self._stops = StopStrings(item.payload.stopping.stop)
        self._min_tokens = item.payload.stopping.min_tokens
        self._delta: Delta | None = None
        # log-probabilities of tokens whose text is held back, and where that text ends
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        self._pushed = self._shown = 0  # characters

    def row(self, drafted: tuple[int, ...] = ()) -> Row:
        return Row(self.draws, self.count + len(drafted), drafted)

    def begin(self, cached: int, prompt_entries: Sequence[TokenLogprob] = ()) -> None:
        """The prompt has been run: what there is to tell about it."""
        self.begun = True
        delta = self._open()
        if self.draw == 0:
            delta.prompt_tokens = len(self.prepared.ids)
            delta.cached_tokens = cached
        if self.prepared.echo:
            delta.add("content", self.vocabulary.text_of(self.prepared.ids))
            delta.logprobs += prompt_entries
        if self.prepared.max_tokens == 0:
            self._end("length", None)

    def accept(self, sampled: Sampled) -> None:
        """The next token of the output."""
        token = sampled.token
        self.draws.accept(token)
        self.count += 1
        delta = self._open()
        delta.tokens += 1
        if token in self.prepared.ends and self.count > self._min_tokens:
            self._flush(sampled)
            self._end("stop", self.prepared.ends[token])
            return
        self._show(self._text.push(token), sampled)
        if self._stops.matched is not None:
            self._end("stop", self._stops.matched)
        elif self.count >= self.prepared.max_tokens:
            self._flush(sampled)
            self._end("length", None)

    def take(self) -> Delta | None:
        """What has come since the last take."""
        delta, self._delta = self._delta, None
        return delta

    def _open(self) -> Delta:
        if self._delta is None:
            self._delta = Delta(self.number)
        return self._delta

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        delta = self._open()
        delta.finish_reason = reason
        delta.stop_reason = stop
        self.ended = True

    def _show(self, text: str, sampled: Sampled | None = None) -> None:
        self._pushed += len(text)
        if sampled is not None and sampled.logprob is not None:
            entry = token_logprob(self.vocabulary, sampled, text)
            self._held.append((self._pushed, entry))
        early = self.count <= self._min_tokens
        self._add(text if early else self._stops.push(text))

    def _add(self, shown: str) -> None:
        delta = self._open()
        delta.add("content", shown)
        self._shown += len(shown)
        while self._held and self._held[0][0] <= self._shown:
            if self._stops.matched is not None and self._held[0][0] == self._shown:
                break  # nothing of its text is shown, or all: decided below
            delta.logprobs.append(self._held.popleft()[1])
        if self._stops.matched is not None:
            self._cut(delta)

    def _cut(self, delta: Delta) -> None:
        """A stop string ends the text in the middle of what is held: keep what is shown."""
        for end, entry in self._held:
            begin = end - len(entry.text)
            if entry.text and begin < self._shown:
                kept = entry.text[: self._shown - begin]
                whole = end <= self._shown
                delta.logprobs.append(
                    entry if whole else replace(entry, text=kept, raw=kept.encode())
                )
        self._held.clear()

    def _flush(self, sampled: Sampled) -> None:
        """The text ends here, with `sampled`: what was held back for a stop string or a half
        character comes. The latter is the last token's that is shown."""
        rest = self._text.flush()
        delta = self._open()
        delta.add("content", self._stops.push(rest) + self._stops.flush())
        delta.logprobs += [entry for _, entry in self._held]
        self._held.clear()
        if rest and sampled.logprob is not None:
            entries = delta.logprobs
            last = entries.pop() if entries else token_logprob(self.vocabulary, sampled, "")
            entries.append(replace(last, text=last.text + rest))


def token_logprob(vocabulary: Vocabulary, sampled: Sampled, text: str) -> TokenLogprob:
    _, raw = vocabulary.token(sampled.token)
    top = []
    for token_id, logprob in sampled.top:
        shown, bytes_ = vocabulary.token(token_id)
        top.append(TokenLogprob(token_id, shown, bytes_, logprob))
    return TokenLogprob(sampled.token, text, raw, sampled.logprob, tuple(top))
