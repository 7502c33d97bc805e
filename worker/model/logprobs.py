"""Log-probabilities of tokens, of the raw distribution, for the requests that ask for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.device.async_copy import to_device
from worker.model.sampler import (
    CANDIDATES,
    SampledToken,
    blocked,
    largest,
    relative_weights,
    sum_weights,
)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[SampledToken]:
    """Score the token targets[i] and the `top` best tokens by row i of logits [P, V].

    A row with unusable logits has token -1. Takes two float32 copies of the logits, so callers
    slice long prompts.
    """
    if not targets:
        return []
    if (missing := max(targets) + 1 - logits.shape[1]) > 0:  # such as placeholder ids of images
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    raw = blocked(logits)
    ids = torch.tensor(targets, device=logits.device)
    tokens = torch.where(raw.amax((1, 2)).isfinite(), ids, -1)
    return scored_tokens(score_tokens(raw, tokens, top).tolist(), [top] * len(targets))


def score_tokens(
    raw: Tensor, tokens: Tensor, top: int, given: Sequence[tuple[int, ...]] = ()
) -> Tensor:
    """Return float64 [R, 3 + 2 · at most top]: each of `tokens` [R], its log-probability and the
    number of more likely tokens; then the log-probabilities of the best tokens, or of those that
    are `given` for a row, and their ids."""
    peak = raw.amax((1, 2))
    normalizer = sum_weights(relative_weights(raw, peak)).log() + peak
    logits = raw.flatten(1).gather(1, tokens[:, None].clamp(min=0))
    more_likely = (raw.flatten(1) > logits).sum(1, keepdim=True)
    parts = [tokens[:, None].double(), logits - normalizer[:, None], more_likely.double()]
    if top:
        values, ids = (best[:, :top] for best in largest(raw, max(top, CANDIDATES)))
        if any(given):
            width = ids.shape[1]
            table = np.array([(row + (-1,) * width)[:width] for row in given])
            wanted = to_device(table, ids.device)
            ids = torch.where(wanted < 0, ids, wanted)
            values = raw.flatten(1).gather(1, ids)
        parts += [values - normalizer[:, None], ids.double()]
    return torch.cat(parts, 1)


def scored_tokens(rows: list[list[float]], counts: Sequence[int]) -> list[SampledToken]:
    """Parse rows of score_tokens, with the counts[i] best tokens of row i."""
    sampled = []
    for count, (token, logprob, more_likely, *rest) in zip(counts, rows, strict=True):
        half = len(rest) // 2
        best = zip(map(int, rest[half:]), rest[:count], strict=False)
        top = tuple(pair for pair in best if pair[1] > -np.inf)
        scored = SampledToken(int(token), logprob, top, int(more_likely) + 1)
        sampled.append(scored if token >= 0 else SampledToken(-1))
    return sampled
