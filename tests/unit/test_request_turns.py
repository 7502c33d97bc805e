"""Long requests take turns: only so many of their items are under way."""

from dataclasses import dataclass

from batching.round_robin import RoundRobin


@dataclass(eq=False)
class Item:
    name: str
    open: bool = True


def items(name: str, count: int) -> list[Item]:
    return [Item(f"{name}{n}") for n in range(count)]


def test_requests_take_turns_and_so_many_are_under_way() -> None:
    begun: list[Item] = []
    turns: RoundRobin[Item] = RoundRobin(3)
    turns.add(items("a", 4), begun.append)
    turns.add(items("b", 2), begun.append)
    assert [each.name for each in begun] == ["a0", "a1", "a2"]
    for _ in range(3):
        turns.finish()
    assert [each.name for each in begun[3:]] == ["a3", "b0", "b1"]
    for _ in range(3):
        turns.finish()
    assert turns.running == 0


def test_what_nobody_waits_for_is_passed_over() -> None:
    begun: list[Item] = []
    turns: RoundRobin[Item] = RoundRobin(1)
    left, stays = items("a", 100), items("b", 1)
    turns.add(left, begun.append)
    turns.add(stays, begun.append)
    for item in left:
        item.open = False
    turns.finish()
    assert [each.name for each in begun] == ["a0", "b0"]
