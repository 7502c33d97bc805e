"""One continuation of a prompt: from sampled tokens to text, log-probabilities and its end.

The same for the paged engine and the static fallback. A request's choices are made in a pool
thread, whatever its prompt takes to be read; from then on they belong to the worker's thread,
where each token costs as much as it adds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batching.request_queue import WorkItem
from worker.deltas import Delta, FinishReason, TokenLogprob
from worker.generation.request import Prepared
from worker.grammar.guide import Guide
from worker.model.sampler import Draws, Row, SampledToken
from worker.text.detokenizer import StopStrings, Vocabulary
from worker.text.parser import Reader

# Some decoders look back: the first token's text depends on the prompt's end.
CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text; of its tokens one by one, if their log-probabilities are asked for."""

    text: str
    texts: tuple[str, ...]


def make_choices(
    item: WorkItem, prepared: Prepared, vocabulary: Vocabulary
) -> list["SequenceOutput"]:
    """All of a request's; what they share is made once."""
    reader = prepared.parser
    draws = Draws(prepared.params, 0, prepared.ids)
    echo = _echo(prepared, vocabulary) if prepared.echo else None
    return [
        SequenceOutput(
            item, prepared, vocabulary, draws.sibling(draw), reader and reader.sibling(), echo
        )
        for draw in range(item.payload.n)
    ]


def _echo(prepared: Prepared, vocabulary: Vocabulary) -> Echo:
    texts: list[str] = []
    if prepared.wants_prompt_logprobs:
        stream = vocabulary.stream([])
        texts = [stream.push(token) for token in prepared.ids]
        texts[-1] += stream.flush()
    return Echo(vocabulary.text_of(prepared.ids), tuple(texts))


class SequenceOutput:
    def __init__(
        self,
        item: WorkItem,
        prepared: Prepared,
        vocabulary: Vocabulary,
        draws: Draws,
        reader: Reader | None,
        echo: Echo | None,
    ) -> None:
        self.item = item
        self.prepared = prepared
        self.vocabulary = vocabulary
        self.draws = draws
        self.number = item.payload.first_choice + draws.choice  # within the request
        self.count = 0  # output tokens so far
        self.begun = False
        self.ended = False
        self._text = vocabulary.stream(prepared.ids[-CONTEXT:])
        self._stops = StopStrings(item.payload.stopping.stop)
        self._reader = reader
        self.guide = Guide(prepared.plan, reader) if prepared.plan else None
        self._echo = echo
        self._prompt: list[TokenLogprob] = []  # what is known of its tokens, if that is asked for
        if echo and echo.texts:
            first = SampledToken(prepared.ids[0], None, ())
            self._prompt.append(token_logprob(vocabulary, first, echo.texts[0]))
        self._min_tokens = item.payload.stopping.min_tokens
        self._delta: Delta | None = None
        self._read = 0  # characters of the text so far
        self._held: deque[tuple[int, str]] = deque()  # content that may become a stop string
        self._scores = Scores()

    def row(self, drafted: tuple[int, ...] = ()) -> Row:
        return Row(self.draws, self.count + len(drafted), drafted)

    @property
    def scored(self) -> int:
        """Tokens of the prompt whose log-probabilities are known; the first has none."""
        return max(0, len(self._prompt) - 1)

    def score_prompt(self, scores: Sequence[SampledToken]) -> None:
        """How likely the prompt's next tokens are."""
        if scores:
            assert self._echo is not None
            texts = self._echo.texts[len(self._prompt) : len(self._prompt) + len(scores)]
            for score, text in zip(scores, texts, strict=True):
                self._prompt.append(token_logprob(self.vocabulary, score, text))

    def begin(self, cached: int) -> None:
        """The prompt has been run: what there is to tell about it."""
        self.begun = True
        delta = self._open()
        if self.draws.choice == 0:
            delta.prompt_tokens = len(self.prepared.ids)
            delta.cached_tokens = cached
        if self._echo is not None:
            delta.add("content", self._echo.text)
            delta.logprobs, self._prompt = self._prompt, []
        if self.prepared.max_tokens == 0:
            self._end("length", None)

    def accept(self, sampled: SampledToken) -> None:
        """The next token of the output."""
        token = sampled.token
        self.count += 1
        delta = self._open()
        delta.tokens += 1
        thinking = self._thinking
        if self.guide:
            self.guide.accept(token)
        self.draws.accept(token)
        if token in self.prepared.ends and self.count > self._min_tokens:
            self._flush(sampled)
            self._end("stop", self.prepared.ends[token])
            return
        self._show(self._text.push(token), sampled)
        delta.reasoning_tokens += thinking or self._thinking
        if self.guide:
            self.guide.follow()
        if self._stops.matched is not None:
            self._end("stop", self._stops.matched)
        elif self.guide and self.guide.finished:
            self._flush(sampled)
            self._end("stop", None)
        elif self.count >= self.prepared.max_tokens:
            self._flush(sampled)
            self._end("length", None)

    def take(self) -> Delta | None:
        """What has come since the last take."""
        delta, self._delta = self._delta, None
        return delta

    @property
    def _thinking(self) -> bool:
        return self._reader is not None and self._reader.thinking

    def _open(self) -> Delta:
        if self._delta is None:
            self._delta = Delta(self.number)
        return self._delta

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        delta = self._open()
        called = reason == "stop" and self._reader is not None and self._reader.calls_begun
        delta.finish_reason = "tool_calls" if called else reason
        delta.stop_reason = stop
        self.ended = True

    def _show(self, text: str, sampled: SampledToken) -> None:
        if sampled.logprob is not None:
            self._scores.add(token_logprob(self.vocabulary, sampled, text))
        self._tell(text)

    def _tell(self, text: str, last: bool = False) -> None:
        """What the text is goes out, as far as that is certain, with the log-probabilities of
        what is content. Stop strings are looked for in content only."""
        start, self._read = self._read, self._read + len(text)
        told = self._read
        if self._reader is None:
            self._say(text, start)
        else:
            found = self._reader.push(text)
            found += self._reader.flush() if last else []
            for each in found:
                if self._stops.matched is not None:
                    break
                if each.kind == "content":
                    self._say(each.text, each.at)
                else:
                    self._say_held()
                    self._open().add(each.kind, each.text, each.name)
            told = self._reader.at
        if last or self._stops.matched is not None:
            self._say_held()
            self._open().logprobs += self._scores.take(None)
        else:
            told = self._held[0][0] if self._held else told
            self._open().logprobs += self._scores.take(told)

    def _say(self, text: str, at: int) -> None:
        """Content that stands at `at`: a stop string may hold some of it back."""
        if self._stops.matched is not None or not text:
            return
        self._held.append((at, text))
        early = self.count <= self._min_tokens
        self._let_out(text if early else self._stops.push(text))

    def _say_held(self) -> None:
        """No stop string comes of what is held back."""
        if self._stops.matched is None:
            self._let_out(self._stops.flush())

    def _let_out(self, shown: str) -> None:
        self._open().add("content", shown)
        left = len(shown)
        while self._held and left:
            at, text = self._held.popleft()
            taken = min(left, len(text))
            self._scores.content(at, at + taken)
            left -= taken
            if taken < len(text):
                self._held.appendleft((at + taken, text[taken:]))

    def _flush(self, sampled: SampledToken) -> None:
        """The text ends here, with `sampled`: what was held back for a stop string, a mark or
        half a character comes. The latter is the last token's that is shown."""
        rest = self._text.flush()
        if rest and sampled.logprob is not None:
            if not self._scores.waiting:
                told = self._open().logprobs
                last = told.pop() if told else token_logprob(self.vocabulary, sampled, "")
                self._scores.take_back(last)
            self._scores.lengthen(rest)
        self._tell(rest, last=True)


