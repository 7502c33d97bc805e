"""Tokens read like the one list that they are not."""

from batching.blocks import BlockPool
from batching.continuous import ContinuousScheduler, Sequence
from batching.tokens import Tokens


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
    one, other = Sequence(None, prompt), Sequence(None, prompt)
    one.tokens.output.append(9)
    assert one.tokens.prompt is other.tokens.prompt is prompt
    assert [*other.tokens] == [1, 2, 3]


def test_while_a_prompt_is_computed_it_is_looked_up_once_for_all_its_choices() -> None:
    pool = BlockPool(4000, 4)
    scheduler = ContinuousScheduler(pool, 256)
    prompt = list(range(4000))
    for _ in range(128):
        scheduler.add(Sequence(None, prompt))
    for chunk in scheduler.schedule(40):
        scheduler.advance(chunk)
    looked_up, match = 0, pool.match

    def counting(tokens: Tokens) -> tuple[list[int], bool]:
        nonlocal looked_up
        looked_up += 1
        return match(tokens)

    pool.match = counting  # type: ignore[method-assign, assignment]  # to count its calls
    [chunk] = scheduler.schedule(40)
    assert chunk.count == 40
    assert looked_up == 1
