"""Tasks of an event loop share the time of its turns."""

import asyncio
from types import SimpleNamespace

import pytest

from server.http import loop_budget
from server.http.loop_budget import MAX_TURN_S, REST_S, LoopBudget


def test_tasks_take_a_limited_part_of_each_turn_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(loop_budget, "time", SimpleNamespace(monotonic=lambda: now))
    turns: list[list[int]] = [[]]

    async def work(budget: LoopBudget, task: int) -> None:
        nonlocal now
        for _ in range(40):
            await budget.wait()
            now += 0.4 * MAX_TURN_S
            turns[-1].append(task)

    async def count_turns() -> None:
        while True:
            turns.append([])
            await asyncio.sleep(0)

    async def run() -> None:
        counting = asyncio.create_task(count_turns())
        budget = LoopBudget()
        await asyncio.gather(*(work(budget, task) for task in range(4)))
        counting.cancel()

    asyncio.run(run())
    worked = [turn for turn in turns if turn]
    assert max(map(len, worked)) <= 3
    assert sum(map(len, worked)) == 160
    assert [turn[0] for turn in worked[1:9]] == [0, 1, 2, 3] * 2


def test_tasks_rest_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping: list[asyncio.Event] = []

    async def sleep(seconds: float) -> None:
        assert seconds == REST_S
        sleeping.append(asyncio.Event())
        await sleeping[-1].wait()

    async def run() -> None:
        turn = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", sleep)
        budget = LoopBudget()
        tasks = [asyncio.create_task(budget.rest()) for _ in range(3)]
        for rested in range(3):
            for _ in range(5):
                await turn(0)
            assert (len(sleeping), sum(task.done() for task in tasks)) == (rested + 1, rested)
            sleeping[rested].set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
