"""Stop strings: where the content of an answer ends.

The log-probabilities of a sequence's tokens, as they are told with its text.

The text side of a sequence: from sampled tokens to text, log-probabilities and its end.

    push(token) → detokenizer → parser (thoughts, calls, content) → stop strings → Delta
                   └▶ guide: what the next token may be

A request's outputs are made in a pool thread, whatever its prompt takes to be read; from then on
they belong to the worker's thread, where each token costs as much as it adds.
"""

from collections import abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from batching.request_queue import WorkItem
from batching.sequence import Sequence
from worker.grammar.constraints import ConstraintState, OutputConstraints
from worker.messages.deltas import Delta, FinishReason, TokenLogprob
from worker.model.sampler import SampledToken, SamplingParams, SamplingState, prompt_logprobs
from worker.text.detokenizer import CONTEXT, TextSpan, Tokens, TokenSpan, Vocabulary
from worker.text.parser import OutputEvent, OutputParser
from worker.vision.multimodal_prompt import MultimodalPrompt


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
        self._pending = TextSpan("")

    def push(self, piece: TextSpan) -> TextSpan:
        """What may be shown now: what could become a stop is pending."""
        if self.matched is not None:
            return TextSpan("")
        if not self._pending.text and self._first_chars.isdisjoint(piece.text):
            return piece
        self._pending.append(piece)
        text = self._pending.text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._pending = self._pending.take(at), TextSpan("")
            return shown
        at = max(0, len(text) - self._longest + 1)
        while not any(stop.startswith(text[at:]) for stop in self._stops):
            at += 1
        return self._pending.take(at)

    def ends_with(self, text: str) -> bool:
        """Whether a stop string is complete once this text comes."""
        return any(stop in self._pending.text + text for stop in self._stops)

    def flush(self) -> TextSpan:
        """What was pending, when the content ends otherwise."""
        return self._pending.take(len(self._pending.text))


class ContentLogprobs:
    """The log-probabilities of the tokens whose text is shown as content, as far as it is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._silent: list[TokenLogprob] = []  # without text: part of a character that is to come
        self._last: Tokens | None = None  # those of the last text
        self._shown: Tokens | None = None  # the last whose text is shown to its end
        self._open: Tokens | None = None  # shown in part
        self._text = ""  # as much of it

    def piece(self, text: str, sampled: SampledToken) -> TextSpan:
        """The text that a token has made certain."""
        self._silent.append(token_logprob(self._vocabulary, sampled, text))
        if not text:
            return TextSpan("")
        tokens, self._silent = tuple(self._silent), []
        self._last = tokens
        return TextSpan(text, [TokenSpan(text, tokens)])

    def rest(self, text: str, sampled: SampledToken) -> TextSpan:
        """Half a character in the end: of the last token without text; if none, of `sampled`."""
        if not self._silent:
            return self.piece(text, sampled)
        *silent, last = self._silent
        self._silent, self._last = [], (*silent, replace(last, text=text))
        return TextSpan(text, [TokenSpan(text, self._last)])

    def show(self, piece: TextSpan) -> Iterator[TokenLogprob]:
        """The tokens whose text is shown with this piece."""
        for span in piece.token_spans:
            if span.tokens is not self._open:
                yield from self.close()
                self._open, self._text = span.tokens, ""
            self._text += span.text
            if span.ends_token:
                self._shown = span.tokens
                yield from self.close()

    def finish(self) -> Iterator[TokenLogprob]:
        """Tokens that never got a text go with the content before them."""
        if self._last is self._shown:
            yield from self._silent

    def close(self) -> Iterator[TokenLogprob]:
        """The token of which a part is shown, if there is one: no more of it will be."""
        if self._open is not None:
            *silent, token = self._open
            yield from silent
            part = self._text != token.text
            yield replace(token, text=self._text, raw=self._text.encode()) if part else token
            self._open = None


def token_logprob(vocabulary: Vocabulary, sampled: SampledToken, text: str) -> TokenLogprob:
    raw = vocabulary.token(sampled.token)[1]
    top = (TokenLogprob(id_, *vocabulary.token(id_), logprob) for id_, logprob in sampled.top)
    return TokenLogprob(sampled.token, text, raw, sampled.logprob, tuple(top), sampled.rank)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready to run, `n` choices of it."""

    ids: list[int]
    params: SamplingParams
    max_tokens: int
    ends: dict[int, int | None]  # ids that end a choice, and what is told as its stop reason
    # Log-probabilities of its tokens are wanted, with so many of the likeliest others.
    prompt_logprobs: int | None = None
    parser: OutputParser | None = (
        None  # at the answer's beginning; None: an answer is nothing but text
    )
    plan: OutputConstraints | None = None  # None: it may be anything
    labels: tuple[int, ...] = ()  # not to be generated: how likely each is to come is wanted
    multimodal: MultimodalPrompt | None = None  # None: there are no pictures in it


