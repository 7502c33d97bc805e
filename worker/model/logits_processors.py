"""What changes logits before a token is drawn from them: bias, penalties, bans, a grammar's mask.

Here is also what a draw is made by: a request's parameters and the tokens that penalties look at.
The draw itself is in sampler.py, which comes here only where one of its rows asks for a change.
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

from worker.model.transfers import to_device

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


class Draw(NamedTuple):
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
    raw: Tensor, draws: Sequence[Draw], vocabulary: int, mask: TokenMask | None
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
