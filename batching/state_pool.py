"""The state pool: bookkeeping of the fixed-size states of recurrent layers.

A recurrent layer keeps one state for all tokens before a position. Memory is divided into slots; a
slot holds the states of all layers after some tokens. A step reads the slot of a sequence's tokens
so far and writes another one, so a step that raised, or whose tokens are not kept, may run again.
The slots change places once the step counts (`commit`).

A checkpoint is a slot that the prefix cache keeps, by the prefix that its tokens are: a sequence
with this prefix continues from there. A checkpoint is read by any number of sequences and never
written. The least recently used is dropped for a new one, or when its block is reused.

A step with drafts writes the state after each of them to a slot of its own. The one after the last
accepted draft becomes the sequence's.

The tensors are in worker/backends/recurrent.py.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

NO_SLOT = -1  # the state before the first token
# A prompt has at most so many checkpoints, at multiples of CHECKPOINT_TOKENS.
MAX_CHECKPOINTS = 16
CHECKPOINT_TOKENS = 1024
MAX_DRAFTS = 32  # of a step


class StateSegment(NamedTuple):
    """`tokens` tokens that run from the state in slot `source` to the one in slot `target`."""

    tokens: int
    source: int  # or NO_SLOT
    target: int


@dataclass(eq=False, slots=True)
class SequenceState:
    positions: frozenset[int]  # numbers of tokens after which a checkpoint is wanted
    current: int = NO_SLOT  # the state after `tokens` tokens
    target: int = NO_SLOT  # the slot that the next step writes
    tokens: int = 0
    end: int = 0  # tokens after the planned step, without drafts
    drafts: dict[int, int] = field(default_factory=dict)  # slots after drafts, by number of tokens
    # Slots of checkpoints whose blocks are not registered yet, by their number of tokens.
    pending: dict[int, int] = field(default_factory=dict)
    # The checkpoint among the generated tokens, which the next one replaces.
    latest: Hashable | None = None


class StatePool:
    """Slots for `max_sequences` sequences at a time, `max_checkpoints` checkpoints, and
    `max_drafts` drafts in a step.

    A sequence uses two slots besides those of checkpoints, so there is always a free one.
    """

    def __init__(self, max_sequences: int, max_checkpoints: int, max_drafts: int = 0) -> None:
        self.max_sequences = max_sequences
        self.max_checkpoints = max_checkpoints
        self.max_drafts = max_drafts
        self.num_slots = 2 * max_sequences + max_checkpoints + max_drafts
        self.sequences = 0
        # prefixes whose checkpoint a running sequence will write
        self.planned: set[Hashable] = set()
        # slots by prefix, least recently used first
        self._checkpoints: OrderedDict[Hashable, int] = OrderedDict()
        self._pending = 0  # checkpoints of all sequences whose blocks are not registered yet
        self._ref_counts = [0] * self.num_slots
        self._uses = [0] * self.num_slots  # how often each was taken
        self._empty: list[int] = []  # last in, first out: memory that was used already
        self._fresh = 0  # all from here on have never been used

    @property
    def used(self) -> int:
        return self._fresh - len(self._empty)

    # ── checkpoints ──

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._checkpoints

    def checkpoint(self, prefix: Hashable) -> tuple[int, int] | None:
        """Return the slot of a prefix's checkpoint, and which use of the slot this is."""
        slot = self._checkpoints.get(prefix)
        return None if slot is None else (slot, self._uses[slot])

    def drop(self, prefix: Hashable) -> None:
        """Remove the checkpoint of a prefix, if it has one."""
        slot = self._checkpoints.pop(prefix, None)
        if slot is not None:
            self._give_back(slot)

    def register(self, state: SequenceState, tokens: int, prefix: Hashable) -> None:
        """Let other sequences find the checkpoint after `tokens` tokens, if there is one."""
        slot = state.pending.pop(tokens, None)
        if slot is None:
            return
        self._pending -= 1
        if prefix in self._checkpoints:
            self._give_back(slot)
        else:
            self._checkpoints[prefix] = slot
        self._checkpoints.move_to_end(prefix)
        if tokens not in state.positions:
            self._drop_latest(state)
            state.latest = prefix

    def _has_room(self) -> bool:
        """Make room for another checkpoint; return False if all are of running steps."""
        if len(self._checkpoints) + self._pending < self.max_checkpoints:
            return True
        if not self._checkpoints:
            return False
        self.drop(next(iter(self._checkpoints)))
        return True

    def _drop_latest(self, state: SequenceState) -> None:
        if state.latest is not None:
            self.drop(state.latest)
            state.latest = None

    # ── a sequence's slots ──

    def open(
        self, prefix: Hashable | None, tokens: int, positions: Iterable[int] = ()
    ) -> SequenceState | None:
        """Return the state of a sequence that continues from a prefix with a checkpoint, of so
        many tokens, or that begins (None); None if too many sequences have one."""
        if self.sequences >= self.max_sequences:
            return None
        self.sequences += 1
        state = SequenceState(frozenset(positions), tokens=tokens)
        if prefix is not None:
            state.current = self._checkpoints[prefix]
            self._checkpoints.move_to_end(prefix)
            self._ref_counts[state.current] += 1
        state.target = self._take()
        return state

    def close(self, state: SequenceState) -> None:
        self.sequences -= 1
        self._drop_pending(state)
        self.drop_drafts(state)
        for slot in (state.current, state.target):
            if slot != NO_SLOT:
                self._give_back(slot)

    def plan(self, state: SequenceState, end: int, drafts: int = 0) -> tuple[StateSegment, ...]:
        """Return the segments of a step that runs the sequence's tokens up to `end`, divided at
        its checkpoints, and then drafts; the caller counts those of a step."""
        self._drop_pending(state, after=state.tokens)
        self.drop_drafts(state)
        state.end = end
        segments: list[StateSegment] = []
        start, source = state.tokens, state.current
        for position in sorted(state.positions):
            if start < position < end and self._has_room():
                slot = self._take()
                self._pending += 1
                state.pending[position] = slot
                segments.append(StateSegment(position - start, source, slot))
                start, source = position, slot
        segments.append(StateSegment(end - start, source, state.target))
        for position in range(end + 1, end + drafts + 1):
            state.drafts[position] = self._take()
            segments.append(StateSegment(1, segments[-1].target, state.drafts[position]))
        return tuple(segments)

    def commit(self, state: SequenceState, tokens: int, boundary: int = 0) -> None:
        """Record that a step's result counts: the state is that of `tokens` tokens. The one after
        `boundary` of them, if it was written, becomes a checkpoint if there is room."""
        if tokens <= state.tokens:
            return
        slots = {state.end: state.target, **state.drafts}
        if state.current != NO_SLOT:
            self._give_back(state.current)
        start, state.tokens, state.current = state.tokens, tokens, slots[tokens]
        self._ref_counts[state.current] += 1
        if boundary > start and boundary in slots:
            self._keep(state, boundary, slots[boundary])
        self._give_back(state.target)
        self.drop_drafts(state)
        state.target = self._take()

    def _keep(self, state: SequenceState, tokens: int, slot: int) -> None:
        if tokens not in state.positions:
            self._drop_latest(state)
        if self._has_room():
            self._ref_counts[slot] += 1
            self._pending += 1
            state.pending[tokens] = slot

    def drop_drafts(self, state: SequenceState) -> None:
        """Free the slots of drafts: others draft before a deferred step runs again."""
        for slot in state.drafts.values():
            self._give_back(slot)
        state.drafts.clear()

    def _drop_pending(self, state: SequenceState, after: int = 0) -> None:
        for position in [position for position in state.pending if position > after]:
            self._give_back(state.pending.pop(position))
            self._pending -= 1

    def _take(self) -> int:
        if self._empty:
            slot = self._empty.pop()
        else:
            slot = self._fresh
            self._fresh += 1
        self._ref_counts[slot] = 1
        self._uses[slot] += 1
        return slot

    def _give_back(self, slot: int) -> None:
        self._ref_counts[slot] -= 1
        if not self._ref_counts[slot]:
            self._empty.append(slot)


def checkpoint_positions(tokens: int, block_size: int, shared: Iterable[int] = ()) -> set[int]:
    """Return the numbers of tokens after which a prompt of so many `tokens` has checkpoints: at its
    last full block, after its `shared` beginnings, and at even distances, at most MAX_CHECKPOINTS.

    The last token is never matched, so its block is none.
    """
    ends = {*shared, tokens - 1}
    positions = {end // block_size * block_size for end in ends}
    steps = -(-tokens // CHECKPOINT_TOKENS)
    distance = -(-steps // (MAX_CHECKPOINTS - len(positions))) * CHECKPOINT_TOKENS
    positions |= set(range(distance, tokens, distance))
    return {position for position in positions if position and position % block_size == 0}
