"""Sampling: a row of logits and a request's parameters become one output token.

The last stage of a generation step. A token depends on its row's logits, its parameters and the
uniform number of (seed, choice, position), never on the rest of the batch. That number comes from a
counter-based generator, not a stream, and goes through the inverse distribution function of the
kept tokens in order of id: logits that differ by rounding shift a few bounds by as little.

Not here: which rows there are, the effect of a token on its request (stop strings, text), and
log-probabilities (logprobs.py).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import e, log2
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batching.sequence import TokenIds
from worker.device.async_copy import AsyncCopy, to_device

# Rows are processed in blocks: float32 sums of blocks stay accurate, and the blocks' maxima locate
# the largest logits faster than an argmax or topk of the row.
BLOCK = 128
# Number of largest logits that a row is sampled from first, and its factor where they are too few.
CANDIDATES, WIDEN_FACTOR = 64, 8
AHEAD = 32  # steps whose random numbers are computed together
VECTORIZED = 64  # fewer random numbers are faster one by one
MIN_TEMPERATURE = 1e-6  # keeps the division by it within float32
LOG2_E = log2(e)  # exp2 takes a third of the time of exp on an AMD CPU, by MKL

# ── parameters ──

# Return the scores [1, V] of the token after ids [1, L].
Processor: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters, with all defaults resolved."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # likewise
    repetition_penalty: float = 1.0  # over prompt and output, as transformers' processor
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None  # None: none; 0: of the sampled token; k: of the k best as well
    logprob_token_ids: tuple[int, ...] = ()  # scored instead of the k best
    min_tokens: int = 0  # number of output tokens before which `stop_token_ids` are banned
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    # of the generation_config: before a grammar's mask, and between the mask and the filters
    processors: tuple[Processor, ...] = ()
    warpers: tuple[Processor, ...] = ()


class TokenCounts:
    """The distinct tokens of an output and their counts, as arrays: a step reads them row by row,
    and a long output has thousands."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}  # of a token in the arrays, which may be longer
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.float32)

    def add(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            if index == len(self._ids):
                capacity = 2 * index + 16
                self._ids = np.resize(self._ids, capacity)
                self._counts = np.resize(self._counts, capacity)
            self._ids[index], self._counts[index] = token, 0
        self._counts[index] += 1

    def with_drafts(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens [N] of output and drafts, and their counts [N]."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        if not drafts:
            return ids, counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._index]
        ids = np.append(ids, np.array(new, np.int64))
        counts = np.append(counts, np.zeros(len(new), np.float32))
        for token in drafts:
            counts[self._index[token] if token in self._index else size + new.index(token)] += 1
        return ids, counts


class SamplingState:
    """One sequence's parameters, and what its penalties and processors need of its tokens."""

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int]) -> None:
        self.params = params
        self.choice = choice
        ids, amounts = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self.bias = np.array(ids, np.int64), np.array(amounts, np.float32)
        self.stop_token_ids = np.array(params.stop_token_ids, np.int64)
        self.allowed_token_ids = np.array(params.allowed_token_ids, np.int64)
        self.has_repetition_penalty = params.repetition_penalty != 1.0
        self.has_count_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        in_prompt = prompt if self.has_repetition_penalty else ()
        self.prompt = np.unique(np.array(in_prompt, np.int64))
        self.has_processors = bool(params.processors or params.warpers)
        self.processes_logits = bool(
            self.has_repetition_penalty
            or self.has_count_penalty
            or self.has_processors
            or params.logit_bias
            or params.min_tokens
            or params.allowed_token_ids
        )
        is_scored = params.logprobs is not None
        self.columns = *_parameters(params), self.processes_logits, is_scored
        self.counts = TokenCounts()  # of the output, if a penalty needs them
        # of the prompt and of the output, if a processor needs them
        self.prompt_ids = np.array(prompt if self.has_processors else (), np.int64)
        self.output_ids = TokenIds()

    def fork(self, choice: int) -> "SamplingState":
        """Return the state of another choice of the request, before its first token.

        What does not change is shared.
        """
        state = copy.copy(self)
        state.choice = choice
        state.counts, state.output_ids = TokenCounts(), TokenIds()
        return state

    def accept(self, token: int) -> None:
        """Count a token of the output."""
        if self.has_repetition_penalty or self.has_count_penalty:
            self.counts.add(token)
        if self.has_processors:
            self.output_ids.append(token)


