"""The text side of a sequence: from sampled tokens to text, log-probabilities and an end.

    push(token) → unread tokens → detokenizer → parser (reasoning, tool calls, content)
                                      → stop strings → Delta
    push(token) → constraints: the tokens that may come next

The outputs of a request are created in a pool thread, which reads the whole prompt. From then on
tokens are pushed on the worker's thread. The text of an output that stop strings or a grammar may
end, that has tools or log-probabilities, is written there, token by token. Other text is written
where it is read, for all unread tokens at once. Sampling is in worker/model/sampler.py; which
sequences run, in batching/scheduler.py.
"""

import copy
from collections import abc
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from batching.request_queue import WorkItem
from batching.sequence import Chunk, PrefixedTokens, Reads, TokenList
from worker.error_classification import failure_of
from worker.messages.deltas import Delta, FinishReason, TokenLogprob
from worker.messages.generation import GenerationInput
from worker.model.sampler import SampledToken, SamplingParams, SamplingState
from worker.text.detokenizer import CONTEXT, TextSpan, Vocabulary
from worker.text.parser import OutputEvent, OutputParser

if TYPE_CHECKING:
    from worker.engines.generation.content_logprobs import ContentLogprobs
    from worker.grammar.constraints import ConstraintState, OutputConstraints
    from worker.text.stop_strings import StopStrings
    from worker.vision.multimodal_prompt import MultimodalPrompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready to run, shared by a request's choices."""

    ids: TokenList | PrefixedTokens
    params: SamplingParams
    max_tokens: int  # of the output
    stop_token_ids: dict[int, int | None]  # each with the stop reason that the client gets
    stop: tuple[str, ...] = ()  # the checkpoint's stop strings, besides the request's
    # None: log-probabilities of the prompt's tokens are not requested; else with the top k of each
    prompt_logprobs: int | None = None
    # at the start of a response; None: all of its text is content
    parser: OutputParser | None = None
    constraints: "OutputConstraints | None" = None
    multimodal: "MultimodalPrompt | None" = None  # None: the prompt has no media
    history_len: int = 0  # leading tokens that the conversation's next prompt repeats; 0: unknown


class Echo(NamedTuple):
    """A prompt's text to return with the output."""

    text: str
    token_texts: list[str]  # one for each token, if their log-probabilities are requested


def create_outputs(
    item: WorkItem, request: GenerationInput, prepared: PreparedPrompt, vocabulary: Vocabulary
) -> list["SequenceOutput"]:
    """Return the outputs of a request's choices; they share what is derived from the prompt."""
    sampling = SamplingState(prepared.params, 0, prepared.ids)
    echo: Echo | None = None
    if request.echo or prepared.prompt_logprobs is not None:
        echo = Echo(vocabulary.decode(prepared.ids) if request.echo else "", [])
    if echo and prepared.prompt_logprobs is not None:
        stream = vocabulary.stream([])
        echo.token_texts.extend(stream.push(token) for token in prepared.ids)
        echo.token_texts[-1] += stream.flush()
    return [
        SequenceOutput(item, request, prepared, vocabulary, sampling.fork(choice), echo)
        for choice in range(request.n)
    ]


class PromptOutput:
    """The output of a prompt that a head reads and that nothing follows. Has the interface of a
    SequenceOutput."""

    reads: Reads = "last"
    unread = 1

    def __init__(self, item: WorkItem, ids: TokenList | PrefixedTokens, number: int = 0) -> None:
        self.item = item
        self.choice = number
        self.request: Any = item.payload  # of any kind
        self.priority = item.owner.priority
        self.prepared = PreparedPrompt(ids, SamplingParams(), 0, {})
        self.started = False
        self.finished = False
        self._delta = Delta(number)

    def score(self, rows: Tensor, chunk: Chunk) -> list[SampledToken]:
        """Apply the head to the logits of the positions that it reads, or to the states of a model
        without logits."""
        raise NotImplementedError

    def add_prompt_scores(self, scores: abc.Sequence[SampledToken]) -> None:
        """Keep the scores."""

    def start(self, cached_tokens: int) -> None:
        """Record that the prompt has run. `cached_tokens`: of it, in the prefix cache."""
        self._delta.prompt_tokens, self._delta.cached_tokens = len(self.prepared.ids), cached_tokens
        self._delta.finish_reason = "stop"
        self.started = self.finished = True

    def take_delta(self) -> Delta:
        return self._delta


