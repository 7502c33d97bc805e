"""A stage of load on a server in this process, over HTTP on loopback.

Arrivals are random (Poisson) at a rate, and latency counts from when a request was due; or as many
clients as fill a batch twice, each with one request after another, which shows the throughput.
"""

import asyncio
import math
import random
import re
import time
from dataclasses import dataclass, field

from server.commands.calibrate.requests import RequestGenerator
from server.commands.calibrate.search import BatchLimits, Stage
from server.http.request import Application
from worker.registry import PipelineModel

MOST_CLIENTS = 128


@dataclass(eq=False)
class Load:
    """Measures stages, as `search.Measure`."""

    app: Application
    requests: RequestGenerator
    port: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        fields = {"host": "localhost", "content-type": self.requests.media}
        if keys := self.app.settings.api_keys:
            fields["authorization"] = f"Bearer {keys[0]}"
        lines = [f"POST {self.requests.path} HTTP/1.1", *map(": ".join, fields.items()), ""]
        self.head = "\r\n".join(lines).encode()

    async def __call__(self, knobs: BatchLimits, rate: float, seconds: float) -> Stage:
        self._turn(knobs)
        self.latencies: list[float] = []
        self.failed = 0
        began = time.monotonic()
        if rate:
            await self._arrive(rate, began, seconds)
        else:
            async with asyncio.TaskGroup() as clients:
                for _ in range(min(2 * knobs.cap, MOST_CLIENTS)):
                    clients.create_task(self._ask_until(began + seconds))
        ordered, took = sorted(self.latencies), time.monotonic() - began
        p50, p95 = (1000 * percentile(ordered, percent) for percent in (50, 95))
        return Stage(knobs, rate, len(ordered) / took, p50, p95, self.failed)

    def _turn(self, knobs: BatchLimits) -> None:
        """Nothing waits or runs now."""
        model = self.app.worker_client.models[self.requests.serves]
        if isinstance(model, PipelineModel):
            model.batcher.max_size = model.batcher.cap = knobs.cap
            model.batcher.max_wait_s = knobs.wait_ms / 1000

    async def _arrive(self, rate: float, began: float, seconds: float) -> None:
        due = began
        async with asyncio.TaskGroup() as group:
            while (due := due + self.rng.expovariate(rate)) < began + seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._ask(due))

    async def _ask_until(self, end: float) -> None:
        while (now := time.monotonic()) < end:
            await self._ask(now)

    async def _ask(self, due: float) -> None:
        try:
            status = await self._post(next(self.requests.bodies))
        except (OSError, EOFError):
            status = 0  # the connection was closed
        if 200 <= status < 300:
            self.latencies.append(time.monotonic() - due)
        else:
            self.failed += 1

    async def _post(self, body: bytes) -> int:
        """The status of the answer to one request, over a connection that is free or a new one."""
        if self.free:
            reader, writer = self.free.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.head + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        [length] = re.findall(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length))
        if b"connection: close" in head:
            writer.close()
        else:
            self.free.append((reader, writer))
        return int(head.split()[1])


def percentile(ordered: list[float], percent: float) -> float:
    """Nearest rank; infinite for no values."""
    if not ordered:
        return math.inf
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
