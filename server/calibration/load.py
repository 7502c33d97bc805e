"""A stage of load on an app in this process: requests through all of it but uvicorn.

Arrivals are random (Poisson) at a rate, and latency counts from when a request was due; or as many
clients as fill a batch twice, each with one request after another, which shows the throughput.
"""

import asyncio
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

from server.calibration.requests import Requests
from server.calibration.search import Knobs, Stage
from server.http.request import Middleware
from worker.models import PipelineModel

MOST_CLIENTS = 128


@dataclass(eq=False)
class Load:
    """Measures stages, as `search.Measure`."""

    app: Middleware
    requests: Requests
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        keys = self.app.settings.api_keys
        self.headers = [(b"content-type", self.requests.media.encode())]
        if keys:
            self.headers.append((b"authorization", b"Bearer " + keys[0].encode()))

    async def __call__(self, knobs: Knobs, rate: float, seconds: float) -> Stage:
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

    def _turn(self, knobs: Knobs) -> None:
        """Nothing waits or runs now."""
        model = self.app.engine.models[self.requests.serves]
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
        status = await self._post(next(self.requests.bodies))
        if 200 <= status < 300:
            self.latencies.append(time.monotonic() - due)
        else:
            self.failed += 1

    async def _post(self, body: bytes) -> int:
        """The status of the answer to one request."""
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
        answered, status = asyncio.Event(), 0

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        path = self.requests.path
        scope = {"type": "http", "method": "POST", "path": path, "headers": self.headers}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
        try:
            await self.app(scope, receive, send)
        finally:
            answered.set()
        return status


def percentile(ordered: list[float], percent: float) -> float:
    """Nearest rank; infinite for no values."""
    if not ordered:
        return math.inf
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
