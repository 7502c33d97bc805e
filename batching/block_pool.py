"""The block pool: bookkeeping of the paged KV cache and of its prefix cache.

Memory is divided into blocks of `block_size` token positions; a sequence's table lists its blocks
in order. A full block is registered under its tokens and the prefix before it, so that a chain of
blocks identifies the whole prefix exactly, without hashes. A later sequence with the same prefix
and the same cache namespace takes those blocks instead of computing them. Blocks that no sequence
uses stay registered until their memory is needed, least recently used first, tails before heads.

A block takes memory from its first use on. So blocks are allocated in this order: used ones that
hold nothing; fresh ones, up to a fraction of all; the least recently used registered ones; the
other fresh ones.

Models with recurrent layers also have states (state_pool.py). Their sequences continue from a
prefix only where it has a checkpoint of these, and wait only for one that will get one.

The tensors are in worker/model/attention/kv_cache.py.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batching.state_pool import SequenceState, StatePool, StateSegment

# A token's id. At a position of an image, a digest of the image: its tokens are the same for all.
Content = int | bytes
# Identifies a prefix: the number of the registered block that ends it, or the cache namespace in
# which it is empty.
Prefix = int | bytes
SHARED_NAMESPACE = b""
BlockKey = tuple[Prefix, tuple[Content, ...]]  # the prefix before a block, and the block's contents


@dataclass(eq=False, slots=True)
class BlockTable:
    """One sequence's blocks, and how far they are registered."""

    blocks: "array[int]"  # an array, since each step copies it as a whole
    registered: int  # leading blocks that are computed and registered
    prefix: Prefix  # at the end of those
    # of a model runner that has its own cache instead of blocks; opaque to all others
    runner_state: object = None
    state: SequenceState | None = None  # None: the pool has no states


