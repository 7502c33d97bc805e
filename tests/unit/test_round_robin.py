"""Round robin between list requests: a limited number of their items runs at a time."""

from dataclasses import dataclass

from batching.round_robin import RoundRobin


@dataclass(eq=False)
class Item:
    name: str
    open: bool = True


def items(name: str, count: int) -> list[Item]:
    return [Item(f"{name}{n}") for n in range(count)]


def test_requests_alternate_and_the_number_of_running_items_is_limited() -> None:
    started: list[Item] = []
    round_robin: RoundRobin[Item] = RoundRobin(3)
    round_robin.add(items("a", 4), started.append)
    round_robin.add(items("b", 2), started.append)
    assert [item.name for item in started] == ["a0", "a1", "a2"]
    for _ in range(3):
        round_robin.finish()
    assert [item.name for item in started[3:]] == ["a3", "b0", "b1"]
    for _ in range(3):
        round_robin.finish()
    assert round_robin.running == 0


def test_cancelled_items_are_skipped() -> None:
    started: list[Item] = []
    round_robin: RoundRobin[Item] = RoundRobin(1)
    left, stays = items("a", 100), items("b", 1)
    round_robin.add(left, started.append)
    round_robin.add(stays, started.append)
    for item in left:
        item.open = False
    round_robin.finish()
    assert [item.name for item in started] == ["a0", "b0"]
