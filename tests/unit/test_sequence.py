"""Sequences that share a prompt or a prefix."""

import pytest

from batching.block_pool import BlockPool
from batching.scheduler import ContinuousScheduler
from batching.sequence import PrefixedTokens, Sequence


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
