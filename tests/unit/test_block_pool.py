"""The block pool: allocation, the prefix cache, and what is evicted first."""

import weakref
from collections.abc import Sequence
from typing import Any

from batching.block_pool import BlockPool, BlockTable
from batching.state_pool import StatePool
from tests.scheduling import assert_sound


def opened(pool: BlockPool, tokens: Sequence[int]) -> BlockTable:
    table = pool.open(tokens, pool.match(tokens)[0])
    assert table is not None
    return table


def computed(pool: BlockPool, tokens: Sequence[int]) -> BlockTable:
    table = opened(pool, tokens)
    pool.register(table, tokens, len(tokens))
    return table


def cached(pool: BlockPool, tokens: Sequence[int]) -> list[int]:
    """The blocks of tokens that were computed and are no longer used."""
    table = computed(pool, tokens)
    blocks = list(table.blocks)
    pool.close(table)
    return blocks


def found(pool: BlockPool, tokens: Sequence[int]) -> list[int]:
    return pool.match([*tokens, -1])[0]


A, B, C = [[letter] * 4 for letter in (1, 2, 3)]  # a block each


def pool_of(num_blocks: int, block_size: int = 4, fresh_fraction: float = 1.0) -> BlockPool:
    return BlockPool(num_blocks, block_size, fresh_fraction)


def test_the_longest_computed_prefix_is_found() -> None:
    pool = pool_of(8)
    blocks = cached(pool, A + B + C)
    assert found(pool, A + B + C) == blocks
    assert found(pool, A + B + A) == blocks[:2]
    assert found(pool, B + C) == []  # the same tokens after another prefix
    assert found(pool, A[:3] + B) == []


def matched(pool: BlockPool, tokens: list[int]) -> tuple[list[int], bool]:
    """The matched blocks, and whether more of the prefix is being computed."""
    blocks, pending = pool.match(tokens)
    return blocks, pending is not None


def test_blocks_being_computed_are_pending_until_registered_or_closed() -> None:
    pool = pool_of(8)
    tokens = [*A, *B, *C, 0]
    table = opened(pool, tokens)
    assert matched(pool, tokens) == ([], True)
    assert matched(pool, A) == ([], False)  # the last token is never matched
    assert matched(pool, B + A) == ([], False)
    pool.register(table, tokens, 5)
    assert matched(pool, tokens) == (list(table.blocks[:1]), True)
    assert matched(pool, [*A, *C, 0]) == (list(table.blocks[:1]), False)
    blocks = list(table.blocks)
    pool.close(table)
    assert matched(pool, tokens) == (blocks[:1], False)
    assert_sound(pool, [])


def test_the_least_recently_used_is_evicted_first_and_tails_before_heads() -> None:
    pool = pool_of(6)
    cached(pool, A + B)
    cached(pool, C + B)
    cached(pool, B + A)
    cached(pool, [*A, *B, 0])  # used again
    left = []
    table = opened(pool, [])
    for count in range(1, 7):
        assert pool.grow(table, 4 * count)
        left.append("".join(str(len(found(pool, tokens))) for tokens in (A + B, C + B, B + A)))
    # the block of the last token goes first; it was the tail of C before
    assert left == ["212", "202", "201", "200", "100", "000"]


def test_dropping_cached_blocks_keeps_those_in_use() -> None:
    pool = pool_of(8)
    cached(pool, B + C)
    used = computed(pool, A)
    cached(pool, A + C)
    pool.drop_cached()
    assert found(pool, A + C) == list(used.blocks)
    assert found(pool, B + C) == []
    assert pool.free == 7
    assert opened(pool, C * 7).blocks.count(used.blocks[0]) == 0


def test_unregistered_blocks_are_reused_before_cached_ones() -> None:
    pool = pool_of(4)
    cached(pool, A + B)
    pool.close(opened(pool, [3] * 7))
    opened(pool, [4] * 8)
    assert len(found(pool, A + B)) == 2


def test_unregistered_blocks_are_reused_before_fresh_ones() -> None:
    pool = pool_of(8)
    first = opened(pool, [1] * 7)
    blocks = sorted(first.blocks)
    pool.close(first)
    assert sorted(opened(pool, [2] * 7).blocks) == blocks


def test_fresh_blocks_are_used_before_eviction_up_to_a_fraction() -> None:
    pool = pool_of(8, fresh_fraction=0.5)
    used = {block for n in range(4) for block in cached(pool, [n] * 4)}
    assert len(used) == 4
    assert all(found(pool, [n] * 4) for n in range(4))
    for n in range(4, 20):  # from here on the least recently used is evicted
        used.update(cached(pool, [n] * 4))
        assert [m for m in range(20) if found(pool, [m] * 4)] == list(range(n - 3, n + 1))
    assert len(used) == 4
    assert_sound(pool, [])


