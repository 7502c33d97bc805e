"""Changes of logits before sampling: bias, bans, penalties, processors and masks."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from worker.device.async_copy import to_device
from worker.model.sampler import SamplingRow, TokenMask

Change: TypeAlias = tuple[int, ArrayLike, ArrayLike]  # row, token ids, one amount or one for each


def process_logits(
    raw: Tensor, rows: Sequence[SamplingRow], vocab_size: int, mask: TokenMask | None
) -> Tensor:
    """Return a copy of the logits [R, …] with bias, bans, penalties, processors and mask applied.

    The first `vocab_size` values of a row are tokens. Return `raw` itself if nothing applies.
    """
    added: list[Change] = []
    repeated: list[Change] = []
    counted: list[Change] = []
    masked = set(mask.rows) if mask else ()  # a grammar decides when these may stop
    for n, row in enumerate(rows):
        state, params = row.state, row.state.params
        if params.logit_bias:
            added.append((n, *state.bias))
        if row.position < params.min_tokens and n not in masked:
            # added, so that NaN stays NaN; later changes keep -inf
            added.append((n, state.stop_token_ids, -np.inf))
        if state.has_repetition_penalty or state.has_count_penalty:
            output, counts = state.counts.with_drafts(row.drafted)
            if state.has_repetition_penalty:
                penalty = params.repetition_penalty
                repeated += [(n, ids, penalty) for ids in (state.prompt, output)]
            if state.has_count_penalty:
                amounts = -params.presence_penalty - params.frequency_penalty * counts
                counted.append((n, output, amounts))
    with_processors = [n for n, row in enumerate(rows) if row.state.has_processors]
    allowed = [n for n, row in enumerate(rows) if row.state.params.allowed_token_ids]
    if not (added or repeated or counted or with_processors or allowed or mask):
        return raw
    scores = raw.clone(memory_format=torch.contiguous_format)
    flat, row_size = scores.view(-1), scores[0].numel()
    if added:
        flat.index_add_(0, *_flat_changes(added, vocab_size, row_size, flat.device))
    if repeated:
        index, factor = _flat_changes(repeated, vocab_size, row_size, flat.device)
        before = flat[index]  # a token in prompt and output is read and written twice: one change
        flat[index] = torch.where(before < 0, before * factor, before / factor)
    if counted:
        flat.index_add_(0, *_flat_changes(counted, vocab_size, row_size, flat.device))
    for n in allowed:
        tokens, ids = scores[n].view(-1), to_device(rows[n].state.allowed_token_ids, scores.device)
        kept = tokens[ids]
        tokens.fill_(-torch.inf)[ids] = kept
    banned: dict[int, Tensor] = {}
    if mask:
        masked_tokens = ~to_device(mask.tokens.numpy(), scores.device)
        banned = dict(zip(mask.rows, masked_tokens, strict=True))
        for n, row_banned in banned.items():
            scores[n].view(-1)[:vocab_size].masked_fill_(row_banned, -torch.inf)
    for n in with_processors:
        _run_processors(scores[n].view(1, -1)[:, :vocab_size], rows[n], banned.get(n))
    return scores


def _run_processors(scores: Tensor, row: SamplingRow, banned: Tensor | None) -> None:
    """Replace the masked scores [1, V] of a row by those that its processors and warpers return.

    Processors that leave no token, of those that the mask allows, have no effect. Scores with a NaN
    stay.
    """
    params, output = row.state.params, np.array((*row.state.output_ids, *row.drafted), np.int64)
    ids = to_device(np.concatenate((row.state.prompt_ids, output)), scores.device)[None]
    processed = scores
    for processor in params.processors:
        processed = processor(ids, processed)
    if banned is not None:
        processed = processed.masked_fill(banned, -torch.inf)
    processed = torch.where(processed.amax() > -torch.inf, processed, scores)
    if params.warpers:
        usable = processed.amax().isfinite()
        warped = torch.where(usable, processed, 0.0)
        for warper in params.warpers:
            warped = warper(ids, warped)
        processed = torch.where(usable, warped, processed)
    scores.copy_(processed)


def _flat_changes(
    changes: Sequence[Change], vocab_size: int, row_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the indices into the flattened rows and the amounts, without ids out of range, which
    would change another row."""
    ids = np.concatenate([np.asarray(tokens, np.int64) for _, tokens, _ in changes])
    counts = [np.size(tokens) for _, tokens, _ in changes]
    rows = np.repeat([row for row, _, _ in changes], counts)
    values = np.concatenate(
        [
            np.broadcast_to(np.asarray(amount, np.float32), count)
            for (_, _, amount), count in zip(changes, counts, strict=True)
        ]
    )
    valid = (ids >= 0) & (ids < vocab_size)
    index = ids + rows * row_size
    return to_device(index[valid], device), to_device(values[valid], device)