class SamplingRow(NamedTuple):
    """The state that determines the token of one row of logits, besides the logits."""

    state: SamplingState
    position: int  # index of the output token, from 0
    drafted: tuple[int, ...] = ()  # drafts between the accepted output and this row


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that are allowed in some of the rows; in the others all are."""

    rows: Sequence[int]
    tokens: Tensor  # bool [len(rows), V], true: allowed


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token of a row. Log-probabilities are of the raw distribution, before any parameter."""

    token: int  # -1: the logits are unusable (NaN, +inf, or all -inf)
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first, without impossible tokens
    rank: int = 0  # 1: the most likely token; 0: not scored


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1), of 53 bits, that determines one output token.

    Philox-2x64-10 with key `seed` and counter (position, choice): Salmon, Moraes, Dror and Shaw,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    mask = 2**64 - 1
    x, y, key = position & mask, choice & mask, seed & mask
    for _ in range(10):
        product = 0xD2B74407B1CE6E93 * x
        x, y = (product >> 64) ^ key ^ y, product & mask
        key = (key + 0x9E3779B97F4A7C15) & mask
    return (x >> 11) * 2.0**-53


def uniforms(rows: Sequence[SamplingRow], count: int) -> NDArray[np.float64]:
    """Return the numbers [count, R] of rows at their positions and the ones after, as `uniform`."""
    if count * len(rows) < VECTORIZED:
        keys = [(r.state.params.seed, r.state.choice, r.position) for r in rows]
        numbers = [uniform(seed, choice, at + n) for n in range(count) for seed, choice, at in keys]
        return np.array(numbers).reshape(count, len(rows))
    mask, low = 2**64 - 1, np.uint64(2**32 - 1)
    factor = np.uint64(0xD2B74407B1CE6E93)
    factor_low, factor_high, half = factor & low, factor >> np.uint64(32), np.uint64(32)
    parts = [(r.position & mask, r.state.choice & mask, r.state.params.seed & mask) for r in rows]
    first, choices, key = np.array(parts, np.uint64).T
    x, y = first + np.arange(count, dtype=np.uint64)[:, None], choices
    for _ in range(10):
        x_low, x_high = x & low, x >> half
        middle, other = x_high * factor_low, x_low * factor_high
        carry = (x_low * factor_low >> half) + (middle & low) + (other & low)
        upper = x_high * factor_high + (middle >> half) + (other >> half) + (carry >> half)
        x, y = upper ^ key ^ y, x * factor
        key = key + np.uint64(0x9E3779B97F4A7C15)
    return (x >> np.uint64(11)) * 2.0**-53  # type: ignore[no-any-return]


# ── sampling a step ──


