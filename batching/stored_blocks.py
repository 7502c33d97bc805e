"""A block pool whose registered blocks are copied by other threads, while they may be evicted.

A thread copies memory first and asks `holds` afterwards: a block leaves the prefix cache, and a
slot is taken, before anything else is written there. The worker's thread changes all this.
"""

from collections.abc import Iterable
from typing import NamedTuple

from batching.block_pool import BlockPool, Prefix
from batching.state_pool import StatePool


class RegisteredBlock(NamedTuple):
    """A block of the prefix cache, and the contents that it has."""

    number: int
    prefix: Prefix  # that it ends
    checkpoint: tuple[int, int] | None  # the slot of the states after it, and the slot's use


class StoredStatePool(StatePool):
    """Counts how often each slot was taken."""

    def __init__(self, max_sequences: int, max_checkpoints: int, max_drafts: int = 0) -> None:
        super().__init__(max_sequences, max_checkpoints, max_drafts)
        self.uses = [0] * self.num_slots

    def checkpoint(self, prefix: Prefix) -> tuple[int, int] | None:
        """Return the slot of a prefix's checkpoint, and which use of the slot this is."""
        slot = self._checkpoints.get(prefix)
        return None if slot is None else (slot, self.uses[slot])

    def _take(self) -> int:
        slot = super()._take()
        self.uses[slot] += 1
        return slot


class StoredBlockPool(BlockPool):
    """A block pool with StoredStatePool, or no states."""

    states: StoredStatePool | None

    def contents_of(self, blocks: Iterable[int]) -> list[RegisteredBlock]:
        """Return registered blocks with what they hold. On the worker's thread."""
        prefixes = ((block, self._prefix_of[block]) for block in blocks)
        states = self.states
        return [
            RegisteredBlock(block, prefix, states.checkpoint(prefix) if states else None)
            for block, prefix in prefixes
        ]

    def holds(self, block: RegisteredBlock) -> bool:
        """Return whether a block has been registered all the time since `contents_of`. From any
        thread."""
        number = block.number
        return self._key_of[number] is not None and self._prefix_of[number] == block.prefix

    def holds_states(self, block: RegisteredBlock) -> bool:
        """Return whether the states after a block are in its slot all the time since then. From any
        thread."""
        slot, use = block.checkpoint or (0, -1)
        return self.states is not None and self.states.uses[slot] == use
