"""What changes logits before a token is drawn from them: bias, penalties, bans, a grammar's mask.

Here is also what a draw is made by: a request's parameters and the tokens that penalties look at.
The draw itself is in sampler.py, which comes here only where one of its rows asks for a change.

Random numbers that are counted, not streamed: the same wherever and whenever they are drawn.

Sampling: a row of logits and a request's parameters become one output token.

The last stage of a generation step. A draw depends on the row's logits, its parameters and
(seed, choice, position), never on the rest of the batch: its uniform number is counted, not
streamed, and goes through the inverse distribution function of the kept tokens in order of id, so
that logits that differ by rounding move a few bounds by as little.

Not here: which rows there are, and what a token does to its request (stop strings, text).
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from worker.device.async_copy import AsyncCopy, to_device

Change: TypeAlias = tuple[int, ArrayLike, ArrayLike]  # row, token ids, amount of each or of all


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of its draws, resolved: nothing is None but `logprobs`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # likewise
    repetition_penalty: float = 1.0  # over prompt and output, as transformers' processor
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: the k best besides
    min_tokens: int = 0  # before so many output tokens, `end_ids` cannot be chosen
    end_ids: tuple[int, ...] = ()


class SamplingState:
    """Of one sequence: its parameters, and the tokens that penalties look at."""

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int]) -> None:
        self.params = params
        self.choice = choice
        ids, amounts = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self.bias = np.array(ids, np.int64), np.array(amounts, np.float32)
        self.ends = np.array(params.end_ids, np.int64)
        self.repeats = params.repetition_penalty != 1.0
        self.counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.prompt = np.unique(np.array(prompt if self.repeats else (), np.int64))
        self.processes_logits = bool(
            self.repeats or self.counted or params.logit_bias or params.min_tokens
        )
        self.counts: Counter[int] = Counter()  # of output tokens, where a penalty looks at them

    def sibling(self, choice: int) -> "SamplingState":
        """Of another choice of the same request, before its first token: what does not change is
        shared."""
        made = copy.copy(self)
        made.choice = choice
        made.counts = Counter()
        return made

    def accept(self, token: int) -> None:
        """A token became part of the output."""
        if self.repeats or self.counted:
            self.counts[token] += 1


class SamplingRow(NamedTuple):
    """What decides the token of one row of logits, besides these."""

    state: SamplingState
    position: int  # index of the output token, from 0
    drafted: tuple[int, ...] = ()  # speculated between the accepted history and this row


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that may be chosen in some of the rows; in the others all may."""

    rows: Sequence[int]
    tokens: Tensor  # bool [len(rows), V]


def processed(
    raw: Tensor, draws: Sequence[SamplingRow], vocabulary: int, mask: TokenMask | None
) -> Tensor:
    """Logits [R, …], of which the first `vocabulary` of a row are tokens, as a copy with the mask,
    bias, penalties and bans; `raw` itself where no row has any."""
    added: list[Change] = []
    repeated: list[Change] = []
    counted: list[Change] = []
    masked = set(mask.rows) if mask else ()  # they end when they must
    for row, draw in enumerate(draws):
        state, params = draw.state, draw.state.params
        if params.logit_bias:
            added.append((row, *state.bias))
        if draw.position < params.min_tokens and row not in masked:
            # added, so that NaN stays; what follows leaves -inf as it is
            added.append((row, state.ends, -np.inf))
        if state.repeats or state.counted:
            counts = state.counts + Counter(draw.drafted) if draw.drafted else state.counts
            output = np.fromiter(counts, np.int64, len(counts))
            if state.repeats:
                penalty = params.repetition_penalty
                repeated += [(row, ids, penalty) for ids in (state.prompt, output)]
            if state.counted:
                often = np.fromiter(counts.values(), np.float32, len(counts))
                less = -params.presence_penalty - params.frequency_penalty * often
                counted.append((row, output, less))
    if not (added or repeated or counted or mask):
        return raw
    scores = raw.clone(memory_format=torch.contiguous_format)
    if mask:
        banned = ~to_device(mask.tokens.numpy(), scores.device)
        for row, ban in zip(mask.rows, banned, strict=True):
            scores[row].view(-1)[:vocabulary].masked_fill_(ban, -torch.inf)
    flat, size = scores.view(-1), (vocabulary, scores[0].numel())
    if added:
        flat.index_add_(0, *_places(added, size, flat.device))
    if repeated:
        index, factor = _places(repeated, size, flat.device)
        was = flat[index]  # a token seen twice is read and written twice, and changed once
        flat[index] = torch.where(was < 0, was * factor, was / factor)
    if counted:
        flat.index_add_(0, *_places(counted, size, flat.device))
    return scores


