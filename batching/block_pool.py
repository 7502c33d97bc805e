"""Paged key-value memory: which block holds which tokens, who uses it, what may be reused.

Memory is cut into blocks of `size` token positions; a sequence's table lists its blocks in order.
A full block is registered under its tokens and the block before it, so that the chain of blocks
identifies the whole prefix, exactly and without any hash. A later sequence that begins
with the same tokens takes those blocks instead of computing them, if its chain has the same root:
who may not know what the other asked begins at another. Blocks that nobody uses stay registered
until the room is needed, least recently used first, tails before heads.

A block costs memory from its first use on. So what is given out is, in this order: blocks that were
used and hold nothing now; fresh ones, until a share of all has been used; the least recently used
of the registered; more fresh ones, when all others are in use.

Only numbers live here; the tensors are in worker/model/attention/paged.py.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# A token's id. In the place of what is no text, as of a picture, a digest of it: its tokens are
# the same for all.
Content = int | bytes
ROOT = b""  # of chains that are everybody's
Node = int | bytes  # a block that has been named; before the first, the chain's root
Key = tuple[Node, tuple[Content, ...]]  # the node before, and what the block holds


@dataclass(eq=False, slots=True)
class BlockTable:
    """One sequence's blocks, and how far they have been registered."""

    blocks: "array[int]"  # copied as a whole: a step has as many as its sequences are long
    registered: int  # leading blocks whose tokens are computed and registered
    node: Node  # of the last of them
    kept: Any = None  # of the sequence, by a model runner that has no use for blocks


class BlockPool:
    """`share`: the part of all blocks that is used before registered ones are given out."""

    def __init__(self, count: int, size: int, share: float = 1.0) -> None:
        self.count = count
        self.size = size
        self.used = 0
        self._refs = [0] * count
        # what may be given out: used ones with nothing in them, the last one first; registered
        # ones in this order; and all from `_touched` on, which have never been used
        self._idle: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._touched = 0
        self._enough = int(share * count)
        self._block_of: dict[Key, int] = {}  # computed, in use or not
        self.computing: dict[Key, int] = {}  # promised by a sequence that is being computed
        self._key_of: list[Key | None] = [None] * count
        self._node_of: list[Node] = [0] * count
        self._last_node = 0

    @property
    def free(self) -> int:
        return self.count - self.used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # ── reuse ──

    def match(self, tokens: Sequence[Content], root: bytes = ROOT) -> tuple[list[int], Key | None]:
        """Computed blocks that hold the longest prefix of `tokens`; and if somebody is just
        computing the next one, the key of the last that will be there then. The last token is
        never matched: its output is wanted."""
        blocks: list[int] = []
        node: Node = root
        awaited = None
        for end in range(self.size, len(tokens), self.size):
            key = (node, tuple(tokens[end - self.size : end]))
            if awaited is None and (block := self._block_of.get(key)) is not None:
                blocks.append(block)
            elif (block := self.computing.get(key)) is not None:
                awaited = key
            else:
                break
            node = self._node_of[block]
        return blocks, awaited

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of these nobody uses: taking them makes the free ones fewer."""
        return sum(self._refs[block] == 0 for block in blocks)

    # ── a sequence's table ──

    def open(
        self,
        tokens: Sequence[Content],
        matched: Sequence[int],
        reserve: int = 0,
        root: bytes = ROOT,
    ) -> BlockTable | None:
        """A table with room for all `tokens`, beginning with the `matched` blocks; None if that
        leaves less than `reserve`. The prompt's other full blocks are promised to whoever comes
        next."""
        wanted = self.blocks_for(len(tokens)) - len(matched) + self.unused(matched)
        if wanted + reserve > self.free:
            return None
        for block in matched:
            self.used += not self._refs[block]
            self._refs[block] += 1
            self._cached.pop(block, None)
        node = self._node_of[matched[-1]] if matched else root
        table = BlockTable(array("i", matched), len(matched), node)
        self.grow(table, len(tokens))
        self._promise(table, tokens)
        return table

    def _promise(self, table: BlockTable, tokens: Sequence[Content]) -> None:
        node = table.node
        for i in range(table.registered, len(tokens) // self.size):
            key = (node, tuple(tokens[i * self.size : (i + 1) * self.size]))
            if key in self._block_of or key in self.computing:
                return  # a sequence that takes no prefix: what follows hangs on another's block
            block = table.blocks[i]
            self.computing[key] = block
            node = self._name(block, key)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` in all; False, and nothing taken, if there are too few blocks."""
        wanted = self.blocks_for(tokens) - len(table.blocks)
        if wanted > self.free:
            return False
        for _ in range(wanted):
            block = self._take()
            self.used += 1
            self._refs[block] = 1
            table.blocks.append(block)
        return True

    def _take(self) -> int:
        if self._idle:
            return self._idle.pop()
        if self._touched < (self._enough if self._cached else self.count):
            self._touched += 1
            return self._touched - 1
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block

    def register(self, table: BlockTable, tokens: Sequence[Content], computed: int) -> None:
        """The keys and values of the first `computed` tokens are there: let others find them."""
        while (end := (table.registered + 1) * self.size) <= computed:
            block = table.blocks[table.registered]
            key = (table.node, tuple(tokens[end - self.size : end]))
            if self.computing.get(key) == block:
                del self.computing[key]
                self._block_of[key] = block
            elif (other := self._block_of.get(key, self.computing.get(key))) is not None:
                block = other  # it has the same tokens: go on from that one
            else:
                self._name(block, key)
                self._block_of[key] = block
            table.node = self._node_of[block]
            table.registered += 1

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Give back what `grow` took beyond `tokens`: the next to be given out again."""
        while len(table.blocks) > self.blocks_for(tokens):
            block = table.blocks.pop()
            self.used -= 1
            self._refs[block] = 0
            self._idle.append(block)

    def forget(self, table: BlockTable) -> None:
        """What is in blocks that this sequence alone uses is not to be found by others."""
        for block in table.blocks:
            key = self._key_of[block]
            if self._refs[block] == 1 and key is not None and self._block_of.get(key) == block:
                del self._block_of[key]
                self._key_of[block] = None

    def close(self, table: BlockTable) -> None:
        """Give all blocks back; what is registered can be found until its room is needed."""
        for block in reversed(table.blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self.used -= 1
            key = self._key_of[block]
            if key is not None and self.computing.get(key) == block:
                del self.computing[key]
                self._key_of[block] = key = None
            if key is None:
                self._idle.append(block)
            else:
                self._cached[block] = None
        # chunks of a step that failed may still hold it
        table.blocks, table.kept = array("i"), None

    def _name(self, block: int, key: Key) -> int:
        self._last_node += 1
        self._key_of[block] = key
        self._node_of[block] = self._last_node
        return self._last_node
