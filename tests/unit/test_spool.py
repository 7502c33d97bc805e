"""Answers that the client does not read yet wait in a bounded temporary file."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from server.core.request_context import RequestContext
from server.http import spool
from server.http.spool import MAX_SPOOL, PIECE, SpoolBudget, SpooledResponse, SpoolFile


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
