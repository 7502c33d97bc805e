"""The data of a step: sequences, their chunks, and the batch that a model runner computes.

The scheduler (scheduler.py) cuts sequences into chunks. A batch lays the chunks out once, for the
model runner and the sampler. No tensors and no text: output.py has a sequence's text.
"""

from array import array
from collections import abc
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

from batching.block_pool import SHARED_NAMESPACE, BlockKey, BlockTable, Content
from batching.fair_share import NO_OWNER, Priority, WorkOwner
from batching.state_pool import StateSegment

# A token that the step in flight is to sample has a placeholder in its sequence, by which the next
# step is scheduled already: -1 - its row. A model runner puts the token in its place on the device.


class TokenIds(array):  # type: ignore[type-arg]  # not subscriptable before Python 3.12
    """Token ids as an array, of which a slice is a list. Garbage collection visits each element of
    a list, and thousands of long prompts may wait."""

    __slots__ = ()

    def __new__(cls, ids: abc.Iterable[int] = ()) -> Self:
        return super().__new__(cls, "i", ids)  # type: ignore[return-value]

    def copy(self) -> "TokenIds":
        return TokenIds(self)

    def __getitem__(self, index: Any) -> Any:
        value = array.__getitem__(self, index)  # each step gets a token of each sequence
        return value.tolist() if index.__class__ is slice else value


TokenList: TypeAlias = TokenIds | list[int]
# How the model runs: with torch's operations alone, eager with native ones, or as fast as it can.
Form: TypeAlias = Literal["torch", "eager", ""]
# The positions of a prompt whose logits or states a head reads; nothing is generated then.
Reads: TypeAlias = Literal["last", "all", ""]


class PrefixedTokens(abc.Sequence[int]):
    """Immutable prompt: a prefix shared with other prompts, plus its own suffix."""

    __slots__ = ("own", "shared")

    def __init__(self, shared: abc.Sequence[int], own: abc.Sequence[int]) -> None:
        self.shared, self.own = shared, TokenIds(own)

    def copy(self) -> "PrefixedTokens":
        return self

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)

    def __getitem__(self, index: int | slice) -> Any:
        before = len(self.shared)
        if not isinstance(index, slice):
            index = range(len(self))[index]
            return self.shared[index] if index < before else self.own[index - before]
        start, stop, _ = index.indices(len(self))
        own = self.own[max(0, start - before) : max(0, stop - before)]
        return [*self.shared[start:stop], *own]


