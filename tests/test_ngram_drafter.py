"""Prompt lookup: what is drafted, and when it is not worth it."""

from worker.generation.ngram_drafter import DRAFT, INDEXED, PATIENCE, NgramDrafter


def test_what_followed_the_last_tokens_is_drafted() -> None:
    assert NgramDrafter().draft([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == (4, 5)


def test_the_latest_occurrence_counts() -> None:
    assert NgramDrafter().draft([1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3], 1) == (8,)


def test_a_draft_is_never_longer_than_asked_for_or_than_the_text() -> None:
    tokens = [1, 2, 3, *range(10, 40), 1, 2, 3]
    assert NgramDrafter().draft(tokens, 100) == tuple(range(10, 10 + DRAFT))
    assert NgramDrafter().draft(tokens, 0) == ()
    assert NgramDrafter().draft([5, 5, 5, 5], 6) == (5,)


def test_nothing_is_drafted_for_what_was_never_seen() -> None:
    assert NgramDrafter().draft([1, 2, 3, 4, 5, 6], 6) == ()
    assert NgramDrafter().draft([1, 2], 6) == ()


def test_text_that_grows_is_indexed_once_and_found_later() -> None:
    lookup = NgramDrafter()
    tokens = [1, 2, 3, 4]
    assert lookup.draft(tokens, 6) == ()
    tokens += [9, 2, 3, 4]
    assert lookup.draft(tokens, 6) == (9, 2, 3, 4)
    tokens += [9, 2]
    assert lookup.draft(tokens, 2) == (3, 4)


def test_wrong_drafts_pause_it_and_a_right_one_ends_that() -> None:
    lookup, tokens = NgramDrafter(), [1, 2, 3, 4, 1, 2, 3]
    for _ in range(PATIENCE):
        assert lookup.draft(tokens, 1) == (4,)
        lookup.verified(drafted=1, accepted=0)
    pauses = 0
    while not lookup.draft(tokens, 1):
        pauses += 1
    assert pauses == 4
    lookup.verified(drafted=1, accepted=1)
    lookup.verified(drafted=1, accepted=0)
    assert lookup.draft(tokens, 1) == (4,)


def test_one_draft_looks_at_so_many_tokens_only() -> None:
    lookup, tokens = (
        NgramDrafter(),
        [*range(3 * INDEXED), 2 * INDEXED, 2 * INDEXED + 1, 2 * INDEXED + 2],
    )
    assert [lookup.draft(tokens, 1) for _ in range(3)] == [(), (), (2 * INDEXED + 3,)]
