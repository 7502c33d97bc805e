"""Tokens read like the one list that they are not."""

from collections import Counter
from typing import Any

from batching.block_pool import BlockPool, Key
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence, Tokens


def test_prompt_and_output_read_like_one_list() -> None:
    tokens = Tokens((1, 2, 3))
    tokens.output += [4, 5]
    assert [*tokens] == [1, 2, 3, 4, 5]
    assert [tokens[at] for at in range(-5, 5)] == [1, 2, 3, 4, 5] * 2
    bounds = [None, *range(-7, 8)]
    for start in bounds:
        for stop in bounds:
            assert [*tokens[start:stop]] == [1, 2, 3, 4, 5][start:stop], (start, stop)


def test_choices_of_a_request_share_their_prompt() -> None:
    prompt = [1, 2, 3]
    one, other = Sequence(prompt), Sequence(prompt)
    one.tokens.output.append(9)
    assert one.tokens.prompt is other.tokens.prompt is prompt
    assert [*other.tokens] == [1, 2, 3]


def test_while_a_prefix_is_computed_it_is_looked_up_once_by_each_who_waits_for_it() -> None:
    pool = BlockPool(8000, 4)
    scheduler = ContinuousScheduler(pool, 256)
    prefix = list(range(400))
    for number in range(64):
        scheduler.add(Sequence([*prefix, number]))
    looked_up: Counter[int] = Counter()
    match = pool.match

    def counting(tokens: Any) -> tuple[list[int], Key | None]:
        looked_up[tokens[-1]] += 1
        return match(tokens)

    pool.match = counting  # type: ignore[method-assign]  # to count its calls
    running = 0
    while not running:
        chunks = scheduler.schedule(40)
        for chunk in chunks:
            scheduler.advance(chunk, [0] if chunk.reaches_end else [])
        running = len(scheduler.running) - 1
    assert running == 63  # all at once, when it was there
    assert max(looked_up.values()) == 2