@dataclass(eq=False, slots=True)
class MultimodalInputs:
    """The multimodal inputs of a prompt besides its token ids, shared by a request's choices. They
    are complete once the media are encoded (worker/vision/encoder_scheduler.py).

    `ready`: the prompt may run. `contents`: of the prompt, one for each position.
    `bidirectional_spans`: ranges [start, stop) of positions that attend to each other, and so must
    run in one step. All media and such spans lie before `end`. `shift`: position id minus index,
    from `end` on."""

    ready: bool = False
    contents: abc.Sequence[Content] = ()
    bidirectional_spans: abc.Sequence[tuple[int, int]] = ()
    end: int = 0
    shift: int = 0

    def align_chunk(self, start: int, count: int) -> int:
        """Return how many tokens from `start` on may run together: `count`, fewer or a few more,
        so that no such span is divided."""
        for first, stop in self.bidirectional_spans:
            if first < start + count < stop:
                return (first if first > start else stop) - start
        return count


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its continuation: the tokens so far, and how many of them are computed."""

    # The prompt's, shared by a request's choices until each is admitted; PrefixedTokens only where
    # nothing is generated. The last may be a placeholder.
    tokens: TokenList | PrefixedTokens
    _: KW_ONLY
    max_tokens: int = 1  # of the output; 0: only the prompt is run
    scores_prompt: bool = False  # log-probabilities of the prompt: no cached prefix is reused
    reads: Reads = ""
    priority: Priority = Priority.INTERACTIVE
    owner: WorkOwner = NO_OWNER
    cache_namespace: bytes = SHARED_NAMESPACE  # prefixes are shared within it
    multimodal: MultimodalInputs | None = None  # None: the prompt is text
    form: Form = ""  # of the model: it ends on the one that it began with, as they round otherwise
    adapter: object = None  # weights that the model runner adds to the model's
    # leading prompt tokens that the conversation's next prompt repeats; 0: unknown
    history_len: int = 0
    prompt_len: int = field(init=False)
    scored: int = 0  # leading tokens whose successor has been scored
    number: int = -1  # order of arrival; -1: not scheduled
    table: BlockTable | None = None  # None: waiting
    paused: bool = False  # waiting, with its blocks
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int | None = None  # prompt tokens found in the prefix cache at first admission
    pending_prefix: BlockKey | None = None  # the last block of its prefix that is being computed
    disk_key: bytes = b""  # of its empty prefix among those on disk; empty: they are not looked up
    reading: bool = False  # waiting: a part of its prefix is read from disk
    branch: int = 0  # leading tokens in blocks, after which no state of recurrent layers was kept
    has_placeholder: bool = False  # the last token is one

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Tokens that the model has yet to run; 0 while the last step of the sequence runs."""
        return len(self.tokens) - self.computed

    def drop_placeholder(self) -> None:
        if self.has_placeholder:
            cast(TokenList, self.tokens).pop()
            self.has_placeholder = False

    def extend(self, sampled: abc.Sequence[int]) -> None:
        """Append sampled tokens, the first of them instead of a placeholder."""
        tokens: Any = self.tokens
        if self.has_placeholder:
            tokens[-1], sampled, self.has_placeholder = sampled[0], sampled[1:], False
        tokens.extend(sampled)

    @property
    def contents(self) -> abc.Sequence[Content]:
        """The contents of its blocks, by position: the keys of the prefix cache."""
        if self.multimodal is None:
            return self.tokens
        return [*self.multimodal.contents, *self.tokens[self.prompt_len :]]

    def __lt__(self, other: "Sequence") -> bool:
        """Whether it comes first, in a queue and in a step."""
        return (self.priority, self.number) < (other.priority, other.number)


@dataclass(eq=False, slots=True)
class Chunk:
    """A sequence's share of a step: `count` of its tokens from `start` on, then drafted ones.

    If the chunk reaches the sequence's end, its last token and each draft are to be sampled.
    `width`, `reaches_end` and `to_sample` are fixed at construction: `advance` moves the sequence's
    end. `is_prefill`: it has tokens of the prompt, or ones to compute again. Steps that follow each
    other share a chunk without drafts: `start` is that of the last one.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    deferred: bool = False  # its last token runs again: no token could be sampled
    # in which slots its states of recurrent layers are
    states: tuple[StateSegment, ...] = field(init=False, default=())
    table: BlockTable | None = field(init=False)  # the sequence's at construction
    width: int = field(init=False)  # tokens, drafts included
    reaches_end: bool = field(init=False)
    to_sample: int = field(init=False)  # how many of its last rows decide a token
    is_prefill: bool = field(init=False)

    def __post_init__(self) -> None:
        sequence, count, drafts = self.sequence, self.count, len(self.drafts)
        self.table = sequence.table
        self.width = count + drafts
        self.reaches_end = self.start + count == len(sequence.tokens)
        self.to_sample = 1 + drafts if self.reaches_end and sequence.max_tokens else 0
        self.is_prefill = count > 1 or self.start < sequence.prompt_len

    @property
    def end(self) -> int:
        """Leading tokens of the sequence that are computed once the chunk has run, if its drafts
        are rejected. The states of recurrent layers then stay those before a deferred chunk."""
        if self.deferred:
            return self.start if self.states else self.start + self.count - 1
        return self.start + self.count

    @property
    def is_active(self) -> bool:
        """Whether its sequence has been neither preempted nor removed since the construction."""
        return self.table is not None and self.table is self.sequence.table

    @property
    def to_score(self) -> range:
        """Positions whose logits score the prompt's next token, or that a head reads."""
        sequence, end = self.sequence, self.start + self.count
        if sequence.reads == "all":
            return range(self.start, end)
        if sequence.reads == "last":
            return range(end - 1, end) if self.reaches_end else range(0)
        if not sequence.scores_prompt:
            return range(0)
        return range(max(self.start, sequence.scored), min(end, sequence.prompt_len - 1))