class Echo(NamedTuple):
    """The prompt's text, and that of its tokens one by one, where these are asked for."""

    text: str
    texts: list[str]


def make_choices(
    item: WorkItem, prepared: PreparedPrompt, vocabulary: Vocabulary
) -> list["SequenceOutput"]:
    """All of a request's; what they share is made once."""
    sampling = SamplingState(prepared.params, 0, prepared.ids)
    echo: Echo | None = None
    if item.payload.echo or prepared.prompt_logprobs is not None:
        echo = Echo(vocabulary.decode(prepared.ids) if item.payload.echo else "", [])
    if echo and prepared.prompt_logprobs is not None:
        stream = vocabulary.stream([])
        echo.texts.extend(stream.push(token) for token in prepared.ids)
        echo.texts[-1] += stream.flush()
    return [
        SequenceOutput(item, prepared, vocabulary, sampling.sibling(choice), echo)
        for choice in range(item.payload.n)
    ]


def sequence_of(output: Any) -> Sequence:
    """What is scheduled and run for an output, or for a verdict (decisions.py)."""
    prepared: PreparedPrompt = output.prepared
    return Sequence(
        prepared.ids,
        output,
        max_tokens=prepared.max_tokens,
        scores_prompt=prepared.prompt_logprobs is not None,
        scores_end=bool(prepared.labels),
        background=output.background,
        root=output.item.cache_namespace,
        multimodal=prepared.multimodal,
    )


