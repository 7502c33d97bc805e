"""Weighted fair queueing in tokens: between classes, clients, flows and requests that wait."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest

from batching.block_pool import BlockPool
from batching.fair_share import CLASS_WEIGHTS, FairOrder, Priority, WorkOwner
from batching.scheduler import ContinuousScheduler
from batching.sequence import Sequence

NUMBERS = itertools.count()


@dataclass(eq=False)
class Item:
    owner: WorkOwner
    tokens: int = 1


def of(
    client: Hashable,
    flow: Hashable = None,
    share: float = 1.0,
    priority: Priority = Priority.INTERACTIVE,
) -> WorkOwner:
    """Return the owner of a new request."""
    return WorkOwner(client, flow=flow, share=share, priority=priority)


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


def serve(
    queue: FairOrder[Item], count: int, by: Callable[[WorkOwner], Hashable] = lambda o: o.client
) -> Counter[Hashable]:
    """Serve items; return the tokens served."""
    served = Counter[Hashable]()
    for _ in range(count):
        item = serve_next(queue)
        served[by(item.owner)] += item.tokens
    return served


def test_clients_get_equal_tokens_whatever_the_size_and_number_of_their_items() -> None:
    small = [Item(of("small"), 10) for _ in range(500)]
    large = [Item(of("large"), 100) for _ in range(50)]
    served = serve(queue_of(*small, *large), 110)
    assert served == {"small": 1000, "large": 1000}


def test_tokens_are_divided_by_the_shares_of_clients() -> None:
    items = [Item(of(client, share=share), 10) for client, share in (("a", 3), ("b", 1)) * 400]
    assert serve(queue_of(*items), 400) == {"a": 3000, "b": 1000}
    half = [Item(of(client, share=share), 7) for client, share in (("a", 0.5), ("b", 1)) * 400]
    assert serve(queue_of(*half), 300) == {"a": 700, "b": 1400}


def test_a_client_gains_nothing_by_more_flows() -> None:
    many = [Item(of("a", flow), 10) for flow in range(256)]
    one = [Item(of("b"), 10) for _ in range(256)]
    assert serve(queue_of(*many, *one), 200) == {"a": 1000, "b": 1000}


def test_flows_of_a_client_get_equal_tokens() -> None:
    sizes = {"x": 30, "y": 10, "z": 15}
    items = [Item(of("a", flow), size) for flow, size in sizes.items() for _ in range(200)]
    served = serve(queue_of(*items), 60 + 180 + 120, lambda owner: owner.flow)
    assert served == {"x": 1800, "y": 1800, "z": 1800}


def test_lower_classes_get_a_small_part_and_do_not_starve() -> None:
    items = [Item(of("a", priority=priority), 1) for priority in Priority for _ in range(2000)]
    served = serve(queue_of(*items), 1460, lambda owner: owner.priority)
    assert served == {priority: 20 * weight for priority, weight in CLASS_WEIGHTS.items()}


def test_one_that_arrives_is_served_next_and_is_owed_nothing_of_the_past() -> None:
    queue = queue_of(*(Item(of(client), 10) for client in "ab" * 500))
    serve(queue, 100)
    for _ in range(100):
        queue.add(Item(of("late"), 10))
    served = serve(queue, 30)
    assert served["late"] == pytest.approx(100, abs=10)
    assert served["a"] == pytest.approx(100, abs=10)


def test_a_large_item_is_paid_off_and_its_client_does_not_starve() -> None:
    """Clients that arrive without end, each with one item, do not delay one in debt for good."""
    queue = queue_of(Item(of("large"), 1000), Item(of("large"), 1))
    taken: list[Hashable] = []
    for number in range(3000):
        queue.add(Item(of(number), 1))
        if number == 0:
            assert serve(queue, 1)["large"] == 1000
        taken += serve(queue, 1)
        if "large" in taken:
            break
    assert 400 < taken.index("large") < 2100


def test_nothing_is_kept_of_those_that_have_been_served() -> None:
    queue = queue_of()
    for number in range(2000):
        queue.add(Item(of(number), 5))
        queue.add(Item(of("stays"), 1))
        serve(queue, 1)
    while queue:
        serve(queue, 1)
    assert not queue._levels
    assert not queue._items


@pytest.mark.parametrize("distinct", [1, 10_000])
def test_an_operation_costs_the_same_however_much_waits(distinct: int) -> None:
    def cost_s(waiting: int) -> float:
        queue = queue_of(*(Item(of(n % distinct), 1 + n % 7) for n in range(waiting)))
        times = []
        for _ in range(200):
            started = time.perf_counter()
            queue.add(Item(serve_next(queue).owner, 3))
            times.append(time.perf_counter() - started)
        return sorted(times)[100]

    assert cost_s(10_000) < 10 * cost_s(100) + 1e-5


# ── in the scheduler ──


def step(scheduler: ContinuousScheduler) -> list[Sequence]:
    chunks = scheduler.schedule(1000)
    for chunk in chunks:
        scheduler.advance(chunk, [7] if chunk.reaches_end else [])
    return [chunk.sequence for chunk in chunks]


def generate(
    scheduler: ContinuousScheduler,
    steps: int,
    length: int,
    by: Callable[[WorkOwner], Hashable] = lambda o: o.client,
) -> Counter[Hashable]:
    """Run steps, ending each sequence after `length` output tokens; return the tokens that ran."""
    served = Counter[Hashable]()
    for _ in range(steps):
        for sequence in step(scheduler):
            served[by(sequence.owner)] += 1
        for sequence in [s for s in scheduler.running if len(s.tokens) >= s.prompt_len + length]:
            scheduler.remove(sequence)
    return served


def scheduler_with(max_running: int, owners: list[WorkOwner]) -> ContinuousScheduler:
    scheduler = ContinuousScheduler(BlockPool(100_000, 16), max_running)
    for owner in owners:
        scheduler.add(Sequence([next(NUMBERS)], owner=owner))
    return scheduler


def test_a_client_with_many_waiting_requests_gets_no_more_than_others() -> None:
    owners = [of("many") for _ in range(900)] + [of(client) for client in "abc" for _ in range(100)]
    served = generate(scheduler_with(8, owners), 200, 8)
    assert sum(served.values()) == 1600
    for client in ("many", *"abc"):
        assert served[client] == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize("max_running", [4, 8])
def test_running_sequences_are_divided_by_shares(max_running: int) -> None:
    owners = [of(client, share=share) for client, share in (("a", 3.0), ("b", 1.0)) * 400]
    served = generate(scheduler_with(max_running, owners), 200, 8)
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)


def test_flows_of_a_client_are_admitted_in_turn() -> None:
    owners = [of("a", "long") for _ in range(200)] + [of("a", "short") for _ in range(20)]
    served = generate(scheduler_with(2, owners), 80, 4, lambda owner: owner.flow)
    assert served == {"long": 80, "short": 80}
