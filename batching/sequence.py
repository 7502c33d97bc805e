"""What is scheduled and run, as numbers: a sequence, its chunk of a step, and the step's batch.

The scheduler (scheduler.py) cuts sequences into chunks; a batch lays the chunks out once, for the
model runner and the sampler. No tensors here.
"""

from array import array
from collections import abc
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from batching.block_pool import ROOT, BlockTable, Content, Key


class PrefixedTokens(abc.Sequence[int]):
    """A prompt whose beginning is many prompts': to be run, and never added to."""

    __slots__ = ("own", "shared")

    def __init__(self, shared: abc.Sequence[int], own: abc.Sequence[int]) -> None:
        self.shared, self.own = shared, array("i", own)

    def copy(self) -> "PrefixedTokens":
        return self

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)

    def __getitem__(self, at: Any) -> Any:
        before = len(self.shared)
        if not isinstance(at, slice):
            at = range(len(self))[at]
            return self.shared[at] if at < before else self.own[at - before]
        start, stop, _ = at.indices(len(self))
        own = self.own[max(0, start - before) : max(0, stop - before)]
        return [*self.shared[start:stop], *own]


@dataclass(eq=False, slots=True)
class MultimodalInputs:
    """What a prompt with pictures has beside its ids, shared by a request's choices. Known once its
    pictures have been encoded (worker/vision/encoder_scheduler.py); until then others pass.

    `contents`: of the prompt, what its blocks are found by. `blocks`: places [start, stop) whose
    tokens see each other in both directions, and so are run together. All pictures and blocks lie
    before `end`. `shift`: by how much positions exceed places behind it."""

    ready: bool = False
    contents: abc.Sequence[Content] = ()
    bidirectional_spans: abc.Sequence[tuple[int, int]] = ()
    end: int = 0
    shift: int = 0

    def align_chunk(self, start: int, count: int) -> int:
        """How many tokens from `start` on can be run together, of `count` or a few more."""
        for first, stop in self.bidirectional_spans:
            if first < start + count < stop:
                return (first if first > start else stop) - start
        return count


@dataclass(eq=False, slots=True)
class Sequence:
    """A continuation of a prompt: its tokens so far, and what of them is in the cache. `output` is
    its text side (worker/generation/output.py) and `drafter` proposes its next tokens: neither is
    looked at here."""

    # the prompt's, shared by a request's choices until each is admitted; of one that generates
    # nothing it may be Joined. The last may be promised: -1 - r stands for the token that row r of
    # the last step's draws gives, which nobody has read yet.
    tokens: Any
    output: Any = None
    _: KW_ONLY
    max_tokens: int = 1  # of the output; 0: only the prompt is run
    # log-probabilities of the prompt are wanted: all of it is computed, nothing is reused
    scores_prompt: bool = False
    # how likely tokens are to follow it is wanted: its last row is scored, nothing is sampled
    scores_end: bool = False
    background: bool = False  # comes after all that are not
    root: bytes = ROOT  # it shares its prefix with those of the same root alone
    drafter: Any = None
    multimodal: MultimodalInputs | None = None  # None: its prompt is nothing but text
    prompt_len: int = field(init=False)
    scored: int = 0  # leading tokens whose successor has been scored
    number: int = -1  # order of arrival; -1: not scheduled
    table: BlockTable | None = None  # None: waiting
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int | None = None  # prompt tokens found in the cache at first admission
    awaited: Key | None = None  # the block of its prefix that somebody is computing

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens that have not been given to the model; none are while its last step runs."""
        return len(self.tokens) - self.computed

    @property
    def promised(self) -> bool:
        return bool(self.tokens[-1] < 0)

    @property
    def contents(self) -> abc.Sequence[Content]:
        """What its blocks are found by."""
        multimodal = self.multimodal
        if multimodal is None:
            tokens: abc.Sequence[Content] = self.tokens
            return tokens
        return [*multimodal.contents, *self.tokens[self.prompt_len :]]

    def __lt__(self, other: "Sequence") -> bool:
        """Whether it comes first, in the line and in a step."""
        return (self.background, self.number) < (other.background, other.number)


@dataclass(eq=False, slots=True)
class Chunk:
    """A sequence's share of a step: `count` of its tokens from `start` on, then drafted ones.

    If the chunk reaches the sequence's end, its last token and each draft are to be sampled. What
    it says of that holds as the chunk is made, before `advance`, which moves the end.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    table: BlockTable | None = field(init=False)  # the sequence's, until it is put back or ends
    width: int = field(init=False)
    reaches_end: bool = field(init=False)
    to_sample: int = field(init=False)  # how many of its last rows decide a token

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.table = sequence.table
        self.width = self.count + len(self.drafts)
        self.reaches_end = self.start + self.count == len(sequence.tokens)
        samples = self.reaches_end and sequence.max_tokens
        self.to_sample = 1 + len(self.drafts) if samples else 0

    @property
    def runs(self) -> bool:
        """Whether its sequence still has what it had when it was cut."""
        return self.table is not None and self.table is self.sequence.table

    @property
    def prefills(self) -> bool:
        return self.start < self.sequence.prompt_len or self.count > 1

    @property
    def to_score(self) -> range:
        """Positions whose output says how likely the prompt's next token was, or is."""
        sequence = self.sequence
        if sequence.scores_end:
            end = self.start + self.count
            return range(end - 1, end) if self.reaches_end else range(0)
        if not sequence.scores_prompt:
            return range(0)
        last = min(self.start + self.count, sequence.prompt_len - 1)
        return range(max(self.start, sequence.scored), last)


