"""Fair shares: who finds room, and in which order items are taken."""

from dataclasses import dataclass
from functools import cache

import pytest

from batching.fair_share import FairOrder, Priority, Shares, WorkOwner, in_turn


@cache
def owner(name: str, share: float = 1.0) -> WorkOwner:
    """Return an owner by a name such as `a1`: a client and a number of its request."""
    return WorkOwner(name[0], name, share=share)


def holding(**held: int) -> Shares:
    shares = Shares()
    for name, units in held.items():
        for _ in range(units):
            shares.take(owner(name))
    return shares


@pytest.mark.parametrize(
    ("capacity", "held", "asks", "has_room"),
    [
        (8, {"a1": 7}, "a1", True),
        (8, {"a1": 8}, "a1", False),  # alone, a request uses everything, and no more
        (8, {"a1": 8}, "a2", True),
        (8, {"a1": 8, "a2": 4}, "a2", False),
        (8, {"a1": 8, "a2": 4}, "a3", True),
        (8, {"a1": 8}, "b1", True),
        (8, {"a1": 8, "b1": 4}, "b1", False),
        (8, {"a1": 8, "b1": 3}, "b2", True),
        (8, {"a1": 4, "a2": 4, "b1": 3}, "b1", True),
        (2, {"a1": 1, "a2": 1}, "a3", False),
        (2, {"a1": 1, "a2": 1}, "b1", True),
        (1, {"a1": 1}, "b1", False),
    ],
)
def test_who_finds_room(capacity: int, held: dict[str, int], asks: str, has_room: bool) -> None:
    assert holding(**held).has_room(owner(asks), capacity) == has_room


def test_parts_are_by_shares_and_weights() -> None:
    shares = holding(a1=8)
    large, batch = WorkOwner("b", share=3.0), WorkOwner("c", priority=Priority.BATCH)
    assert [part for _, _, part in shares.parts(large)] == [0.75]
    assert [part for _, _, part in shares.parts(batch)] == [pytest.approx(8 / 72)]
    shares.take(batch)
    assert [part for _, _, part in shares.parts(large)] == pytest.approx([64 / 72, 48 / 72])


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 16, 256])
def test_all_take_as_much_as_they_can_and_hold_a_few_times_the_capacity(capacity: int) -> None:
    shares = Shares()
    names = [f"{client}{number}" for client in "abcdef" for number in range(3)]
    for name in names:
        while shares.has_room(owner(name), capacity):
            shares.take(owner(name))
    of_clients, of_requests = (sum(1 / n for n in range(1, count + 1)) for count in (6, 3))
    assert shares.total <= capacity * of_clients * of_requests
    for name in names:
        while shares.of(owner(name).levels[-1][0]):
            shares.give_back(owner(name))
    assert (shares.total, len(shares._holdings)) == (0, 1)


@dataclass(eq=False)
class Item:
    owner: WorkOwner
    number: int = 0


def test_items_are_taken_of_each_client_and_request_in_turn() -> None:
    items = [Item(owner(name), n) for name in ("a1", "a2", "b1") for n in range(3)]
    taken = [(item.owner.request_id, item.number) for item in in_turn(items)]
    assert taken == [
        ("a1", 0), ("b1", 0), ("a2", 0), ("b1", 1), ("a1", 1), ("b1", 2), ("a2", 1), ("a1", 2),
        ("a2", 2),
    ]  # fmt: skip


def test_an_item_that_is_served_ends_the_turn_of_its_request() -> None:
    order = FairOrder[Item]()
    for name in ("a1", "a1", "a2", "b1", "b1"):
        order.add(Item(owner(name)))
    taken = []
    while order:
        item = order.first()
        order.charge(item.owner, 1)
        order.remove(item)
        taken.append(item.owner.request_id)
    assert taken == ["a1", "b1", "a2", "b1", "a1"]
    assert not order._levels
    assert not order._items


def test_the_next_item_of_a_part_that_waits() -> None:
    order = FairOrder[Item]()
    items = [Item(owner(name)) for name in ("a1", "a2", "b1")]
    for item in items:
        order.add(item)
    order.charge(items[0].owner, 5)
    path = (Priority.INTERACTIVE, "a")
    assert order.waits(path)
    assert order.first(path) is items[1]
    assert order.first() is items[2]
    order.remove(items[2])
    assert not order.waits((Priority.INTERACTIVE, "b"))
