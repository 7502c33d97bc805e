"""Budgets of the event loop: of transfers, of answers that wait for their client, of its turns."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from batching.errors import QueueFull
from server.core.request_context import RequestContext
from server.http import loop_budget, spool, transfers
from server.http.loop_budget import MAX_TURN_S, REST_S, LoopBudget
from server.http.spool import MAX_SPOOL, PIECE, SpoolBudget, SpooledResponse, SpoolFile
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


# ── answers that the client does not read yet wait in a bounded temporary file ──


def test_the_files_of_a_client_leave_room_for_those_of_others() -> None:
    budget = SpoolBudget()
    piece = MAX_SPOOL // 64
    taken = {client: sum(budget.take(client, piece) for _ in range(64)) for client in "abc"}
    assert taken == {"a": 32, "b": 16, "c": 8}
    budget.give_back("a", 32 * piece)
    assert budget.take("c", piece)


def test_a_closed_file_is_neither_read_nor_written() -> None:
    """Not even if its descriptor is that of another file by now."""
    file = SpoolFile()
    assert file.write(b"one", 0) == 3
    assert file.read(10, 1) == b"ne"
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"two", 0)
    with pytest.raises(ValueError, match="closed"):
        file.read(10, 0)


def test_the_event_loop_does_not_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_BUFFER", PIECE)
    threads: dict[str, set[int]] = {"read": set(), "write": set(), "close": set()}
    closed = threading.Semaphore(0)

    def watch(name: str) -> None:
        original = getattr(SpoolFile, name)

        def watched(self: SpoolFile, *arguments: Any) -> Any:
            threads[name].add(threading.get_ident())
            result = original(self, *arguments)
            if name == "close":
                closed.release()
            return result

        monkeypatch.setattr(SpoolFile, name, watched)

    for name in threads:
        watch(name)
    budget, sent = SpoolBudget(), bytearray()
    parts = [bytes([n]) * PIECE for n in range(40)]

    async def respond() -> None:
        reads = asyncio.Event()

        async def send(message: Message) -> None:
            await reads.wait()
            sent.extend(message.get("body", b""))

        app, transfer = SimpleNamespace(spools=budget), SimpleNamespace(may_stall=False)
        context = RequestContext(b"")
        scope = {"app": app, "send": send, "context": context, "transfer": transfer}
        response = SpooledResponse(scope, send, [])
        running = asyncio.get_running_loop().create_task(response.run())
        for part in parts:
            await response.put(part)
        reads.set()
        response.close()
        await running
        response.discard()

    asyncio.run(respond())
    assert sent == b"".join(parts)
    assert budget.take(b"other", MAX_SPOOL // 2)
    assert closed.acquire(timeout=60)
    assert all(threads.values())
    assert threading.get_ident() not in set[int]().union(*threads.values())


# ── tasks of an event loop share the time of its turns ──


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
