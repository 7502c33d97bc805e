"""Sequences that share a prompt or a prefix."""

from collections import Counter
from typing import Any

import pytest

from batching.block_pool import BlockKey, BlockPool
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


def test_each_sequence_that_waits_for_a_prefix_matches_it_twice_at_most() -> None:
    pool = BlockPool(8000, 4)
    scheduler = ContinuousScheduler(pool, 256)
    prefix = list(range(400))
    for number in range(64):
        scheduler.add(Sequence([*prefix, number]))
    matches: Counter[int] = Counter()
    match = pool.match

    def counting(tokens: Any, cache_namespace: bytes = b"") -> tuple[list[int], BlockKey | None]:
        matches[tokens[-1]] += 1
        return match(tokens, cache_namespace)

    pool.match = counting  # type: ignore[method-assign]  # to count its calls
    running = 0
    while not running:
        chunks = scheduler.schedule(40)
        for chunk in chunks:
            scheduler.advance(chunk, [0] if chunk.reaches_end else [])
        running = len(scheduler.running) - 1
    assert running == 63  # all at once, when it is computed
    assert max(matches.values()) == 2


@pytest.mark.parametrize("shared", [[], [7]])
def test_a_prefixed_prompt_ends_with_its_own_token(shared: list[int]) -> None:
    sequence = Sequence(PrefixedTokens(shared, [5]), max_tokens=0)
    assert sequence.tokens[-1] == 5
    assert not sequence.has_placeholder
