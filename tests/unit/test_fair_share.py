"""Fair shares: who finds room, and weighted fair queueing in tokens between classes, clients, flows
and requests."""

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from batching.block_pool import BlockPool
from batching.fair_share import CLASS_WEIGHTS, FairOrder, Priority, Shares, WorkOwner, in_turn
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence


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


# ── the order of items ──

Group = tuple[int, dict[str, Any]]  # a number of requests, and their owner


def owners_of(groups: list[Group]) -> list[WorkOwner]:
    """Return an owner for each request."""
    default: dict[str, Any] = {"client": "a"}
    return [WorkOwner(**default | of) for count, of in groups for _ in range(count)]


@dataclass(eq=False)
class Item:
    owner: WorkOwner
    tokens: int = 1


def queue_of(*items: Item) -> FairOrder[Item]:
    queue = FairOrder[Item]()
    for item in items:
        queue.add(item)
    return queue


def serve_next(queue: FairOrder[Item]) -> Item:
    item = queue.first()
    queue.charge(item.owner, item.tokens)
    queue.remove(item)
    return item


def serve(queue: FairOrder[Item], count: int, by: str = "client") -> Counter[Hashable]:
    """Serve items; return the tokens served."""
    served = Counter[Hashable]()
    for _ in range(count):
        item = serve_next(queue)
        served[getattr(item.owner, by)] += item.tokens
    return served


A, B = {"client": "a"}, {"client": "b"}
FLOWS: list[Group] = [(1, {"flow": flow}) for flow in range(256)]
CLASSES: list[Group] = [(2000, {"priority": priority}) for priority in Priority]


@pytest.mark.parametrize(
    ("groups", "sizes", "count", "by", "expected"),
    [
        # whatever the size and the number of items
        ([(500, A), (50, B)], {"a": 10, "b": 100}, 110, "client", {"a": 1000, "b": 1000}),
        ([(400, {"share": 3}), (400, B)], {}, 400, "client", {"a": 300, "b": 100}),
        ([(400, {"share": 0.5}), (400, B)], {}, 300, "client", {"a": 100, "b": 200}),
        ([*FLOWS, (256, B)], {}, 200, "client", {"a": 100, "b": 100}),
        ([(200, {"flow": 0}), (200, {"flow": 1})], {0: 30, 1: 10}, 240, "flow", {0: 1800, 1: 1800}),
        (CLASSES, {}, 1460, "priority", {p: 20 * weight for p, weight in CLASS_WEIGHTS.items()}),
    ],
)
def test_tokens_are_divided_by_shares(
    groups: list[Group],
    sizes: dict[Hashable, int],
    count: int,
    by: str,
    expected: dict[Hashable, int],
) -> None:
    items = [Item(owner, sizes.get(getattr(owner, by), 1)) for owner in owners_of(groups)]
    assert serve(queue_of(*items), count, by) == expected


def test_one_that_arrives_is_served_next_and_is_owed_nothing_of_the_past() -> None:
    queue = queue_of(*(Item(WorkOwner(client), 10) for client in "ab" * 500))
    serve(queue, 100)
    for _ in range(100):
        queue.add(Item(WorkOwner("late"), 10))
    served = serve(queue, 30)
    assert served["late"] == pytest.approx(100, abs=10)
    assert served["a"] == pytest.approx(100, abs=10)


def test_a_large_item_is_paid_off_and_its_client_does_not_starve() -> None:
    """Clients that arrive without end, each with one item, do not delay one in debt for good."""
    queue = queue_of(Item(WorkOwner("large"), 1000), Item(WorkOwner("large"), 1))
    taken: list[Hashable] = []
    for number in range(3000):
        queue.add(Item(WorkOwner(number), 1))
        if number == 0:
            assert serve(queue, 1)["large"] == 1000
        taken += serve(queue, 1)
        if "large" in taken:
            break
    assert 400 < taken.index("large") < 2100


@pytest.mark.parametrize("distinct", [1, 10_000])
def test_an_operation_costs_the_same_however_much_waits(distinct: int) -> None:
    def cost_s(waiting: int) -> float:
        queue = queue_of(*(Item(WorkOwner(n % distinct), 1 + n % 7) for n in range(waiting)))
        times = []
        for _ in range(200):
            started = time.perf_counter()
            queue.add(Item(serve_next(queue).owner, 3))
            times.append(time.perf_counter() - started)
        return sorted(times)[100]

    assert cost_s(10_000) < 10 * cost_s(100) + 1e-5


def test_items_are_taken_of_each_client_and_request_in_turn() -> None:
    items = [Item(owner(name), n) for name in ("a1", "a2", "b1") for n in range(3)]
    taken = [(item.owner.request_id, item.tokens) for item in in_turn(items)]
    assert taken == [
        ("a1", 0), ("b1", 0), ("a2", 0), ("b1", 1), ("a1", 1), ("b1", 2), ("a2", 1), ("a1", 2),
        ("a2", 2),
    ]  # fmt: skip


def test_the_next_item_of_a_part_that_waits() -> None:
    items = [Item(owner(name), 5) for name in ("a1", "a2", "b1")]
    order = queue_of(*items)
    order.charge(items[0].owner, 5)
    path = (Priority.INTERACTIVE, "a")
    assert order.waits(path)
    assert order.first(path) is items[1]
    assert order.first() is items[2]
    order.remove(items[2])
    assert not order.waits((Priority.INTERACTIVE, "b"))


# ── in the scheduler ──


@pytest.mark.parametrize(
    ("groups", "max_running", "by", "expected"),
    [
        ([(900, A), *((100, {"client": c}) for c in "bcd")], 8, "client", dict.fromkeys("abcd", 1)),
        ([(400, {"share": 3}), (400, B)], 4, "client", {"a": 3, "b": 1}),
        ([(400, {"share": 3}), (400, B)], 8, "client", {"a": 3, "b": 1}),
        ([(200, {"flow": "long"}), (50, {"flow": "short"})], 2, "flow", {"long": 1, "short": 1}),
    ],
)
def test_the_tokens_of_steps_are_divided_by_shares(
    groups: list[Group], max_running: int, by: str, expected: dict[Hashable, int]
) -> None:
    scheduler, served = (
        ContinuousScheduler(BlockPool(100_000, 16), max_running),
        Counter[Hashable](),
    )
    for number, owner in enumerate(owners_of(groups)):
        scheduler.add(Sequence([number], owner=owner))
    for _ in range(200):
        for chunk in scheduler.schedule(1000):
            served[getattr(chunk.sequence.owner, by)] += 1
            scheduler.advance(chunk, [7])
        for sequence in [s for s in scheduler.running if len(s.tokens) > 8]:
            scheduler.remove(sequence)
    total = sum(served.values()) / sum(expected.values())
    assert served == pytest.approx({key: total * part for key, part in expected.items()}, rel=0.1)
