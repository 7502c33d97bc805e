"""Sampling: a row of logits and a request's parameters become one output token.

The last stage of a generation step. A draw depends on the row's logits, its parameters and
(seed, choice, position), never on batch mates: its uniform number is counted, not streamed, and
goes through the inverse distribution function of the kept tokens in order of id, so that logits
that differ by rounding move a few bounds by as little.

Not here: which rows there are, and what a token does to its request (stop strings, text).
"""

import copy
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.nn.functional import pad

# Rows are worked on in blocks: float32 sums stay exact enough, and the maxima of blocks tell
# where the largest logits are, sooner than an argmax or topk of the row.
BLOCK = 128
# How many of the largest logits a row first gets, and how many times more where they are too few.
CANDIDATES, WIDEN = 64, 8
COLDEST = 1e-6  # keeps the division by a temperature within float32

Edit: TypeAlias = tuple[int, ArrayLike, ArrayLike]  # row, token ids, amount of each or of all


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


class Draws:
    """The draws of one sequence: its parameters, and the history that penalties look at."""

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int]) -> None:
        self.params = params
        self.choice = choice
        ids, amounts = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self.bias = np.array(ids, np.int64), np.array(amounts, np.float32)
        # the prompt's tokens, where a penalty looks at them
        self.prompt = np.array([], np.int64)
        if params.repetition_penalty != 1.0:
            self.prompt = np.unique(np.array(prompt, np.int64))
        self._begin()

    def _begin(self) -> None:
        params = self.params
        self.said = array("q") if params.repetition_penalty != 1.0 else None
        counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.counts: Counter[int] | None = Counter() if counts else None

    def sibling(self, choice: int) -> "Draws":
        """Of another choice of the same request, before its first token: what does not change is
        shared."""
        made = copy.copy(self)
        made.choice = choice
        made._begin()
        return made

    def accept(self, token: int) -> None:
        """A token became part of the output."""
        if self.said is not None:
            self.said.append(token)
        if self.counts is not None:
            self.counts[token] += 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to sample."""

    draws: Draws
    position: int  # index of the output token that this row decides, from 0
    drafted: tuple[int, ...] = ()  # speculated between the accepted history and this row


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a row gave. Log-probabilities are of the raw distribution, before any parameter."""

    token: int  # -1: the row holds no usable numbers (NaN, +inf, or everything -inf)
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # (id, logprob), best first; impossible tokens left out


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that may be chosen in some of the rows; in the others all may."""

    rows: Sequence[int]
    tokens: torch.Tensor  # bool [len(rows), V]


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[Row], allowed: TokenMask | None = None
) -> list[SampledToken]:
    """One choice for each row of logits [R, V], of any float type, on any device.

    Order: what is allowed, bias, penalties (repetition, then frequency and presence), ban of ends,
    temperature, min_p, top_k, top_p. This is vLLM's; transformers has min_p last. Where they
    differ: top_p is a part of what min_p and top_k keep.
    """
    if not rows:
        return []
    raw = _blocked(logits)
    scores = _edited(raw, rows, logits.shape[1], allowed)
    tokens, peak = _best(scores)
    groups: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(_kind(row.draws.params), []).append(at)
    for kind, group in groups.items():
        if kind != "greedy":
            index = torch.tensor(group, device=logits.device)
            settings = _settings([rows[at] for at in group], logits.device)
            tokens[index] = _drawn(kind, _take(scores, index), peak[index], settings)
    tokens = torch.where(peak.isfinite(), tokens, -1)
    choices = [SampledToken(token, None, ()) for token in tokens.tolist()]
    asked = {at: k for at, row in enumerate(rows) if (k := row.draws.params.logprobs) is not None}
    if asked:
        index = torch.tensor(list(asked), device=logits.device)
        scored = _scored(_take(raw, index), tokens[index], list(asked.values()))
        for at, choice in zip(asked, scored, strict=True):
            choices[at] = choice
    return choices


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], top: int) -> list[SampledToken]:
    """Row i of logits [P, V] scored for token targets[i], with its `top` best; -1 as above.

    Takes two float32 copies of the logits: long prompts come in slices.
    """
    if not targets:
        return []
    raw = _blocked(logits)
    wanted = torch.tensor(targets, device=logits.device)
    tokens = torch.where(raw.amax((1, 2)).isfinite(), wanted, -1)
    return _scored(raw, tokens, [top] * len(targets))


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


def _blocked(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] as float32 [R, N, BLOCK]; copied only where type or width ask for it."""
    logits = logits.float()
    if missing := -logits.shape[1] % BLOCK:
        logits = pad(logits, (0, missing), value=-torch.inf)
    return logits.view(len(logits), -1, BLOCK)


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows at `index`, ascending and without repeats: all of them need no copy."""
    return rows if len(index) == len(rows) else rows[index]


def _edited(
    raw: torch.Tensor, rows: Sequence[Row], vocabulary: int, allowed: TokenMask | None
) -> torch.Tensor:
    """A copy with bias, penalties and bans; `raw` itself where no row has any."""
    shifts: list[Edit] = []
    repeats: list[Edit] = []
    counted: list[Edit] = []
    held = set(allowed.rows) if allowed else ()  # they end when they must
    for at, row in enumerate(rows):
        draws, params = row.draws, row.draws.params
        if params.logit_bias:
            shifts.append((at, *draws.bias))
        if row.position < params.min_tokens and at not in held:
            # added, so that NaN stays; what follows leaves -inf as it is
            shifts.append((at, params.end_ids, -np.inf))
        if draws.said is not None:
            repeats.append((at, draws.prompt, params.repetition_penalty))
            said = draws.said + array("q", row.drafted)
            repeats.append((at, said, params.repetition_penalty))
        if draws.counts is not None:
            counts = Counter(draws.counts)
            counts.update(row.drafted)
            often = np.fromiter(counts.values(), np.float32)
            less = -params.presence_penalty - params.frequency_penalty * often
            counted.append((at, np.fromiter(counts, np.int64), less))
    if not (shifts or repeats or counted or allowed):
        return raw
    scores = raw.clone(memory_format=torch.contiguous_format)
    if allowed:
        _ban(scores, allowed, vocabulary)
    flat, size = scores.view(-1), (vocabulary, scores[0].numel())
    if shifts:
        flat.index_add_(0, *_places(shifts, size, flat.device))
    if repeats:
        index, penalty = _places(repeats, size, flat.device)
        was = flat[index]  # a token seen twice is read and written twice, and changed once
        flat[index] = torch.where(was < 0, was * penalty, was / penalty)
    if counted:
        flat.index_add_(0, *_places(counted, size, flat.device))
    return scores


def _ban(scores: torch.Tensor, allowed: TokenMask, vocabulary: int) -> None:
    """-inf where nothing is allowed; a row is broken if what is allowed in it is."""
    banned = ~allowed.tokens.to(scores.device, non_blocking=True)
    for at, ban in zip(allowed.rows, banned, strict=True):
        scores[at].view(-1)[:vocabulary].masked_fill_(ban, -torch.inf)


def _places(
    edits: Sequence[Edit], size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the flattened rows, and how much. An id out of range must not hit another row."""
    vocabulary, width = size
    index, amounts = [], []
    for at, tokens, amount in edits:
        ids = np.asarray(tokens, np.int64)
        valid = (ids >= 0) & (ids < vocabulary)
        index.append(ids[valid] + at * width)
        amounts.append(np.broadcast_to(np.asarray(amount, np.float32), ids.shape)[valid])
    places, values = torch.from_numpy(np.concatenate(index)), np.concatenate(amounts)
    return places.to(device), torch.from_numpy(values).to(device)


