"""Blocks and states that other threads copy: whether a copy is of the contents that it was for."""

from typing import Any

from batching.stored_blocks import RegisteredBlock, StoredBlockPool, StoredStatePool

A, B, C = [[letter] * 4 for letter in (1, 2, 3)]  # a block each


def run(pool: StoredBlockPool, tokens: list[int]) -> RegisteredBlock:
    """Compute a block, and the states after it, and return what it holds."""
    table = pool.open(tokens, [], checkpoints=(4,))
    assert table is not None
    pool.plan_states(table, 4)
    pool.commit_states(table, 4)
    pool.register(table, tokens, 4)
    [block] = pool.contents_of(table.blocks)
    pool.close(table)
    return block


def test_a_block_holds_its_contents_until_it_is_evicted() -> None:
    pool = StoredBlockPool(2, 4)
    block = run(pool, A)
    run(pool, B)
    assert pool.holds(block)
    assert not pool.holds_states(block)  # there are none
    run(pool, C)  # in the memory of A, which is the least recently used
    assert not pool.holds(block)
    run(pool, A)
    assert not pool.holds(block)  # the same contents, perhaps written meanwhile


def test_a_block_never_seems_to_hold_its_former_contents() -> None:
    """Another thread may ask between any two changes of the pool."""
    pool, answers = StoredBlockPool(1, 4), list[bool]()
    block = run(pool, A)

    class Watched(list[Any]):
        def __setitem__(self, *change: Any) -> None:
            super().__setitem__(*change)
            answers.append(pool.holds(block))

    pool._key_of, pool._prefix_of = Watched(pool._key_of), Watched(pool._prefix_of)
    run(pool, B)
    assert answers == [False] * 3  # evicted, then announced


def test_a_checkpoint_holds_its_states_until_its_slot_is_taken_again() -> None:
    pool = StoredBlockPool(8, 4, states=StoredStatePool(1, 1))
    block = run(pool, A)
    assert block.checkpoint is not None
    assert pool.holds_states(block)
    run(pool, B)  # has the only checkpoint
    run(pool, C)
    assert pool.holds(block)
    assert not pool.holds_states(block)