class SamplingInputs:
    """What sampling a step needs of its rows, in part on the device. Rows that continue those of
    the step before keep their parameters and the numbers that were computed ahead."""

    def __init__(self, rows: Sequence[SamplingRow], before: "SamplingInputs | None" = None) -> None:
        self._rows, self._step = rows, 0  # of the first step; since that
        self.states = [row.state for row in rows]
        at, earlier = (before._step + 1, before._rows) if before else (0, ())
        columns = {(row.state, row.position + at): n for n, row in enumerate(earlier)}
        index = [columns.get(row[:2], -1) for row in rows]
        new = [n for n, column in enumerate(index) if column < 0]
        self._is_continued = 2 * len(new) < len(rows)
        if before and self._is_continued:
            ahead = VECTORIZED // max(1, len(new))
            self._columns: NDArray[np.float64] = before._columns[:, index]
            self._numbers: NDArray[np.float64] = before._numbers[1 : 1 + ahead, index]
        else:
            new = [*range(len(rows))]
            self._columns, self._numbers = np.empty((7, len(rows))), np.empty((0, len(rows)))
        self._columns[:, new] = np.array([self.states[n].columns for n in new]).reshape(-1, 7).T
        self._numbers[:, new] = uniforms([rows[n] for n in new], len(self._numbers))
        self._copies: tuple[Tensor, Tensor] | None = None  # both, on the device
        self.kinds = kinds = set(self._columns[4].tolist())
        self.processes_logits = bool(self._columns[5].any())
        self.has_temperature = bool((self._columns[0] != 1.0).any())
        # rows with log-probabilities, and the number of tokens to score beside the sampled one
        scored = {n: self.states[n].params for n in np.flatnonzero(self._columns[6]).tolist()}
        self.logprobs = {n: len(p.logprob_token_ids) or p.logprobs or 0 for n, p in scored.items()}
        self.only_argmax = not (kinds - {Kind.GREEDY} or self.processes_logits or self.logprobs)

    @property
    def rows(self) -> Sequence[SamplingRow]:
        step = self._step
        return [SamplingRow(state, at + step, drafted) for state, at, drafted in self._rows]

    def following(self) -> "SamplingInputs":
        """Return the inputs of the next step, if each output has got a token."""
        inputs = copy.copy(self)
        inputs._step, inputs._numbers = self._step + 1, self._numbers[1:]
        if self._copies:
            inputs._copies = self._copies[0][1:], self._copies[1]
        return inputs

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers [R] of the rows, and [5, R] their parameters."""
        if not len(self._numbers):  # the next step may have other rows
            self._numbers = uniforms(self.rows, AHEAD if self._step or self._is_continued else 1)
            self._copies = None
        if self._copies is None:
            numbers = self._numbers * (self._columns[4] != Kind.GREEDY)
            self._copies = to_device(numbers, device), to_device(self._columns[:5], device)
        return self._copies[0][0], self._copies[1]


@torch.inference_mode()
def sample(
    logits: Tensor, inputs: SamplingInputs, mask: TokenMask | None = None
) -> "SamplerOutput":
    """Sample one token for each row of logits [R, V], of any float dtype, on any device.

    Order: logit bias and ban of stop tokens, repetition penalty, frequency and presence penalties,
    allowed tokens, processors, mask, warpers, temperature, min_p, top_k, top_p. This is vLLM's
    order; transformers applies min_p last. top_p is relative to the probability that min_p and
    top_k keep.
    """
    raw = blocked(logits, mask is None and inputs.only_argmax)
    scores = raw
    if mask or inputs.processes_logits:
        from worker.model.logit_changes import process_logits

        scores = process_logits(raw, inputs.rows, logits.shape[1], mask)
    return SamplerOutput(raw, scores, inputs)


class SamplerOutput:
    """The tokens of a step. The next step can run on `tokens` [R] before they are read."""

    def __init__(self, raw: Tensor, scores: Tensor, inputs: SamplingInputs) -> None:
        """`raw` and `scores` [R, N, BLOCK]: logits before and after processing, float32 unless all
        rows are greedy and none is scored."""
        self._raw, self._blocks, self.inputs = raw, scores, inputs
        self.tokens, too_few = _sample_rows(scores, inputs)
        self._too_few = None if too_few is None else AsyncCopy(too_few)
        self._start_copies()

    def _start_copies(self) -> None:
        self._tokens, self._scores = AsyncCopy(self.tokens), None
        if self.inputs.logprobs:
            from worker.model.logprobs import score_tokens

            index = to_device(list(self.inputs.logprobs), self.tokens.device)
            raw = self._raw if len(self.inputs.logprobs) == len(self._raw) else self._raw[index]
            top = max(self.inputs.logprobs.values())
            given = [self.inputs.states[n].params.logprob_token_ids for n in self.inputs.logprobs]
            self._scores = AsyncCopy(score_tokens(raw, self.tokens[index], top, given))

    @torch.inference_mode()
    def resample(self) -> bool:
        """Sample rows again that had too few candidates; return whether `tokens` has changed.

        Waits for the step to know those rows.
        """
        flags, self._too_few = self._too_few.read() if self._too_few else (), None
        pending = [n for n, is_pending in enumerate(flags) if is_pending]
        if pending:
            index = to_device(pending, self.tokens.device)
            number, parameters = (x[..., index] for x in self.inputs.on(index.device))
            blocks = self._blocks[index]
            weights = relative_weights(blocks, blocks.amax((1, 2)), parameters[0])
            run = torch.ops.onequeue.sample_filtered
            self.tokens[index] = run(blocks, weights, number, parameters)
            self._start_copies()
        return bool(pending)

    def read(self) -> list[SampledToken]:
        """Wait for the step and return the tokens of all rows."""
        self.resample()
        sampled = list(map(SampledToken, self._tokens.read()))
        if self._scores:
            from worker.model.logprobs import scored_tokens

            scored = scored_tokens(self._scores.read(), list(self.inputs.logprobs.values()))
            for n, token in zip(self.inputs.logprobs, scored, strict=True):
                sampled[n] = token
        return sampled


def blocked(logits: Tensor, only_argmax: bool = False) -> Tensor:
    """Return [R, V] as [R, N, BLOCK], padded with -inf: float32, or 16 bits with `only_argmax`.

    Copied if dtype or width require it. On a GPU copied also unless `only_argmax`: rows may be
    sampled again after the next step has overwritten the logits.
    """
    rows, width = logits.shape
    dtype = logits.dtype if only_argmax and logits.itemsize == 2 else torch.float32
    if missing := -width % BLOCK:
        padded = logits.new_empty(rows, width + missing, dtype=dtype)
        padded[:, :width] = logits
        padded[:, width:] = -torch.inf
        return padded.view(rows, padded.shape[1] // BLOCK, BLOCK)
    blocked = logits.to(dtype, copy=logits.is_cuda and not only_argmax)
    return blocked.view(rows, width // BLOCK, BLOCK)


# ── sampling rows ──


class Kind(IntEnum):
    """How a row is sampled: the largest score, from all scores, or from filtered ones, by top_k or
    min_p, or by top_p alone."""

    GREEDY, ANY, TOP, NUCLEUS = range(4)


def _sample_rows(blocks: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor | None]:
    """Sample a token for each row of scores [R, N, BLOCK].

    Return the tokens [R], -1 for unusable scores, and whether [R] a row needs more than its
    CANDIDATES largest scores, None if none does.
    """
    maxima = blocks.amax(-1)
    peak = maxima.amax(-1)  # NaN if the row has one
    tokens, too_few = _sample_kinds(blocks, maxima, peak, inputs)
    usable = peak - peak == 0  # finite
    return torch.where(usable, tokens, -1), None if too_few is None else too_few & usable


def _parameters(params: SamplingParams) -> tuple[float, ...]:
    """Return temperature, top_p, top_k, min_p and kind. A greedy row is one with a top_k of 1 and
    the number 0."""
    if params.temperature <= 0.0:
        return 1.0, 1.0, 1, 0.0, Kind.GREEDY
    is_top = params.top_k > 0 or params.min_p > 0.0
    kind = Kind.TOP if is_top else Kind.NUCLEUS if params.top_p < 1.0 else Kind.ANY
    temperature = max(params.temperature, MIN_TEMPERATURE)
    return temperature, params.top_p, params.top_k, params.min_p, kind


def _sample_kinds(
    blocks: Tensor, maxima: Tensor, peak: Tensor, inputs: SamplingInputs
) -> tuple[Tensor, Tensor | None]:
    """Sample rows, as _sample_rows. `maxima` [R, N]: of blocks; `peak` [R]: of rows.

    Launching an operation costs more than its work, so rows are not gathered by kind. Each kind
    that is present is computed for all rows, and each row's token is that of its own kind.
    """
    found = inputs.kinds
    if found <= {Kind.GREEDY}:
        return _argmax(blocks, maxima), None
    number, parameters = inputs.on(blocks.device)
    temperature, *_, kind = parameters
    weights = None
    if found & {Kind.ANY, Kind.NUCLEUS}:
        weights = relative_weights(blocks, peak, temperature if inputs.has_temperature else None)
    mass = None if weights is None or Kind.NUCLEUS not in found else sum_weights(weights)
    tokens = None if weights is None or Kind.ANY not in found else _invert(weights, number)
    if not found & {Kind.TOP, Kind.NUCLEUS}:
        assert tokens is not None
        if Kind.GREEDY in found:
            tokens = torch.where(kind == Kind.GREEDY, _argmax(blocks, maxima), tokens)
        return tokens, None
    is_nucleus = kind == Kind.NUCLEUS if found & {Kind.TOP, Kind.GREEDY} else None
    filtered, too_few = _sample_top(blocks, peak, number, parameters, mass, is_nucleus)
    if tokens is None:
        return filtered, too_few
    is_any = kind == Kind.ANY
    tokens = torch.where(is_any, tokens, filtered)
    return tokens, None if too_few is None else too_few & ~is_any


def _argmax(blocks: Tensor, maxima: Tensor) -> Tensor:
    """Return the first index of each row's maximum. `maxima` [R, N]: of blocks."""
    block = maxima.argmax(-1, keepdim=True)
    return block[:, 0] * BLOCK + _select_block(blocks, block).argmax(-1)