def _best(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of each row's maximum, and the maximum: NaN where the row has one."""
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1)
    each = torch.arange(len(blocks), device=blocks.device)
    return block * BLOCK + blocks[each, block].argmax(-1), maxima[each, block]


def _kind(params: SamplingParams) -> str:
    if params.temperature <= 0.0:
        return "greedy"
    if params.top_k > 0 or params.min_p > 0.0:
        return "top"
    return "nucleus" if params.top_p < 1.0 else "any"


def _settings(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """[5, R] float64: temperature, top_p, top_k, min_p and the uniform number."""
    columns = []
    for row in rows:
        own, draws = row.draws.params, row.draws
        number = uniform(own.seed, draws.choice, row.position)
        columns.append((max(own.temperature, COLDEST), own.top_p, own.top_k, own.min_p, number))
    return torch.tensor(columns, dtype=torch.float64, device=device).T


def _drawn(
    kind: str, blocks: torch.Tensor, peak: torch.Tensor, settings: torch.Tensor
) -> torch.Tensor:
    """Tokens [R] drawn from scores [R, N, BLOCK] with maxima [R]."""
    if kind == "top":
        return _drawn_from_top(blocks, peak, settings, None, CANDIDATES)
    weights = _weights(blocks, peak, settings[0])
    if kind == "any":
        return _pick(weights, settings[4])
    mass = weights.sum(-1).double().sum(-1)
    return _drawn_from_top(blocks, peak, settings, mass, CANDIDATES)


def _weights(blocks: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities times a constant: the largest is 1."""
    cooled = (blocks - peak[:, None, None]).div_(temperature[:, None, None].float())
    return cooled.exp_()


def _drawn_from_top(
    blocks: torch.Tensor,
    peak: torch.Tensor,
    settings: torch.Tensor,
    mass: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """Looks at the `width` largest logits, and for the rows that need it at more.

    top_p is a part of `mass` [R], or else of what min_p and top_k keep.
    """
    temperature, top_p, top_k, min_p, number = settings[..., None]
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
        return _pick(whole.view_as(blocks), number[:, 0])
    ids, order = ids.sort()
    sums = weights.gather(1, order).cumsum(-1)
    tokens = ids.gather(1, _passed(sums, number[:, 0] * sums[:, -1])[:, None])[:, 0]
    # Equals of the smallest value may be missing: the last one needed must be larger.
    needed = values.gather(1, (limit if mass is None else count) - 1)
    few = (needed == values[:, -1:])[:, 0].nonzero()[:, 0]
    if len(few):
        part = blocks[few], peak[few], settings[:, few], None if mass is None else mass[few]
        tokens[few] = _drawn_from_top(*part, width * WIDEN)
    return tokens


def _top(blocks: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def _pick(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Tokens where the sums of weights [R, N, BLOCK] pass a part [R] of all: block, then place."""
    sums = weights.sum(-1).double().cumsum(-1)
    target = number * sums[:, -1]
    block = _passed(sums, target)
    below = pad(sums, (1, 0)).gather(1, block[:, None]).squeeze(1)
    each = torch.arange(len(weights), device=weights.device)
    inside = weights[each, block].double().cumsum(-1)
    return block * BLOCK + _passed(inside, target - below)


def _passed(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First place in sums [R, N] above target [R], at most that where they stop rising."""
    return ((sums <= target[:, None]) & (sums < sums[:, -1:])).sum(-1)


def _scored(raw: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[SampledToken]:
    """Choices of `tokens` [R] with log-probabilities: theirs, and of the best counts[i]."""
    peak, most = raw.amax((1, 2)), max(counts)
    shift = _weights(raw, peak, torch.ones_like(peak)).sum(-1).double().sum(-1).log() + peak
    own = raw.flatten(1).gather(1, tokens[:, None].clamp(min=0))
    parts = [tokens[:, None].double(), own - shift[:, None]]
    if most:
        values, ids = _top(raw, max(most, CANDIDATES))
        parts += [values[:, :most] - shift[:, None], ids[:, :most].double()]
    choices = []
    for count, (token, logprob, *rest) in zip(counts, torch.cat(parts, 1).tolist(), strict=True):
        half = len(rest) // 2
        best = list(zip(map(int, rest[half:]), rest[:count], strict=False))
        top = tuple(pair for pair in best if pair[1] > -np.inf)
        choices.append(
            SampledToken(int(token), logprob, top) if token >= 0 else SampledToken(-1, None, ())
        )
    return choices
