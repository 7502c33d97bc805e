"""What a prompt with pictures has beside its token ids, as numbers: shared by a request's choices.

Known once its pictures have been looked at (worker/vision/viewing.py); until then its sequences
wait, and let others pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A token's id. In the place of what is no text, as of a picture, a digest of it: its tokens are
# the same for all.
Content = int | bytes


@dataclass(eq=False, slots=True)
class Scene:
    """`contents`: of the prompt, what its blocks are found by. `blocks`: places [start, stop) whose
    tokens see each other in both directions, and so are run together. All pictures and blocks lie
    before `end`. `shift`: by how much positions exceed places behind it."""

    ready: bool = False
    contents: Sequence[Content] = ()
    blocks: Sequence[tuple[int, int]] = ()
    end: int = 0
    shift: int = 0

    def undivided(self, start: int, count: int) -> int:
        """How many tokens from `start` on can be run together, of `count` or a few more."""
        for first, stop in self.blocks:
            if first < start + count < stop:
                return (first if first > start else stop) - start
        return count
