"""A step under way: launched, its draws made, none of them read yet."""

from collections import abc
from dataclasses import dataclass

from torch import Tensor

from batching.sequence import Batch, Chunk, Sequence
from worker.grammar.bitmask import MaskRequest, Masks, PendingMask
from worker.model.logits_processors import Draw
from worker.model.sampler import Sampled, SampledToken


@dataclass(frozen=True, slots=True)
class Flight:
    """`sampled` is to be read, and told to whoever still runs then."""

    batch: Batch
    scores: dict[Sequence, list[SampledToken]]
    sampled: Sampled
    launched_at: float

    @property
    def drawn(self) -> Tensor | None:
        """[R], on the device: what the promised tokens of the next step stand for."""
        return self.sampled.tokens if len(self.sampled.tokens) else None


def draws_of(chunks: abc.Sequence[Chunk], masks: Masks) -> tuple[list[Draw], PendingMask | None]:
    """What decides the tokens of the chunks' rows, by all that came before; masks are computed
    from here on. What a row that nobody waits for gives does not count."""
    draws: list[Draw] = []
    requests: list[tuple[int, MaskRequest]] = []  # with the first row that each is for
    for chunk in chunks:
        if count := chunk.to_sample:
            output, drafts = chunk.sequence.output, chunk.drafts
            if output.guide and chunk.runs and (request := output.guide.mask(drafts)):
                requests.append((len(draws), request))
            draws += [Draw(output.sampling, output.count + n, drafts[:n]) for n in range(count)]
    return draws, masks.begin(requests) if requests else None


def scores_of(batch: Batch, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
    """How likely prompts' tokens are, or what may follow one, where that is asked: read at once."""
    scores, row = {}, 0
    for chunk in batch.chunks if batch.scored else ():
        if positions := chunk.to_score:
            end = row + len(positions)
            scores[chunk.sequence] = chunk.sequence.output.score(logits[row:end], positions)
            row = end
    return scores