class BlockPool:
    """`fresh_fraction`: of all blocks, those that are used before registered ones are reused.
    `states`: of recurrent layers, None if there are none. `keeps_prefixes`: blocks are found by
    their contents; False: blocks only count the memory of a model runner's own cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fresh_fraction: float = 1.0,
        states: StatePool | None = None,
        keeps_prefixes: bool = True,
    ) -> None:
        self.keeps_prefixes = keeps_prefixes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self.used = 0
        self._ref_counts = [0] * num_blocks
        # Free blocks: those that hold nothing, last in, first out; registered ones, least recently
        # used first; and all from `_fresh` on, which have never been used.
        self._empty: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fresh = 0
        self._fresh_limit = int(fresh_fraction * num_blocks)
        self._computed: dict[BlockKey, int] = {}  # registered blocks, in use or not
        self.computing: dict[BlockKey, int] = {}  # blocks that a running sequence will register
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._prefix_of: list[Prefix] = [0] * num_blocks  # the prefix that each ends
        self._last_prefix = 0

    @property
    def free(self) -> int:
        return self.num_blocks - self.used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ── the prefix cache ──

    def match(
        self, tokens: Sequence[Content], cache_namespace: bytes = SHARED_NAMESPACE
    ) -> tuple[list[int], BlockKey | None]:
        """Return the computed blocks of the longest prefix of `tokens`; and if a running sequence
        is computing more of it, the key of the last of those blocks. The last token is never
        matched: its output is needed."""
        blocks: list[int] = []
        prefix: Prefix = cache_namespace
        pending, is_computed = None, True
        if not self.keeps_prefixes:
            return blocks, pending
        for end in range(self.block_size, len(tokens), self.block_size):
            key = (prefix, tuple(tokens[end - self.block_size : end]))
            if is_computed and (block := self._computed.get(key)) is not None:
                blocks.append(block)
            elif (block := self.computing.get(key)) is not None:
                is_computed = False
                if self.is_awaited(key):
                    pending = key
            else:
                break
            prefix = self._prefix_of[block]
        return blocks, pending

    def is_awaited(self, key: BlockKey | None) -> bool:
        """Return whether a running sequence is computing a block from which others continue."""
        block = self.computing.get(key) if key else None
        if block is None:
            return False
        return not self.states or self._prefix_of[block] in self.states.planned

    def resumable(self, blocks: Sequence[int]) -> int:
        """Return after how many of these matched blocks a sequence can continue."""
        if not self.states:
            return len(blocks)
        counts = range(len(blocks), 0, -1)
        return next((n for n in counts if self._prefix_of[blocks[n - 1]] in self.states), 0)

    def describe(self, block: int) -> tuple[Prefix, tuple[int, int] | None] | None:
        """Return what identifies the contents of a registered block, and of the states after it;
        None if it is not registered. From any thread: it changes before other contents are written,
        so a copy that was made between two equal descriptions is whole."""
        if self._key_of[block] is None:
            return None
        prefix = self._prefix_of[block]  # after the key, as it changes before that
        return prefix, self.states.checkpoint(prefix) if self.states else None

    # ── a sequence's table ──

    def open(
        self,
        tokens: Sequence[Content],
        matched: Sequence[int],
        reserve: int = 0,
        cache_namespace: bytes = SHARED_NAMESPACE,
        checkpoints: Iterable[int] = (),
    ) -> BlockTable | None:
        """Return a table with room for all `tokens`, which begins with the `matched` blocks; None
        if that would leave fewer than `reserve` free. Later sequences wait for the prompt's other
        full blocks instead of computing them as well. `checkpoints`: numbers of tokens after which
        the states of recurrent layers are kept."""
        unused = sum(self._ref_counts[block] == 0 for block in matched)
        needed = self.blocks_for(len(tokens)) - len(matched) + unused
        if needed + reserve > self.free:
            return None
        state, last = None, self._prefix_of[matched[-1]] if matched else None
        if self.states:
            state = self.states.open(last, len(matched) * self.block_size, checkpoints)
            if state is None:
                return None
        for block in matched:
            self.used += not self._ref_counts[block]
            self._ref_counts[block] += 1
            self._cached.pop(block, None)
        prefix = cache_namespace if last is None else last
        table = BlockTable(array("i", matched), len(matched), prefix, state=state)
        self.grow(table, len(tokens))
        self._announce(table, tokens)
        return table

    def _announce(self, table: BlockTable, tokens: Sequence[Content]) -> None:
        """Mark the full blocks that the table's sequence is about to compute."""
        prefix, size = table.prefix, self.block_size
        if not self.keeps_prefixes:
            return
        for i in range(table.registered, len(tokens) // size):
            key = (prefix, tuple(tokens[i * size : (i + 1) * size]))
            if key in self._computed or key in self.computing:
                return  # the sequence reuses no prefix: another one computes the rest of the chain
            block = table.blocks[i]
            self.computing[key] = block
            prefix = self._new_prefix(block, key)
            if self.states and table.state and (i + 1) * size in table.state.positions:
                self.states.planned.add(prefix)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` in all. Return False, and take nothing, if there are too few
        blocks."""
        needed = self.blocks_for(tokens) - len(table.blocks)
        if needed > self.free:
            return False
        for _ in range(needed):
            block = self._allocate()
            self.used += 1
            self._ref_counts[block] = 1
            table.blocks.append(block)
        return True

    def _allocate(self) -> int:
        if self._empty:
            return self._empty.pop()
        if self._fresh < (self._fresh_limit if self._cached else self.num_blocks):
            self._fresh += 1
            return self._fresh - 1
        return self._evict()

    def _evict(self) -> int:
        """Remove the least recently used block from the prefix cache."""
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._computed[key]
        self._key_of[block] = None
        self._drop_checkpoint(block)
        return block

    def _drop_checkpoint(self, block: int) -> None:
        if self.states:
            self.states.drop(self._prefix_of[block])

    def register(self, table: BlockTable, tokens: Sequence[Content], computed: int) -> None:
        """Let other sequences find the full blocks among the first `computed` tokens."""
        while self.keeps_prefixes and (end := (table.registered + 1) * self.block_size) <= computed:
            block = table.blocks[table.registered]
            key = (table.prefix, tuple(tokens[end - self.block_size : end]))
            if self.computing.get(key) == block:
                del self.computing[key]
                self._computed[key] = block
                if self.states:
                    self.states.planned.discard(self._prefix_of[block])
            elif (other := self._computed.get(key, self.computing.get(key))) is not None:
                block = other  # it holds the same tokens: the chain continues from it
            else:
                self._new_prefix(block, key)
                self._computed[key] = block
            table.prefix = prefix = self._prefix_of[block]
            table.registered += 1
            if self.states and table.state:
                self.states.register(table.state, end, prefix)

    # ── states of recurrent layers ──

    def plan_states(self, table: BlockTable, end: int, drafts: int = 0) -> tuple[StateSegment, ...]:
        """Return the segments of a step that runs a sequence's tokens up to `end`, then drafts."""
        return self.states.plan(table.state, end, drafts) if self.states and table.state else ()

    def commit_states(self, table: BlockTable, tokens: int) -> None:
        """Record that the states are those of `tokens` tokens. Those at full blocks are kept."""
        if self.states and table.state:
            self.states.commit(table.state, tokens, tokens // self.block_size * self.block_size)

    # ── freeing blocks ──

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Free what `grow` took beyond `tokens`, and the states of drafts; those blocks are
        allocated next."""
        if self.states and table.state:
            self.states.drop_drafts(table.state)
        while len(table.blocks) > self.blocks_for(tokens):
            block = table.blocks.pop()
            self.used -= 1
            self._ref_counts[block] = 0
            self._empty.append(block)

    def drop_cached(self) -> None:
        """Remove the blocks that no sequence uses from the prefix cache."""
        while self._cached:
            self._empty.append(self._evict())

    def unregister(self, table: BlockTable) -> None:
        """Remove the blocks that this sequence alone uses from the prefix cache."""
        for block in table.blocks:
            key = self._key_of[block]
            if (
                self._ref_counts[block] == 1
                and key is not None
                and self._computed.get(key) == block
            ):
                del self._computed[key]
                self._key_of[block] = None
                self._drop_checkpoint(block)

    def withdraw(self, table: BlockTable) -> None:
        """Let no sequence wait for the blocks that this one has not computed."""
        for block in table.blocks[table.registered :]:
            key = self._key_of[block]
            if key is not None and self.computing.get(key) == block:
                del self.computing[key]
                self._key_of[block] = None
                self._drop_checkpoint(block)  # of another sequence that computed it as well
                if self.states:
                    self.states.planned.discard(self._prefix_of[block])

    def close(self, table: BlockTable) -> None:
        """Free all blocks; registered ones can be found until their memory is needed."""
        self.withdraw(table)
        for block in reversed(table.blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            self.used -= 1
            if self._key_of[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None
        if self.states and table.state:
            self.states.close(table.state)
            table.state = None
        # chunks of a failed step may keep the table alive, but not what it refers to
        table.blocks, table.runner_state = array("i"), None

    def _new_prefix(self, block: int, key: BlockKey) -> int:
        """Number the prefix that ends with a block."""
        self._last_prefix += 1
        self._prefix_of[block] = self._last_prefix  # before the key: other threads read both
        self._key_of[block] = key
        return self._last_prefix