class Span(NamedTuple):
    """Where `width` tokens of a sequence lie: from position `start` on, in its table of blocks."""

    blocks: abc.Sequence[int]
    start: int
    width: int


@dataclass(eq=False, slots=True)
class Batch:
    """What a step runs: T tokens in one row, span after span. Built once, for whoever reads it. A
    model runner is asked for `forward(batch, drawn)`: logits [R, vocabulary] of the R `rows`."""

    spans: abc.Sequence[Span]
    ids: abc.Sequence[int]  # [T], drafted ones behind their chunk's; promised ones as -1 - row
    rows: abc.Sequence[int]  # [R] places in `ids` whose logits are wanted
    scored: int = 0  # so many of `rows` score prompts; the rest, behind them, are sampled
    chunks: abc.Sequence[Chunk] = ()  # one for each span; none in a batch that no scheduler made
    # numbers of the spans that overlap the multimodal part of their prompt
    multimodal_spans: abc.Sequence[int] = ()
    shifts: Mapping[int, int] = field(default_factory=dict)  # of spans, how far positions are off
    offsets: list[int] = field(init=False)  # [spans] places in `ids` where each begins
    positions: list[int] = field(init=False)  # [T] of each token in its sequence

    def __post_init__(self) -> None:
        self.offsets, self.positions = [], []
        for _, start, width in self.spans:
            self.offsets.append(len(self.positions))
            self.positions += range(start, start + width)

    @property
    def shifted(self) -> list[int]:
        """[T] positions as the model is told them, behind pictures."""
        positions = [*self.positions]
        for number, shift in self.shifts.items():
            begin, width = self.offsets[number], self.spans[number].width
            positions[begin : begin + width] = (p + shift for p in positions[begin : begin + width])
        return positions

    @classmethod
    def of(cls, chunks: abc.Sequence[Chunk]) -> "Batch":
        """What the scheduler wants run."""
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
            if sequence.scores_prompt or sequence.scores_end:
                shift = len(ids) - start
                scored += [position + shift for position in chunk.to_score]
            ids += sequence.tokens[start : start + chunk.count]
            ids += chunk.drafts
            sampled += range(len(ids) - chunk.to_sample, len(ids))
        return cls(spans, ids, scored + sampled, len(scored), chunks, multimodal_spans, shifts)