def _places(
    changes: Sequence[Change], size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where in the flattened rows, and how much. An id out of range must not hit another row."""
    vocabulary, width = size
    index, amounts = [], []
    for row, tokens, amount in changes:
        ids = np.asarray(tokens, np.int64)
        valid = (ids >= 0) & (ids < vocabulary)
        index.append(ids[valid] + row * width)
        amounts.append(np.broadcast_to(np.asarray(amount, np.float32), ids.shape)[valid])
    places, values = np.concatenate(index), np.concatenate(amounts)
    return to_device(places, device), to_device(values, device)


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1), of 53 bits, that decides one output token.

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


# Rows are worked on in blocks: float32 sums stay exact enough, and the maxima of blocks tell
# where the largest logits are, sooner than an argmax or topk of the row.
BLOCK = 128
# How many of the largest logits a row first gets, and how many times more where they are too few.
CANDIDATES, WIDEN = 64, 8
COLDEST = 1e-6  # keeps the division by a temperature within float32


class SampledToken(NamedTuple):
    """What a row gave. Log-probabilities are of the raw distribution, before any parameter."""

    token: int  # -1: the row holds no usable numbers (NaN, +inf, or everything -inf)
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first; impossible tokens left out
    rank: int = 0  # 1: none is likelier; 0: not scored


class SamplerOutput:
    """What rows give. The next step can run with `tokens` [R] before they are read."""

    def __init__(self, raw: Tensor, scores: Tensor, draws: Sequence[SamplingRow]) -> None:
        """`raw` and `scores` [R, N, BLOCK]: before and after what changes the distribution."""
        self._raw, self._blocks, self._draws = raw, scores, draws
        self.tokens, few = _tokens(scores, draws, CANDIDATES)
        self._few = None if few is None else AsyncCopy(few)
        params = [draw.state.params for draw in draws]
        # rows with log-probabilities, and of how many of the best
        self._asked = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        self._read_out()

    def _read_out(self) -> None:
        self._tokens, self._scores = AsyncCopy(self.tokens), None
        if asked := self._asked:
            index = to_device(list(asked), self.tokens.device)
            raw = self._raw if len(asked) == len(self._raw) else self._raw[index]
            self._scores = AsyncCopy(_scores(raw, self.tokens[index], max(asked.values())))

    @torch.inference_mode()
    def resample(self) -> bool:
        """Waits to know which rows have looked at too few logits, and draws theirs anew: whether
        `tokens` have changed."""
        few, self._few = self._few.read() if self._few else (), None
        rows, width = [row for row, is_few in enumerate(few) if is_few], CANDIDATES
        changed = bool(rows)
        while rows:
            width *= WIDEN
            index, draws = to_device(rows, self.tokens.device), [self._draws[row] for row in rows]
            self.tokens[index], more = _tokens(self._blocks[index], draws, width)
            rows = [] if more is None else index[more].tolist()
        if changed:
            self._read_out()
        return changed

    def read(self) -> list[SampledToken]:
        """Waits until they are there."""
        self.resample()
        sampled = list(map(SampledToken, self._tokens.read()))
        if self._scores:
            scored = _scored_tokens(self._scores.read(), list(self._asked.values()))
            for row, with_logprobs in zip(self._asked, scored, strict=True):
                sampled[row] = with_logprobs
        return sampled


@torch.inference_mode()
def sample(
    logits: Tensor, draws: Sequence[SamplingRow], mask: TokenMask | None = None
) -> SamplerOutput:
    """One token for each row of logits [R, V], of any float type, on any device.

    Order: the mask, bias, penalties (repetition, then frequency and presence), ban of ends,
    temperature, min_p, top_k, top_p. This is vLLM's; transformers has min_p last. Where they
    differ: top_p is a part of what min_p and top_k keep.
    """
    raw = _blocked(logits)
    scores = raw
    if mask or any(draw.state.processes_logits for draw in draws):
        scores = processed(raw, draws, logits.shape[1], mask)
    return SamplerOutput(raw, scores, draws)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[SampledToken]:
    """Row i of logits [P, V] scored for token targets[i], with its `top` best; -1 as above. Takes
    two float32 copies of the logits: long prompts come in slices."""
    if not targets:
        return []
    if (unsaid := max(targets) + 1 - logits.shape[1]) > 0:  # as places of images may be
        logits = torch.nn.functional.pad(logits, (0, unsaid), value=-torch.inf)
    raw = _blocked(logits)
    wanted = torch.tensor(targets, device=logits.device)
    tokens = torch.where(raw.amax((1, 2)).isfinite(), wanted, -1)
    return _scored_tokens(_scores(raw, tokens, top).tolist(), [top] * len(targets))


def _blocked(logits: Tensor) -> Tensor:
    """[R, V] as float32 [R, N, BLOCK]; copied, once, where type or width ask for it, and on a GPU:
    rows may be looked at again when the next step's logits are where these were."""
    rows, width = logits.shape
    if missing := -width % BLOCK:
        padded = logits.new_empty(rows, width + missing, dtype=torch.float32)
        padded[:, :width] = logits
        padded[:, width:] = -torch.inf
        logits = padded
    made = logits.to(torch.float32, copy=logits.is_cuda)
    return made.view(rows, logits.shape[1] // BLOCK, BLOCK)


def _tokens(
    blocks: Tensor, draws: Sequence[SamplingRow], width: int
) -> tuple[Tensor, Tensor | None]:
    """[R], -1 where a row of scores [R, N, BLOCK] holds no usable numbers; and whether [R] a row
    has to be drawn from more than the `width` largest, if any may. What a call costs counts more
    than what it computes, so rows of one kind, as a step mostly has, are not picked out."""
    maxima = blocks.amax(-1)
    peak = maxima.amax(-1)  # NaN where the row has one
    kinds = [_kind(draw.state.params) for draw in draws]
    few: Tensor | None = None
    if len(set(kinds)) == 1:
        tokens, few = _drawn(kinds[0], blocks, maxima, peak, draws, width)
    else:
        tokens, few = torch.empty_like(peak, dtype=torch.long), peak != peak
        for kind in set(kinds):
            group = [row for row, each in enumerate(kinds) if each == kind]
            at, of_group = to_device(group, peak.device), [draws[row] for row in group]
            made = _drawn(kind, blocks[at], maxima[at], peak[at], of_group, width)
            tokens[at], few[at] = made[0], False if made[1] is None else made[1]
    usable = peak - peak == 0  # it is finite
    return torch.where(usable, tokens, -1), None if few is None else few & usable


def _first_best(blocks: Tensor, maxima: Tensor) -> Tensor:
    """The first index of each row's maximum; `maxima` [R, N] are those of its blocks."""
    block = maxima.argmax(-1, keepdim=True)
    return block[:, 0] * BLOCK + _inside(blocks, block).argmax(-1)


def _inside(blocks: Tensor, block: Tensor) -> Tensor:
    """[R, BLOCK]: one block [R, 1] of each row."""
    return blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]


def _kind(params: SamplingParams) -> str:
    if params.temperature <= 0.0:
        return "greedy"
    if params.top_k > 0 or params.min_p > 0.0:
        return "top"
    return "nucleus" if params.top_p < 1.0 else "any"


def _numbers(kind: str, draws: Sequence[SamplingRow], device: torch.device) -> Tensor:
    """[2 or 5, R] float64: temperature and the uniform number; top_p, top_k and min_p."""
    states = [draw.state for draw in draws]
    every = [state.params for state in states]
    rows: list[list[float]] = [
        [max(params.temperature, COLDEST) for params in every],
        [uniform(s.params.seed, s.choice, d.position) for s, d in zip(states, draws, strict=True)],
    ]
    if kind != "any":
        rows += [[e.top_p for e in every], [e.top_k for e in every], [e.min_p for e in every]]
    return to_device(np.array(rows), device)


def _drawn(
    kind: str,
    blocks: Tensor,
    maxima: Tensor,
    peak: Tensor,
    draws: Sequence[SamplingRow],
    width: int,
) -> tuple[Tensor, Tensor | None]:
    """Of rows of a kind: scores [R, N, BLOCK], the maxima of blocks and of rows."""
    if kind == "greedy":
        return _first_best(blocks, maxima), None
    numbers = _numbers(kind, draws, blocks.device)
    if kind == "top":
        return _drawn_from_top(blocks, peak, numbers, None, width)
    even = all(draw.state.params.temperature == 1.0 for draw in draws)
    weights = _weights(blocks, peak, None if even else numbers[0])
    if kind == "any":
        return _pick(weights, numbers[1]), None
    return _drawn_from_top(blocks, peak, numbers, _sum(weights), width)


def _weights(blocks: Tensor, peak: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Probabilities times a constant: the largest is 1. Without a temperature, that is 1."""
    below = blocks - peak[:, None, None]
    if temperature is not None:
        below.div_(temperature[:, None, None].float())
    return below.exp_()


def _sum(weights: Tensor) -> Tensor:
    """[R] float64, of weights [R, N, BLOCK]."""
    return weights.sum(-1).double().sum(-1)


def _drawn_from_top(
    blocks: Tensor, peak: Tensor, numbers: Tensor, mass: Tensor | None, width: int
) -> tuple[Tensor, Tensor | None]:
    """Tokens [R] by the `width` largest logits, and whether [R] a row needs more, unless it was
    all. top_p is a part of `mass` [R], or else of what min_p and top_k keep."""
    temperature, number, top_p, top_k, min_p = numbers[..., None]
    values, ids = _top(blocks, width)  # each filter keeps a beginning of this order
    weights = ((values.double() - peak[:, None]) / temperature).exp()
    rank = torch.arange(values.shape[1], device=values.device)
    allowed = (weights > 0) & (weights >= min_p) & ((top_k <= 0) | (rank < top_k))
    limit = allowed.sum(-1, keepdim=True).clamp(min=1)
    sums = weights.cumsum(-1)
    total = sums.gather(1, limit - 1) if mass is None else mass[:, None]
    count = ((sums < top_p * total).sum(-1, keepdim=True) + 1).minimum(limit)
    weights = weights.where(rank < count, 0.0)
    if values.shape[1] == blocks[0].numel():
        whole = torch.zeros_like(weights).scatter_(1, ids, weights)
        return _pick(whole.view_as(blocks), number[:, 0]), None
    ids, order = ids.sort()
    sums = weights.gather(1, order).cumsum(-1)
    tokens = ids.gather(1, _passed(sums, number[:, 0] * sums[:, -1])[:, None])[:, 0]
    # Equals of the smallest value may be missing: the last one needed must be larger.
    needed = values.gather(1, (limit if mass is None else count) - 1)
    return tokens, (needed == values[:, -1:])[:, 0]


def _top(blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, `width` or more, descending, equal ones by id; their ids."""
    rows = blocks.flatten(1)
    if width * WIDEN >= rows.shape[1]:
        values, ids = rows.sort(descending=True, stable=True)
        return values, ids
    if width < blocks.shape[1]:
        # they lie in the blocks with the largest maxima
        block = blocks.amax(-1).topk(width).indices
        each = torch.arange(len(blocks), device=blocks.device)[:, None]
        values, at = blocks[each, block].flatten(1).topk(width)
        ids = block.gather(1, at // BLOCK) * BLOCK + at % BLOCK
    else:
        values, ids = rows.topk(width)
    ids, order = ids.sort()
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _pick(weights: Tensor, number: Tensor) -> Tensor:
    """Tokens where the sums of weights [R, N, BLOCK] pass a part [R] of all: block, then place."""
    sums = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    target = number * sums[:, -1]  # less than the last, as the number is less than 1
    passed = sums <= target[:, None]
    block, below = passed.sum(-1, keepdim=True), (sums * passed).amax(-1)
    inside = _inside(weights, block).cumsum(-1, dtype=torch.float64)
    return block[:, 0] * BLOCK + _passed(inside, target - below)


def _passed(sums: Tensor, target: Tensor) -> Tensor:
    """First place in sums [R, N] above target [R], at most that where they stop rising."""
    return ((sums <= target[:, None]) & (sums < sums[:, -1:])).sum(-1)


def _scores(raw: Tensor, tokens: Tensor, most: int) -> Tensor:
    """[R, 3 + 2 · most] float64: `tokens` [R], their log-probabilities and how many are likelier;
    log-probabilities of the `most` best, and their ids."""
    peak = raw.amax((1, 2))
    shift = _sum(_weights(raw, peak)).log() + peak
    chosen = raw.flatten(1).gather(1, tokens[:, None].clamp(min=0))
    likelier = (raw.flatten(1) > chosen).sum(1, keepdim=True)
    parts = [tokens[:, None].double(), chosen - shift[:, None], likelier.double()]
    if most:
        values, ids = _top(raw, max(most, CANDIDATES))
        parts += [values[:, :most] - shift[:, None], ids[:, :most].double()]
    return torch.cat(parts, 1)


def _scored_tokens(rows: list[list[float]], counts: Sequence[int]) -> list[SampledToken]:
    """Choices with log-probabilities: theirs, and of the best counts[i]; ranked."""
    sampled = []
    for count, (token, logprob, before, *rest) in zip(counts, rows, strict=True):
        half = len(rest) // 2
        best = zip(map(int, rest[half:]), rest[:count], strict=False)
        top = tuple(pair for pair in best if pair[1] > -np.inf)
        found = SampledToken(int(token), logprob, top, int(before) + 1)
        sampled.append(found if token >= 0 else SampledToken(-1))
    return sampled
