"""A bound on the time that clients' input takes in one turn of the event loop."""

import asyncio
import time

MAX_TURN_S = 0.001
REST_S = 0.004


class LoopBudget:
    """At most MAX_TURN_S in a turn of the event loop, for all tasks that wait for their turn."""

    def __init__(self) -> None:
        self._waiting = asyncio.Lock()  # its tasks go on in the order of their arrival
        self._resting = asyncio.Lock()
        self._until = 0.0

    async def wait(self) -> None:
        """Return when a task may work: at once within MAX_TURN_S, else in a turn of its own."""
        if self._waiting.locked() or time.monotonic() > self._until:
            async with self._waiting:
                await asyncio.sleep(0)
                self._until = time.monotonic() + MAX_TURN_S

    async def rest(self) -> None:
        """Return REST_S later, one task after the other: refused input has no other price."""
        async with self._resting:
            await asyncio.sleep(REST_S)
