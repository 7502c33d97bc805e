"""Round robin between list requests: a limited number of their items runs at a time."""

from dataclasses import dataclass

from batching.fair_share import WorkOwner
from batching.round_robin import RoundRobin


@dataclass(eq=False)
class Item:
    name: str
    owner: WorkOwner
    open: bool = True


def items(name: str, count: int) -> list[Item]:
    owner = WorkOwner(name.upper())
    return [Item(f"{name}{n}", owner) for n in range(count)]


def test_requests_alternate_and_the_number_of_running_items_is_limited() -> None:
    round_robin: RoundRobin[Item] = RoundRobin(3)
    started = round_robin.add(items("a", 5))
    started += round_robin.add(items("b", 2))
    assert [item.name for item in started] == ["a0", "a1", "a2"]
    following = [item.name for _ in range(4) for item in round_robin.finish()]
    assert following == ["a3", "b0", "a4", "b1"]
    for _ in range(3):
        assert not round_robin.finish()
    assert round_robin.running == 0


def test_cancelled_items_are_skipped() -> None:
    round_robin: RoundRobin[Item] = RoundRobin(1)
    left, stays = items("a", 100), items("b", 1)
    assert round_robin.add(left) == left[:1]
    assert round_robin.add(stays) == []
    for item in left:
        item.open = False
    assert round_robin.finish() == stays