class SequenceOutput:
    """The output of one choice. `started`: its prompt has run. `finished`: its end is known."""

    reads: Reads = ""

    def __init__(
        self,
        item: WorkItem,
        request: GenerationInput,
        prepared: PreparedPrompt,
        vocabulary: Vocabulary,
        sampling: SamplingState,
        echo: Echo | None,
    ) -> None:
        parser = prepared.parser and prepared.parser.fork()
        self.item = item
        self.priority = item.owner.priority
        self.prepared = prepared
        self.sampling = sampling
        self.choice = request.first_choice + sampling.choice  # within the request
        self.tokens = 0  # of the output so far
        self.started = False
        self.finished = False
        self.constraints: ConstraintState | None = None
        if prepared.constraints:
            self.constraints = prepared.constraints.start(parser)
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.stream(prepared.ids[-CONTEXT:], request.skips_special)
        self._parser = parser  # None: all of the text is content
        self.request = request
        self._min_tokens = request.stopping.min_tokens or 0
        stop = (*request.stopping.stop, *prepared.stop)
        self._stop_strings: StopStrings | None = None
        if stop:
            from worker.text import stop_strings

            self._stop_strings = stop_strings.StopStrings(stop, request.stopping.includes_stop)
        self._logprobs: ContentLogprobs | None = None
        if prepared.params.logprobs is not None:
            from worker.engines.generation import content_logprobs

            self._logprobs = content_logprobs.ContentLogprobs(vocabulary)
        self._echo = echo
        self._prompt_logprobs: list[TokenLogprob] = []  # of its leading tokens, those scored
        if echo and echo.token_texts:
            self._add_prompt_logprobs([SampledToken(prepared.ids[0], None, ())])
        self._single_call = request.tool_policy is not None and not request.tool_policy.parallel
        self._calls = 0  # tool calls that have started
        # The text may end the output, takes long, or is the prompt's: it is written at once.
        may_end, takes_long = stop or prepared.constraints, request.tool_policy or self._logprobs
        self._writes_at_once = bool(may_end or takes_long or not prepared.max_tokens)
        self._written = 0  # tokens whose text is written
        self._delta = Delta(self.choice)  # of the thread that writes
        # The worker's thread appends, that of the stream takes: tokens, or deltas that are written.
        self._unread_tokens: list[SampledToken] = []
        self._unread_deltas: list[Delta] = []

    # ── the prompt ──

    def score(self, logits: Tensor, chunk: Chunk) -> list[SampledToken]:
        """Score the prompt's tokens that follow the chunk's positions, by their logits [P, V]."""
        from worker.model.logprobs import prompt_logprobs

        positions = chunk.to_score
        targets = self.prepared.ids[positions.start + 1 : positions.stop + 1]
        return prompt_logprobs(logits, targets, self.prepared.prompt_logprobs or 0)

    def add_prompt_scores(self, scores: abc.Sequence[SampledToken]) -> None:
        """Add the scores of the prompt's next tokens."""
        self._add_prompt_logprobs(scores)

    def _add_prompt_logprobs(self, scores: abc.Sequence[SampledToken]) -> None:
        from worker.engines.generation.content_logprobs import token_logprob

        assert self._echo is not None
        scored = len(self._prompt_logprobs)
        texts = self._echo.token_texts[scored : scored + len(scores)]
        for score, text in zip(scores, texts, strict=True):
            self._prompt_logprobs.append(token_logprob(self._vocabulary, score, text))

    def start(self, cached_tokens: int) -> None:
        """Record that the prompt has run. `cached_tokens`: of it, in the prefix cache."""
        self.started = True
        if self.sampling.choice == 0:
            self._delta.prompt_tokens = len(self.prepared.ids)
            self._delta.cached_tokens = cached_tokens
            if self.prepared.multimodal:
                self._delta.audio_tokens = self.prepared.multimodal.audio_tokens
        request = self.request
        if request.token_ids:
            self._delta.prompt_ids = self.prepared.ids[:]
        if request.prompt_logprobs is not None:
            self._delta.prompt_logprobs = self._prompt_logprobs
        if request.echo and self._echo is not None:
            self._delta.add("content", self._echo.text)
            if request.sampling.logprobs is not None:
                self._delta.logprobs = list(self._prompt_logprobs)
        self._prompt_logprobs = []
        if self.prepared.max_tokens == 0:
            self._set_finished("length", None)
            self._unread_deltas.append(self._delta)
            self.finished = True

    # ── the output ──

    def extend(self, drafts: abc.Sequence[int], sampled: abc.Sequence[SampledToken]) -> list[int]:
        """Append the drafts that the model agrees with and the token after them; return the tokens
        that were appended. `sampled`: the token of each draft's position, and of the next one."""
        tokens: list[int] = []
        for draft, sample in zip_longest(drafts, sampled):
            if self.finished or sample.token < 0:
                break
            self.push(sample)
            tokens.append(sample.token)
            if sample.token != draft or (self.constraints and self.constraints.drafts_stale):
                break
        return tokens

    def push(self, sampled: SampledToken) -> None:
        self.tokens += 1
        if self.sampling.processes_logits:
            self.sampling.accept(sampled.token)
        if self._writes_at_once:
            self._write(sampled)
            delta, self._delta = self._delta, Delta(self.choice)
            self._unread_deltas.append(delta)
            self.finished = delta.finish_reason is not None
        else:
            self._unread_tokens.append(sampled)
            self.finished = self._ends(sampled.token, self.tokens)

    def _ends(self, token: int, number: int) -> bool:
        """Return whether a token ends the output, as that one of so many."""
        if number >= self.prepared.max_tokens:
            return True
        return token in self.prepared.stop_token_ids and number > self._min_tokens

    @property
    def unread(self) -> int:
        """The number of tokens pushed since the last call of `take_delta`."""
        return len(self._unread_tokens) + len(self._unread_deltas)

    def take_delta(self) -> Delta:
        """Return what was added since the last call, from the thread of the stream: the worker may
        push meanwhile. Raises the failure of writing the text."""
        if self._writes_at_once:
            deltas = take_all(self._unread_deltas)
            delta = deltas[0] if deltas else Delta(self.choice)
            for later in deltas[1:]:
                delta.merge(later)
            return delta
        try:
            self._write_all(take_all(self._unread_tokens))
        except BaseException as error:  # a panic in a Rust library is not an Exception
            raise failure_of(error) from error
        delta, self._delta = self._delta, Delta(self.choice)
        return delta

    # ── text ──

    def _write_all(self, sampled: list[SampledToken]) -> None:
        """Write the text of tokens. Those of plain text, before the end, are decoded together."""
        plain = sampled
        if sampled and self._ends(sampled[-1].token, self._written + len(sampled)):
            plain = sampled[:-1]
        if len(plain) < 2 or not self._write_plain([s.token for s in plain]):
            plain = []
        for token in sampled[len(plain) :]:
            self._write(token)

    def _write_plain(self, tokens: list[int]) -> bool:
        """Write the text of tokens, unless a delimiter may begin in it."""
        parser, detokenizer = self._parser, self._detokenizer
        if parser:
            if not parser.is_plain(""):
                return False
            detokenizer = copy.copy(detokenizer)
        text = detokenizer.push_all(tokens)
        if parser and not parser.is_plain(text):
            return False
        self._detokenizer = detokenizer
        self._written += len(tokens)
        self._delta.tokens += len(tokens)
        if self.request.token_ids:
            self._delta.token_ids += tokens
        self._parse(TextSpan(text))
        if parser and parser.phase == "reasoning":
            self._delta.reasoning_tokens += len(tokens)
        return True

    def _write(self, sampled: SampledToken) -> None:
        token, parser, constraints = sampled.token, self._parser, self.constraints
        self._written += 1
        self._delta.tokens += 1
        if self.request.token_ids:
            self._delta.token_ids.append(token)
        reasoning = parser is not None and parser.phase == "reasoning"
        if constraints:
            constraints.accept_token(token)
        if token in self.prepared.stop_token_ids and self._written > self._min_tokens:
            if self.request.stopping.includes_stop:
                self._parse(self._span(self._detokenizer.push(token), sampled))
            self._finish("stop", self.prepared.stop_token_ids[token], sampled)
            return
        text = self._detokenizer.push(token)
        last = self._written >= self.prepared.max_tokens
        if last:
            text += self._detokenizer.flush(cut=True)
        self._parse(self._span(text, sampled))
        if parser:
            self._delta.reasoning_tokens += reasoning or parser.phase == "reasoning"
        if constraints:
            constraints.update_phase(text)
        if self._stop_string_complete:
            self._finish("stop", self._matched, sampled)
        elif constraints and constraints.finished:
            self._finish("stop", None, sampled)
        elif last:
            self._finish("length", None, sampled)

    @property
    def _matched(self) -> str | None:
        """The stop string in the content, if one is complete."""
        return self._stop_strings.matched if self._stop_strings else None

    @property
    def _stop_string_complete(self) -> bool:
        """Whether a stop string is in the content, or will be once the parser releases its pending
        white space."""
        if self._stop_strings is None:
            return False
        pending = self._parser.trailing_space if self._parser else ""
        counts = self._written > self._min_tokens
        return self._matched is not None or (counts and self._stop_strings.ends_with(pending))

    def _span(self, text: str, sampled: SampledToken) -> TextSpan:
        return self._logprobs.span(text, sampled) if self._logprobs else TextSpan(text)

    def _parse(self, span: TextSpan) -> None:
        if self._parser is None:
            self._add_content(span)
        else:
            constrained = self.constraints is not None and self.constraints.is_constrained
            events = self._parser.feed(span, constrained)
            if self.constraints and self.constraints.begins_wrong_call():
                events = self._parser.refuse_call(events)
            self._handle(events)

    def _handle(self, events: abc.Iterable[OutputEvent]) -> None:
        for kind, span, name in events:
            self._calls += kind == "call" and name is not None
            if kind == "call" and self._single_call and self._calls > 1:
                continue  # without a grammar, a model may write several within its delimiters
            if kind == "content":
                self._add_content(span)
            elif self._matched is None:
                self._end_content()
                if kind == "reasoning_end":
                    self._delta.end_reasoning()
                else:
                    self._delta.add(kind, span.text, name)

    def _add_content(self, span: TextSpan) -> None:
        """Show the content, except for an end that may become a stop string."""
        if self._stop_strings and self._written > self._min_tokens:
            span = self._stop_strings.push(span)
        self._show(span)

    def _end_content(self) -> None:
        """Show the pending text: the content ends here, or is interrupted."""
        if self._stop_strings:
            self._show(self._stop_strings.flush())
        if self._logprobs:
            self._delta.logprobs += self._logprobs.close()

    def _show(self, span: TextSpan) -> None:
        self._delta.add("content", span.text)
        if self._logprobs:
            self._delta.logprobs += self._logprobs.show(span)

    def _finish(self, reason: FinishReason, stop: str | int | None, sampled: SampledToken) -> None:
        """End the text with `sampled`. Unless a stop string ended it, pending text (that may become
        a stop string or a delimiter) is released, and may complete a stop string."""
        if self._matched is None:
            if rest := self._detokenizer.flush(cut=True):
                self._parse(
                    self._logprobs.rest(rest, sampled) if self._logprobs else TextSpan(rest)
                )
            if self._parser:
                self._handle(self._parser.finish())
        if self._matched is not None:
            reason, stop = "stop", self._matched
        self._end_content()
        if self._logprobs:
            self._delta.logprobs += self._logprobs.finish()
        self._set_finished(reason, stop)

    def _set_finished(self, reason: FinishReason, stop: str | int | None) -> None:
        called = reason == "stop" and self._parser is not None and self._parser.calls_started
        self._delta.finish_reason = "tool_calls" if called else reason
        self._delta.stop_reason = stop


def take_all(unread: list[T]) -> list[T]:
    """Empty a list to which the worker's thread may append meanwhile, and return its items: the
    worker reports what it appends to an empty list, not what follows an unread item."""
    taken: list[T] = []
    while count := len(unread):
        taken += unread[:count]
        del unread[:count]
    return taken