class Span(NamedTuple):
    """`width` tokens of a sequence from position `start` on, and its block table."""

    blocks: abc.Sequence[int]
    start: int
    width: int


@dataclass(eq=False, slots=True)
class Batch:
    """The tokens of a step: T tokens in one row, span after span. Built once and read by every
    layer. A model runner's `forward(batch, sampled)` returns the logits [R, vocabulary] of
    `rows`."""

    spans: abc.Sequence[Span]
    ids: abc.Sequence[int]  # [T], drafts after the chunk's tokens; some may be placeholders
    rows: abc.Sequence[int]  # [R] indices into `ids` whose logits are computed
    scored: int = 0  # so many leading `rows` score prompts; the others are sampled
    chunks: abc.Sequence[Chunk] = ()  # one for each span; empty in the batch of a check
    multimodal_spans: abc.Sequence[int] = ()  # those that overlap the part before `end`
    shifts: Mapping[int, int] = field(default_factory=dict)  # of other spans: position id - index
    # of each span, the slots of recurrent layers' states; empty: there are none
    states: abc.Sequence[abc.Sequence[StateSegment]] = ()
    offsets: list[int] = field(init=False)  # [spans] index into `ids` at which each begins
    positions: list[int] = field(init=False)  # [T] of each token in its sequence

    def __post_init__(self) -> None:
        self.offsets, self.positions = [], []
        for _, start, width in self.spans:
            self.offsets.append(len(self.positions))
            self.positions += range(start, start + width)

    @classmethod
    def from_chunks(cls, chunks: abc.Sequence[Chunk]) -> "Batch":
        spans: list[Span] = []
        ids: list[int] = []
        scored: list[int] = []
        sampled: list[int] = []
        multimodal_spans: list[int] = []
        shifts: dict[int, int] = {}
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start
            if (multimodal := sequence.multimodal) is not None:
                if start < multimodal.end:
                    multimodal_spans.append(len(spans))
                elif multimodal.shift:
                    shifts[len(spans)] = multimodal.shift
            blocks = sequence.table.blocks if sequence.table else ()
            spans.append(Span(blocks, start, chunk.width))
            if sequence.scores_prompt or sequence.reads:
                offset = len(ids) - start
                scored += [position + offset for position in chunk.to_score]
            if chunk.width == chunk.to_sample == 1:
                sampled.append(len(ids))
                ids.append(sequence.tokens[start])
                continue
            ids += sequence.tokens[start : start + chunk.count]
            ids += chunk.drafts
            sampled += range(len(ids) - chunk.to_sample, len(ids))
        states = [chunk.states for chunk in chunks]
        rows = scored + sampled
        return cls(spans, ids, rows, len(scored), chunks, multimodal_spans, shifts, states)

    def move(self) -> Self:
        """Make it the batch of the next step, in which all of its chunks decode another token."""
        is_ahead, count = self.chunks[0].sequence.has_placeholder, len(self.ids)
        tokens = (chunk.sequence.tokens[-1] for chunk in self.chunks)
        self.ids = range(-1, -1 - count, -1) if is_ahead else [*tokens]
        self.positions = [position + 1 for position in self.positions]
        self.spans = [Span(blocks, start + 1, 1) for blocks, start, _ in self.spans]
        self.states = [chunk.states for chunk in self.chunks]
        return self

    @property
    def position_ids(self) -> list[int]:
        """[T] as the model counts them: after media they differ from the indices."""
        ids = [*self.positions]
        for number, shift in self.shifts.items():
            begin, width = self.offsets[number], self.spans[number].width
            ids[begin : begin + width] = (p + shift for p in ids[begin : begin + width])
        return ids
