"""What sequences try in a step besides the token that is sure: as much as pays, of what their own
text or their grammar proposes. On the worker's thread.
"""

from batching.draft_budget import DraftBudget
from batching.sequence import Chunk, Sequence


class Drafting(DraftBudget):
    """`begin` a step, then `draft` for each sequence in it; once it is launched, `waits_for`."""

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        """For the step that is being scheduled; nothing after a token that is only promised."""
        if sequence.drafter is None or sequence.promised:
            return ()
        output = sequence.output
        most = min(self.room(), sequence.max_tokens - output.count - 1)
        worth = self.worth(sequence.drafter.acceptance, most)
        drafts: tuple[int, ...] = sequence.drafter.draft(sequence.tokens, worth)
        drafts = output.guide.draft(drafts, most) if output.guide else drafts
        self.take(len(drafts))
        return drafts

    def waits_for(self, chunk: Chunk) -> bool:
        """Whether the next draft takes the tokens that this chunk gives. It is told by those before
        them: where words come again, they mostly go on to."""
        sequence, drafter = chunk.sequence, chunk.sequence.drafter
        if not (drafter and chunk.to_sample and chunk.runs):
            return False
        if chunk.drafts or sequence.output.guide:
            return True
        return bool(drafter.draft(sequence.tokens, self.worth(drafter.acceptance, self.room())))

    def verified(self, chunk: Chunk, kept: int) -> dict[str, int]:
        """A chunk's drafts have run, and so many tokens came of it; what is counted of that."""
        drafted, accepted = len(chunk.drafts), max(0, kept - 1)
        chunk.sequence.drafter.verified(drafted, accepted)
        return {"drafted": drafted, "accepted": accepted}