class SequenceOutput:
    def __init__(
        self,
        item: WorkItem,
        prepared: PreparedPrompt,
        vocabulary: Vocabulary,
        sampling: SamplingState,
        echo: Echo | None,
    ) -> None:
        parser = prepared.parser and prepared.parser.fork()
        self.item = item
        self.background: bool = item.payload.background
        self.prepared = prepared
        self.vocabulary = vocabulary
        self.sampling = sampling
        self.number = item.payload.first_choice + sampling.choice  # within the request
        self.count = 0  # output tokens so far
        self.begun = False
        self.ended = False
        self.guide = ConstraintState(prepared.plan, parser) if prepared.plan else None
        self._detokenizer = vocabulary.stream(prepared.ids[-CONTEXT:])
        self._parser = parser  # None: the text is nothing but content
        self._stopping = item.payload.stopping
        self._stops = StopStrings(self._stopping.stop) if self._stopping.stop else None
        asked = prepared.params.logprobs is not None
        self._logprobs = ContentLogprobs(vocabulary) if asked else None
        self._echo = echo
        self._prompt: list[TokenLogprob] = []  # what is known of its tokens, if that is asked for
        if echo and echo.texts:
            first = SampledToken(prepared.ids[0], None, ())
            self._prompt.append(token_logprob(vocabulary, first, echo.texts[0]))
        calls = item.payload.calls
        self._single_call = calls is not None and not calls.parallel
        self._calls = 0  # that have begun
        self._tells_ids = item.payload.token_ids
        self._delta = Delta(self.number)

    # ── the prompt ──

    def score(self, logits: Tensor, positions: range) -> list[SampledToken]:
        """How likely the prompt's tokens after these positions are."""
        targets = self.prepared.ids[positions.start + 1 : positions.stop + 1]
        return prompt_logprobs(logits, targets, self.prepared.prompt_logprobs or 0)

    def score_prompt(self, scores: abc.Sequence[SampledToken]) -> None:
        """How likely the prompt's next tokens are."""
        assert self._echo is not None
        texts = self._echo.texts[len(self._prompt) : len(self._prompt) + len(scores)]
        for score, text in zip(scores, texts, strict=True):
            self._prompt.append(token_logprob(self.vocabulary, score, text))

    def begin(self, cached: int) -> None:
        """The prompt has been run, `cached` of its tokens were known."""
        self.begun = True
        if self.sampling.choice == 0:
            self._delta.prompt_tokens = len(self.prepared.ids)
            self._delta.cached_tokens = cached
        payload = self.item.payload
        if payload.token_ids:
            self._delta.prompt_ids = self.prepared.ids
        if payload.prompt_logprobs is not None:
            self._delta.prompt_logprobs = self._prompt
        if payload.echo and self._echo is not None:
            self._delta.add("content", self._echo.text)
            if payload.sampling.logprobs is not None:
                self._delta.logprobs = list(self._prompt)
        self._prompt = []
        if self.prepared.max_tokens == 0:
            self._end("length", None)

    # ── the output ──

    def extend(self, drafts: abc.Sequence[int], drawn: abc.Sequence[SampledToken]) -> list[int]:
        """Drafts that the model agrees with, and one token after them, join the output."""
        tokens: list[int] = []
        for draft, sampled in zip_longest(drafts, drawn):
            if self.ended or sampled.token < 0:
                break
            self.push(sampled)
            tokens.append(sampled.token)
            if sampled.token != draft or (self.guide and self.guide.turned):
                break
        return tokens

    def push(self, sampled: SampledToken) -> None:
        """The next token of the output."""
        token, parser, guide = sampled.token, self._parser, self.guide
        self.count += 1
        self._delta.tokens += 1
        if self._tells_ids:
            self._delta.token_ids.append(token)
        thinking = parser is not None and parser.phase == "reasoning"
        if guide:
            guide.accept(token)
        if self.sampling.processes_logits:
            self.sampling.accept(token)
        if token in self.prepared.ends and self.count > self._stopping.min_tokens:
            self._finish("stop", self.prepared.ends[token], sampled)
            return
        text = self._detokenizer.push(token)
        last = self.count >= self.prepared.max_tokens
        if last:
            text += self._detokenizer.flush()
        self._parse(self._logprobs.piece(text, sampled) if self._logprobs else TextSpan(text))
        if parser:
            self._delta.reasoning_tokens += thinking or parser.phase == "reasoning"
        if guide:
            guide.follow()
        if self._stopped:
            self._finish("stop", self._matched, sampled)
        elif guide and guide.finished:
            self._finish("stop", None, sampled)
        elif last:
            self._finish("length", None, sampled)

    def take(self) -> Delta:
        """What has come since the last take."""
        delta, self._delta = self._delta, Delta(self.number)
        return delta

    @property
    def _matched(self) -> str | None:
        """The stop string that has come."""
        return self._stops.matched if self._stops else None

    @property
    def _stopped(self) -> bool:
        """Whether a stop string has come. White space that ends the content counts at once, unless
        a call may follow: then, like what may become a mark, when it is certain to be content."""
        if self._stops is None:
            return False
        held = self._parser.trailing_space if self._parser else ""
        counts = self.count > self._stopping.min_tokens
        return self._matched is not None or (counts and self._stops.ends_with(held))

    def _parse(self, piece: TextSpan) -> None:
        if self._parser is None:
            self._content(piece)
        else:
            constrained = self.guide is not None and self.guide.constrains
            self._emit(self._parser.feed(piece, constrained))

    def _emit(self, events: abc.Iterable[OutputEvent]) -> None:
        for kind, piece, name in events:
            self._calls += kind == "call" and name is not None
            if kind == "call" and self._single_call and self._calls > 1:
                continue  # a mark may hold several, where no grammar bounds them
            if kind == "content":
                self._content(piece)
            elif self._matched is None:
                self._end_content()
                if kind == "reasoning_end":
                    self._delta.end_thoughts()
                else:
                    self._delta.add(kind, piece.text, name)

    def _content(self, piece: TextSpan) -> None:
        """Goes out as far as no stop string can come of it."""
        if self._stops and self.count > self._stopping.min_tokens:
            piece = self._stops.push(piece)
        self._show(piece)

    def _end_content(self) -> None:
        """For now, or for good: no stop string comes of what was pending."""
        if self._stops:
            self._show(self._stops.flush())
        if self._logprobs:
            self._delta.logprobs += self._logprobs.close()

    def _show(self, piece: TextSpan) -> None:
        self._delta.add("content", piece.text)
        if self._logprobs:
            self._delta.logprobs += self._logprobs.show(piece)

    def _finish(self, reason: FinishReason, stop: str | int | None, sampled: SampledToken) -> None:
        """The text ends with `sampled`: unless by a stop string, what was pending for one, for
        a mark or as half a character comes, and may have one in it."""
        if self._matched is None:
            if rest := self._detokenizer.flush():
                self._parse(
                    self._logprobs.rest(rest, sampled) if self._logprobs else TextSpan(rest)
                )
            if self._parser:
                self._emit(self._parser.finish())
        if self._matched is not None:
            reason, stop = "stop", self._matched
        self._end_content()
        if self._logprobs:
            self._delta.logprobs += self._logprobs.finish()
        self._end(reason, stop)

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        delta = self._delta
        called = reason == "stop" and self._parser is not None and self._parser.calls_started
        delta.finish_reason = "tool_calls" if called else reason
        delta.stop_reason = stop
        self.ended = True
