"""Blocks and states that other threads copy: a description tells whether a copy is of the contents
that it was for."""

from typing import Any

from batching.block_pool import BlockPool
from batching.state_pool import StatePool

A, B, C = [[letter] * 4 for letter in (1, 2, 3)]  # a block each


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
