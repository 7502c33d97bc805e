"""Measure stages of load on a server in this process, over HTTP on loopback.

A stage with a rate is an open loop of Poisson arrivals; latency counts from the scheduled arrival.
A stage without one is a closed loop with twice as many clients as a batch has rows, which gives the
throughput.
"""

import itertools
import math
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from server.commands.calibrate.requests import RequestGenerator
from server.commands.calibrate.search import BatchLimits, Stage
from server.commands.load_test.generator import LoadGenerator
from server.commands.load_test.http_client import Client
from server.commands.load_test.samples import Record, percentile
from server.http.request import Application

MAX_CLIENTS = 128


@dataclass(eq=False)
class StageRunner:
    """Implement `search.Measure`."""

    app: Application
    requests: RequestGenerator
    port: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        headers = {"content-type": self.requests.media}
        if keys := self.app.settings.api_keys:
            headers["authorization"] = f"Bearer {keys[0]}"
        url = urlsplit(f"http://127.0.0.1:{self.port}{self.requests.path}")
        self.generator = LoadGenerator(Client(url, headers), self.requests.bodies)

    async def __call__(self, limits: BatchLimits, rate: float, seconds: float) -> Stage:
        self._apply(limits)
        self.generator.record = record = Record()
        if rate:
            intervals = (self.rng.expovariate(rate) for _ in itertools.count())
            await self.generator.open_loop(intervals, math.inf, seconds)
        else:
            clients = min(2 * limits.cap, MAX_CLIENTS)
            await self.generator.closed_loop(clients, math.inf, seconds)
        elapsed = time.perf_counter() - record.started
        ordered = sorted(record.latencies)
        p50, p95 = (1000 * percentile(ordered, percent) for percent in (50, 95))
        failed = len(record.samples) - len(ordered)
        return Stage(limits, rate, len(ordered) / elapsed, p50, p95, failed)

    def _apply(self, limits: BatchLimits) -> None:
        """Set the engine's limits; nothing waits or runs between stages."""
        from worker.embedding.engine import ScoringEngine
        from worker.pipeline.engine import PipelineEngine

        model = self.app.worker_client.models[self.requests.registry_name]
        if isinstance(model.engine, PipelineEngine):
            batcher = model.engine.batcher
            batcher.max_size = batcher.cap = limits.cap
            batcher.max_wait_s = limits.wait_ms / 1000
        elif isinstance(model.engine, ScoringEngine):
            model.engine.max_running = limits.cap
            model.engine.clear()
