from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.batcher import GROW_AFTER, DynamicBatcher
from batching.fair_share import WorkOwner
from batching.request_queue import WorkItem

NEVER = float("-inf")  # the worker has not been busy


def item(tokens: int = 1, key: Any = None, rows: int = 1, deadline: float = 1e9) -> WorkItem:
    item = WorkItem("payload", deadline, 0.0)
    item.tokens, item.key, item.rows = tokens, key, rows
    item.width = tokens // rows
    return item


def batcher(
    size: int = 4, tokens: int = 1000, wait_s: float = 1.0, packs: bool = True
) -> DynamicBatcher:
    batcher = DynamicBatcher(size, tokens, wait_s)
    batcher.packs = packs
    return batcher


def arrive(b: DynamicBatcher, arrived: WorkItem, now: float) -> None:
    arrived.accepted_at = arrived.arrived_at = now
    b.add(arrived)


def test_the_wait_counts_from_the_acceptance_of_the_first_item() -> None:
    b = batcher(wait_s=1.0)
    assert b.due_at(NEVER) is None
    assert b.take(1e9, NEVER) == []
    first, second = item(), item()
    arrive(b, first, 10.0)
    first.arrived_at = 10.5  # it was prepared until then
    arrive(b, second, 10.9)
    assert b.due_at(NEVER) == 11.0
    assert b.take(10.99, NEVER) == []
    assert b.take(11.0, NEVER) == [first, second]


@pytest.mark.parametrize(
    ("limits", "lengths", "batches"),
    [
        # a full one leaves at once
        ({"size": 2, "wait_s": 1.0}, [60, 40, 1], [[60, 40], []]),
        ({"tokens": 100, "wait_s": 1.0}, [60, 40, 1], [[60, 40], []]),
        # packed ones keep the order of arrival: 10 would fit, but 50 came first
        ({"tokens": 100}, [60, 50, 10], [[60], [50, 10]]),
        # padded ones have items of similar length, and the oldest
        ({"size": 3, "packs": False}, [50, 5, 48, 6, 52, 7], [[50, 48, 52], [5, 6, 7]]),
        # whose padding counts: 90 would make it 3 x 90
        ({"tokens": 100, "packs": False}, [10, 90, 11], [[10, 11], [90]]),
    ],
)
def test_a_batch_has_the_oldest_item_and_those_that_fit(
    limits: dict[str, Any], lengths: list[int], batches: list[list[int]]
) -> None:
    b = batcher(**{"size": 10, "wait_s": 0.0} | limits)
    for length in lengths:
        arrive(b, item(length), 10.0)
    for expected in batches:
        assert sorted(i.tokens for i in b.take(10.0, NEVER)) == sorted(expected)


def test_items_put_back_come_first_of_their_request_but_not_of_others() -> None:
    b = batcher(size=3)
    mine, other = WorkOwner("a"), WorkOwner("b")
    first, second, third, late, bystander = (item() for _ in range(5))
    for one in (first, second, third, late):
        one.owner = mine
        arrive(b, one, 10.0)
    assert b.take(20.0, NEVER) == [first, second, third]
    bystander.owner = other
    arrive(b, bystander, 11.0)
    b.put_back([second, third])
    assert b.due_at(NEVER) == 10.0  # full
    assert b.take(20.0, NEVER) == [bystander, second, third]
    assert b.take(20.0, NEVER) == [late]


OWNERS = {name: WorkOwner(name[0], name) for name in ("a1", "a2", "b1")}


def owned(name: str, key: Any = None) -> WorkItem:
    new = item(key=key)
    new.owner = OWNERS[name]
    return new


def test_requests_and_clients_have_items_in_a_batch_in_turn() -> None:
    b = batcher(size=4, wait_s=0.0)
    for name in ("a1",) * 6 + ("a2", "b1", "b1"):
        arrive(b, owned(name), 0.0)
    batches = [[i.owner.request_id for i in b.take(0.0, NEVER)] for _ in range(3)]
    assert batches == [["a1", "b1", "a2", "b1"], ["a1"] * 4, ["a1"]]


def test_a_request_of_another_kind_has_the_next_batch() -> None:
    b = batcher(size=2, wait_s=0.0)
    for name in ("a1",) * 6:
        arrive(b, owned(name), 0.0)
    arrive(b, owned("b1", key="other"), 0.0)
    batches = [[i.owner.request_id for i in b.take(0.0, NEVER)] for _ in range(2)]
    assert batches == [["a1", "a1"], ["b1"]]


def test_cancelled_and_late_items_take_no_room_in_a_batch() -> None:
    b = batcher(size=2, wait_s=0.0)
    gone, late, alive = item(), item(deadline=5.0), item()
    gone.open = False
    for arrived in (gone, late, alive):
        arrive(b, arrived, 0.0)
    assert b.take(6.0, NEVER) == [alive]
    assert not b.waiting


def test_out_of_memory_lowers_the_cap_to_what_fits_and_success_grows_it_back() -> None:
    b = batcher(size=8)
    b.out_of_memory(largest_rows=0)  # an item that is too large alone
    assert b.cap == 8
    b.out_of_memory(largest_rows=2)
    assert b.cap == 2
    b.succeeded(1)  # too small a batch to count
    for _ in range(GROW_AFTER - 1):
        b.succeeded(2)
    assert b.cap == 2
    b.succeeded(2)
    assert b.cap == 4
    for _ in range(GROW_AFTER):
        b.succeeded(3)
    assert b.cap == 8
    for _ in range(GROW_AFTER):
        b.succeeded(8)
    assert b.cap == 8


ITEMS = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from("ab"), st.integers(1, 3), st.booleans()),
    max_size=40,
)


@given(ITEMS, st.booleans(), st.integers(1, 8), st.integers(1, 200))
def test_every_open_item_is_in_exactly_one_batch_within_the_caps(
    specs: list[tuple[int, str, int, bool]], packs: bool, size: int, tokens: int
) -> None:
    b = batcher(size=size, tokens=tokens, wait_s=0.0, packs=packs)
    items = []
    for number, (n, key, rows, is_open) in enumerate(specs):
        new = item(tokens=n * rows, key=key, rows=rows)
        new.open = is_open
        items.append(new)
        arrive(b, new, float(number))
    left: list[WorkItem] = []
    while batch := b.take(1e6, NEVER):
        waiting = [i for i in items if i.open and i not in left]
        assert batch[0] is waiting[0]  # the oldest
        assert len({i.key for i in batch}) == 1
        if len(batch) > 1:
            assert sum(i.rows for i in batch) <= size
            widest = max(i.width for i in batch)
            cost = sum(i.tokens for i in batch) if packs else sum(i.rows for i in batch) * widest
            assert cost <= tokens
        left += batch
    assert len(left) == len(set(left)) == sum(i.open for i in items)
    assert not b.waiting
