"""Sequences share a prompt or a prefix; garbage collection does not visit their token ids."""

import gc

import pytest

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from batching.sequence import PrefixedTokens, Sequence, TokenIds


def test_choices_of_a_request_share_their_prompt_until_they_run() -> None:
    prompt = [1, 2, 3]
    scheduler = ContinuousScheduler(BlockPool(8, 4), 1)
    one, other = Sequence(prompt), Sequence(prompt)
    scheduler.add(one)
    scheduler.add(other)
    (chunk,) = scheduler.schedule(8)
    scheduler.advance(chunk, [9])
    assert one.tokens == [1, 2, 3, 9]
    assert other.tokens is prompt
    assert prompt == [1, 2, 3]


@pytest.mark.parametrize("shared", [[], [7]])
def test_a_prefixed_prompt_ends_with_its_own_token(shared: list[int]) -> None:
    sequence = Sequence(PrefixedTokens(shared, [5]), max_tokens=0)
    assert sequence.tokens[-1] == 5
    assert not sequence.has_placeholder


def test_garbage_collection_does_not_visit_token_ids() -> None:
    ids = TokenIds(range(1000, 2000))
    for held in (ids, ids.copy(), PrefixedTokens(ids, range(1000, 2000)).own):
        assert not any(isinstance(visited, int) for visited in gc.get_referents(held))


def test_slices_and_output_are_those_of_a_list() -> None:
    listed, ids = [5, 6, 7], TokenIds([5, 6, 7])
    assert (ids[1:], ids[-1], [*ids]) == (listed[1:], 7, listed)
    one, other = Sequence(ids.copy(), max_tokens=5), Sequence(listed, max_tokens=5)
    for sequence in (one, other):
        sequence.append_placeholder(0)
        sequence.extend([8, 9])
        sequence.append_placeholder(1)
        sequence.drop_placeholder()
    assert one.tokens[:] == other.tokens[:] == [5, 6, 7, 8, 9]
    assert [*ids] == [5, 6, 7]
