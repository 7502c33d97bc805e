"""Fair shares: which request yields, and in which order items are taken."""

from dataclasses import dataclass
from functools import cache

import pytest

from batching.fair_share import FairQueue, FairShare, WorkOwner, fair_order


def holding(**held: int) -> FairShare:
    """Return shares by names such as `a1`: a client and a number of its request."""
    shares = FairShare()
    for name, units in held.items():
        shares.take(owner(name), units)
    return shares


@cache
def owner(name: str) -> WorkOwner:
    return WorkOwner(name[0], name)


@pytest.mark.parametrize(
    ("capacity", "held", "waits", "yields"),
    [
        (8, {"a1": 8}, "a1", None),  # alone, a request uses everything
        (8, {"a1": 8}, "a2", "a1"),
        (8, {"a1": 8}, "b1", "a1"),
        (8, {"a1": 6, "a2": 2}, "a2", None),  # it has its quarter
        (8, {"a1": 6, "a2": 1, "a3": 1}, "a2", "a1"),
        (8, {"a1": 2, "a2": 2, "a3": 2, "a4": 2}, "a5", "a1"),  # the fifth of equal ones
        (8, {"a1": 2, "a2": 2, "a3": 2, "a4": 1, "a5": 1}, "a5", None),
        (8, {"a1": 2, "b1": 3, "b2": 3}, "a2", "b1"),  # above a quarter
        (8, {"a1": 1, "a2": 1, "a3": 1, "a4": 1, "a5": 1}, "a6", None),
        (8, {"a1": 1, "a2": 1, "a3": 1, "a4": 1, "a5": 1}, "b1", "a1"),  # above half
        (8, {"a1": 2, "a2": 2, "b1": 2, "b2": 2}, "c1", "a1"),
        (8, {"a1": 2, "a2": 2, "b1": 2, "c1": 2}, "b2", "a1"),
        (1, {"a1": 1}, "b1", None),
        (2, {"a1": 2}, "a2", "a1"),
        (2, {"a1": 1, "a2": 1}, "a3", None),
        (2, {"a1": 1, "a2": 1}, "b1", "a1"),
        (3, {"a1": 3}, "a2", "a1"),
        (3, {"a1": 2, "a2": 1}, "a2", None),
        (3, {"a1": 2, "b1": 1}, "b2", "a1"),
    ],
)
def test_who_yields_to_whom(
    capacity: int, held: dict[str, int], waits: str, yields: str | None
) -> None:
    expected = owner(yields) if yields else None
    assert holding(**held).yields_to(owner(waits), capacity) == expected


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 7, 16, 256])
def test_yielding_ends_with_shares_within_the_rule(capacity: int) -> None:
    """All of several large requests wait all the time."""
    names = ["a1", "a2", "b1", "c1", "c2", "c3"]
    shares = holding(a1=capacity)
    for _ in range(10 * capacity):
        for name in names:
            if other := shares.yields_to(owner(name), capacity):
                shares.give_back(other)
                shares.take(owner(name))
    held = {name: shares.of_request(owner(name)) for name in names}
    assert sum(held.values()) == capacity
    share = max(1, capacity // 4)
    assert max(held.values()) <= share or min(held.values()) >= share
    assert not any(shares.yields_to(owner(name), capacity) for name in names)


@dataclass(eq=False)
class Item:
    owner: WorkOwner
    number: int = 0


def test_items_are_taken_of_each_client_and_request_in_turn() -> None:
    items = [Item(owner(name), n) for name in ("a1", "a2", "b1") for n in range(3)]
    taken = [(item.owner.request_id, item.number) for item in fair_order(items)]
    assert taken == [
        ("a1", 0), ("b1", 0), ("a2", 0), ("b1", 1), ("a1", 1), ("b1", 2), ("a2", 1), ("a1", 2),
        ("a2", 2),
    ]  # fmt: skip


def test_an_item_that_is_taken_ends_the_turn_of_its_request() -> None:
    queue = FairQueue[Item]()
    for name in ("a1", "a1", "a2", "b1", "b1"):
        queue.add(Item(owner(name)))
    taken = []
    while queue:
        item = next(iter(queue))
        queue.remove(item)
        taken.append(item.owner.request_id)
    assert taken == ["a1", "b1", "a2", "b1", "a1"]
