"""The budget of transfers: the slowest end while it is short, and none while there is room."""

import asyncio

import pytest

from batching.errors import QueueFull
from server.http import transfers
from server.http.transfers import Transfer, TransferBudget

pytestmark = pytest.mark.anyio


class Clock:
    """Replaces the module's time."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfers, "time", clock)
    return clock


async def waiting(budget: TransferBudget, held: int, moved: int) -> "asyncio.Task[Transfer]":
    """Return a task that holds bytes and waits for its client; it returns its transfer."""
    transfer = Transfer()
    budget.take(transfer, held)
    transfer.moved = moved

    async def wait() -> Transfer:
        with pytest.raises(TimeoutError):
            await transfer.wait(asyncio.Event().wait())
        return transfer

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert transfer.is_waiting
    return task


async def test_the_slowest_transfers_end_until_there_is_room(clock: Clock) -> None:
    budget, new = TransferBudget(100, "full"), Transfer()
    fast = await waiting(budget, 30, 3000)
    slow = await waiting(budget, 30, 300)
    clock.now += 9
    late = await waiting(budget, 30, 100)  # it has waited less: its rate is higher
    clock.now += 1
    budget.take(new, 10)
    assert budget.used == 100
    budget.take(new, 20)
    assert not (await slow).held
    assert budget.used == 90
    budget.take(new, 40)
    assert budget.used == 100
    assert (await late).ended
    assert not fast.done()
    fast.cancel()


async def test_no_transfer_ends_if_that_makes_no_room(clock: Clock) -> None:
    budget, running, new = TransferBudget(100, "full"), Transfer(), Transfer()
    budget.take(running, 80)  # the server does not wait for its client
    slow = await waiting(budget, 10, 1)
    with pytest.raises(QueueFull, match="full"):
        budget.take(new, 21)
    assert (budget.used, new.held) == (90, 0)
    assert not slow.done()
    budget.take(new, 0)
    budget.release(running)
    budget.release(running)
    assert budget.used == 10
    slow.cancel()


def test_a_response_is_counted_though_there_is_no_room() -> None:
    budget, one, two = TransferBudget(100, "full"), Transfer(), Transfer()
    budget.take(one, 60)
    budget.hold(one, 50)  # the stored response that it has read
    assert budget.used == 60
    budget.hold(two, 70)
    assert budget.used == 130
    budget.take(two, 0)
    with pytest.raises(QueueFull):
        budget.take(one, 1)
    budget.release(two)
    assert budget.used == 60


async def test_an_ended_transfer_does_not_go_on_with_a_step_that_had_arrived() -> None:
    budget, transfer, arrived = TransferBudget(10, "full"), Transfer(), asyncio.Event()
    budget.take(transfer, 10)
    task = asyncio.create_task(transfer.wait(arrived.wait()))
    await asyncio.sleep(0)
    arrived.set()
    budget.take(Transfer(), 1)
    with pytest.raises(TimeoutError):
        await task


async def test_the_rate_of_a_response_counts_from_its_start(clock: Clock) -> None:
    async def seconds(count: int) -> None:
        clock.now += count

    transfer = Transfer()
    await transfer.wait(seconds(1))
    transfer.moved = 1_000_000
    transfer.restart()
    measured: list[float] = []

    async def measure() -> None:
        clock.now += 10
        measured.append(transfer.rate)

    transfer.moved = 50
    await transfer.wait(measure())
    assert measured == [5.0]
