"""Token ids are arrays: garbage collection does not visit their elements."""

import gc

from batching.sequence import PrefixedTokens, Sequence, TokenIds


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