def test_beyond_the_fraction_fresh_blocks_are_used_when_all_others_are_in_use() -> None:
    pool = pool_of(8, fresh_fraction=0.5)
    cached(pool, A + B)
    table = opened(pool, [0] * 16)
    assert found(pool, A + B) == []  # its blocks went before the fifth
    assert pool.grow(table, 32)
    assert sorted(table.blocks) == list(range(8))
    assert pool.free == 0
    assert_sound(pool, [table])


def test_trimmed_blocks_are_allocated_next() -> None:
    pool = pool_of(5)
    cached(pool, C + B)
    table = opened(pool, A)
    assert pool.grow(table, 9)
    pool.trim(table, 4)
    assert len(table.blocks) == 1
    assert pool.free == 4
    assert pool.grow(table, 9)
    assert len(found(pool, C + B)) == 2
    assert_sound(pool, [table])


def test_unregistered_blocks_are_not_found() -> None:
    pool = pool_of(8)
    table = computed(pool, A + B)
    pool.unregister(table)
    assert found(pool, A + B) == []
    assert pool.used == 2
    pool.close(table)
    again = computed(pool, A)
    assert found(pool, A + B) == list(again.blocks)
    assert_sound(pool, [again])


def test_blocks_that_others_use_stay_registered() -> None:
    pool = pool_of(8)
    head = cached(pool, A)
    broken = computed(pool, A + B)
    other = opened(pool, [*A, 0])
    pool.unregister(broken)
    pool.close(broken)
    assert found(pool, A + B) == head
    assert_sound(pool, [other])


def test_closing_a_table_drops_its_runner_state_while_a_step_holds_the_table() -> None:
    pool = pool_of(2)
    held = opened(pool, A)
    held.runner_state = group = pool_of(1)  # anything that can be watched
    watched = weakref.ref(group)
    del group
    pool.close(held)
    assert watched() is None


def test_blocks_of_a_paused_sequence_are_not_waited_for() -> None:
    pool, tokens = BlockPool(8, 4), list(range(12))
    table = pool.open(tokens, [])
    assert table is not None
    pool.register(table, tokens, 4)
    assert pool.match(tokens)[1] is not None
    pool.withdraw(table)
    assert pool.match(tokens) == ([table.blocks[0]], None)
    pool.register(table, tokens, 12)
    assert pool.match([*tokens, 0]) == (list(table.blocks), None)


# ── blocks and states that other threads copy: whether a copy is of the contents it was for ──


def run(pool: BlockPool, tokens: list[int]) -> tuple[int, Any]:
    """Compute a block, and the states after it. Return the block, and its description."""
    table = pool.open(tokens, [], checkpoints=(4,))
    assert table is not None
    pool.plan_states(table, 4)
    pool.commit_states(table, 4)
    pool.register(table, tokens, 4)
    [block] = table.blocks
    description = pool.describe(block)
    pool.close(table)
    return block, description


def test_a_block_has_its_description_until_it_is_evicted() -> None:
    pool = BlockPool(2, 4)
    block, description = run(pool, A)
    run(pool, B)
    assert description
    assert pool.describe(block) == description
    run(pool, C)  # in the memory of A, which is the least recently used
    assert pool.describe(block) != description
    run(pool, A)
    assert pool.describe(block) != description  # the same contents, perhaps written meanwhile


def test_a_block_never_seems_to_have_its_former_contents() -> None:
    """Another thread may ask between any two changes of the pool."""
    pool, answers = BlockPool(1, 4), list[bool]()
    block, description = run(pool, A)

    class Watched(list[Any]):
        def __setitem__(self, *change: Any) -> None:
            super().__setitem__(*change)
            answers.append(pool.describe(block) == description)

    pool._key_of, pool._prefix_of = Watched(pool._key_of), Watched(pool._prefix_of)
    run(pool, B)
    assert answers == [False] * 3  # evicted, then announced


def test_states_have_their_description_until_their_slot_is_taken_again() -> None:
    pool = BlockPool(8, 4, states=StatePool(1, 1))
    block, description = run(pool, A)
    prefix, checkpoint = description
    assert checkpoint is not None
    assert pool.describe(block) == description
    run(pool, B)  # has the only checkpoint
    run(pool, C)
    assert pool.describe(block) == (prefix, None)