class Scores:
    """Log-probabilities of tokens until it is known whether their text is content."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # with where its text ends
        self._end = 0
        self._content: deque[tuple[int, int]] = deque()  # stretches of it, in order

    def add(self, entry: TokenLogprob) -> None:
        self._end += len(entry.text)
        self._waiting.append((self._end, entry))

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def take_back(self, entry: TokenLogprob) -> None:
        self._waiting.append((self._end, entry))

    def lengthen(self, text: str) -> None:
        """Text that the last token turns out to have as well."""
        self._end += len(text)
        last = self._waiting.pop()[1]
        self._waiting.append((self._end, replace(last, text=last.text + text)))

    def content(self, start: int, end: int) -> None:
        if self._content and self._content[-1][1] == start:
            start = self._content.pop()[0]
        if start < end:
            self._content.append((start, end))

    def take(self, told: int | None) -> list[TokenLogprob]:
        """The entries of content, of what is decided: all text up to `told`; None: all of it.

        A token without text, part of a character, goes with the one that completes it.
        """
        taken: list[TokenLogprob] = []
        silent: list[TokenLogprob] = []
        while self._waiting:
            if told is not None and (self._waiting[0][0] > told or not self._complete(told)):
                break
            end, entry = self._waiting.popleft()
            if not entry.text:
                silent.append(entry)
                continue
            if shown := self._content_of(entry.text, end - len(entry.text)):
                whole = shown == entry.text
                taken += silent
                taken.append(entry if whole else replace(entry, text=shown, raw=shown.encode()))
            silent = []
        if told is None and (not self._content or self._content[-1][1] >= self._end):
            taken += silent
        return taken

    def _complete(self, told: int) -> bool:
        """Whether the next entry that has a text is decided."""
        return next((end <= told for end, entry in self._waiting if entry.text), False)

    def _content_of(self, text: str, start: int) -> str:
        """How much of a text that begins at `start` is content."""
        end = start + len(text)
        while self._content and self._content[0][1] <= start:
            self._content.popleft()
        stretches = [(max(a, start), min(b, end)) for a, b in self._content if a < end]
        return "".join(text[a - start : b - start] for a, b in stretches)


def token_logprob(vocabulary: Vocabulary, sampled: SampledToken, text: str) -> TokenLogprob:
    _, raw = vocabulary.token(sampled.token)
    top = []
    for token_id, logprob in sampled.top:
        shown, bytes_ = vocabulary.token(token_id)
        top.append(TokenLogprob(token_id, shown, bytes_, logprob))
    return TokenLogprob(sampled.token, text, raw, sampled.logprob, tuple(top))