def relative_weights(blocks: Tensor, peak: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return probabilities relative to the largest, at a temperature [R], None: 1."""
    scale = LOG2_E if temperature is None else (LOG2_E / temperature)[:, None, None].float()
    return (blocks - peak[:, None, None]).mul_(scale).exp2_()


def sum_weights(weights: Tensor) -> Tensor:
    """Return the float64 sums [R] of weights [R, N, BLOCK]."""
    return weights.sum(-1).double().sum(-1)


def _sample_top(
    blocks: Tensor,
    peak: Tensor,
    number: Tensor,
    parameters: Tensor,
    mass: Tensor | None,
    is_nucleus: Tensor | None,
    width: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sample from the `width` (None: CANDIDATES) largest scores, filtered by min_p, top_k, top_p.

    top_k keeps all scores equal to its last one. top_p is relative to `mass` [R] in the rows of
    `is_nucleus` [R] (None: in all rows). In other rows, or without a mass, it is relative to the
    weights that min_p and top_k keep. Return tokens [R], and whether [R] a row needs more scores,
    None if all were considered.
    """
    temperature, top_p, top_k, min_p, _ = parameters[..., None]
    values, ids = largest(blocks, width or CANDIDATES)  # each filter keeps a prefix of this order
    weights = ((values.double() - peak[:, None]) / temperature).exp()
    rank = torch.arange(values.shape[1], device=values.device)
    last = values.gather(1, (top_k.long() - 1).clamp(0, values.shape[1] - 1))
    allowed = (weights > 0) & (weights >= min_p) & ((top_k <= 0) | (values >= last))
    limit = allowed.sum(-1, keepdim=True).clamp(min=1)
    sums = weights.cumsum(-1)
    if mass is None:
        total = sums.gather(1, limit - 1)
    elif is_nucleus is None:
        total = mass[:, None]
    else:
        total = torch.where(is_nucleus[:, None], mass[:, None], sums.gather(1, limit - 1))
    count = ((sums < top_p * total).sum(-1, keepdim=True) + 1).minimum(limit)
    weights = weights.where(rank < count, 0.0)
    if values.shape[1] == blocks[0].numel():
        by_id = torch.zeros_like(weights).scatter_(1, ids, weights)
        return _invert(by_id.view_as(blocks), number), None
    ids, order = ids.sort()
    sums = weights.gather(1, order).cumsum(-1)
    tokens = ids.gather(1, _count_passed(sums, number * sums[:, -1])[:, None])[:, 0]
    # Tokens equal to the smallest value may be missing, so the last one needed must be larger.
    last_needed = limit if mass is None else count
    if mass is not None and is_nucleus is not None:
        last_needed = torch.where(is_nucleus[:, None], count, limit)
    needed = values.gather(1, last_needed - 1)
    return tokens, (needed == values[:, -1:])[:, 0]


def _sample_filtered(blocks: Tensor, weights: Tensor, number: Tensor, parameters: Tensor) -> Tensor:
    """Sample from as many of the largest scores as filters keep. `weights` [R, N, BLOCK]: of the
    scores. Return tokens [R]."""
    tokens, width = torch.empty_like(number, dtype=torch.long), CANDIDATES
    peak, mass, pending = blocks.amax((1, 2)), sum_weights(weights), torch.arange(len(blocks))
    while len(pending):
        width *= WIDEN_FACTOR
        rows = pending.to(blocks.device)
        is_nucleus = parameters[4, rows] == Kind.NUCLEUS
        arguments = peak[rows], number[rows], parameters[:, rows], mass[rows], is_nucleus
        tokens[rows], too_few = _sample_top(blocks[rows], *arguments, width)
        pending = pending[:0] if too_few is None else pending[too_few.cpu()]
    return tokens


# On a CPU the native library replaces the operation's kernel by one that sorts less.
torch.library.custom_op("onequeue::sample_filtered", _sample_filtered, mutates_args=())


def largest(blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` or more largest scores of each row, descending, and their ids; equal
    scores are in order of id."""
    flat = blocks.flatten(1)
    if width * WIDEN_FACTOR >= flat.shape[1]:
        values, ids = flat.sort(descending=True, stable=True)
        return values, ids
    if width < blocks.shape[1]:
        # the largest values lie in the blocks with the largest maxima
        block = blocks.amax(-1).topk(width).indices
        row = torch.arange(len(blocks), device=blocks.device)[:, None]
        values, at = blocks[row, block].flatten(1).topk(width)
        ids = block.gather(1, at // BLOCK) * BLOCK + at % BLOCK
    else:
        values, ids = flat.topk(width)
    ids, order = ids.sort()
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _invert(weights: Tensor, number: Tensor) -> Tensor:
    """Return the first tokens [R] at which the cumulative weights [R, N, BLOCK] exceed `number`
    [R] times their sum: the block first, then the token in it."""
    sums = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    target = number * sums[:, -1]  # less than the sum, as the number is less than 1
    passed = sums <= target[:, None]
    block, below = passed.sum(-1, keepdim=True), (sums * passed).amax(-1)
    in_block = _select_block(weights, block).cumsum(-1, dtype=torch.float64)
    return block[:, 0] * BLOCK + _count_passed(in_block, target - below)


def _count_passed(sums: Tensor, target: Tensor) -> Tensor:
    """Return the first index [R] in ascending sums [R, N] above target [R], at most the first index
    of their maximum."""
    return ((sums <= target[:, None]) & (sums < sums[:, -1:])).sum(-1)


def _select_block(blocks: Tensor, block: Tensor) -> Tensor:
    """Return [R, BLOCK]: one block [R, 1] of each row."""
    return blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
