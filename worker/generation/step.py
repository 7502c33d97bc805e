"""Of a step: what is to be sampled and scored of its chunks, and what it was like."""

import time
from collections import abc
from collections.abc import Mapping

from torch import Tensor

from batching.scheduler import ContinuousScheduler
from batching.sequence import Batch, Chunk, Sequence
from worker.generation.output import SequenceOutput
from worker.grammar.bitmask import MaskRequest
from worker.model.logits_processors import Draw
from worker.model.sampler import SampledToken
from worker.protocol import StepReport

MaskedRow = tuple[int, MaskRequest]  # the first row that it is for


def draws_of(chunks: abc.Sequence[Chunk]) -> tuple[list[Draw], list[MaskedRow]]:
    """What is sampled, and which tokens may be in some of the rows."""
    rows: list[Draw] = []
    masks: list[MaskedRow] = []
    for chunk in chunks:
        if count := chunk.to_sample:
            output: SequenceOutput = chunk.sequence.output
            if output.guide and (mask := output.guide.mask(chunk.drafts)):
                masks.append((len(rows), mask))
            first, drafts = output.count, chunk.drafts
            rows += [Draw(output.sampling, first + n, drafts[:n]) for n in range(count)]
    return rows, masks


def scores_of(batch: Batch, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
    """How likely prompts' tokens are, or what may follow one, where that is asked."""
    scores: dict[Sequence, list[SampledToken]] = {}
    row = 0
    for chunk in batch.chunks if batch.scored else ():
        if positions := chunk.to_score:
            end = row + len(positions)
            scores[chunk.sequence] = chunk.sequence.output.score(logits[row:end], positions)
            row = end
    return scores


def report_of(
    scheduler: ContinuousScheduler, counts: Mapping[str, int], started: float
) -> StepReport:
    """`started`: when the step began."""
    admitted, paged = scheduler.admitted, not scheduler.whole_prompts
    return StepReport(
        **counts,
        cached_tokens=sum(sequence.cached or 0 for sequence in admitted),
        preempted=scheduler.preempted,
        admitted=len(admitted),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        starved=scheduler.starved,
        blocks_used=scheduler.pool.used if paged else 0,
        blocks_total=scheduler.pool.count if paged else 0,
        total_s=time.monotonic() - started,
        waits_s=tuple(started - s.output.item.accepted_at for s in admitted),
    )
