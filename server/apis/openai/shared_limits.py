"""The limits of API keys over all servers with one PostgreSQL database.

    each second: units taken by this process → a row of each bucket → units left → its part of them
    requests that others may run → a part of the rest → a row of each limit and process

A request never waits for the database: it reads and changes the bucket of its process. While the
database is down each process enforces its part of a limit.
"""

import time

from anyio.to_thread import run_sync

from batching.token_bucket import ParallelLimit, TokenBucket
from server.apis.openai.database import DatabaseDown
from server.apis.openai.jobs import JobRunner
from server.apis.openai.postgres import PROCESSES, PostgresDatabase, lock_number
from server.apis.openai.store import Store

# The units that were left at a time.
LIMITS = """
CREATE TABLE limits (
    name TEXT PRIMARY KEY,
    per_minute DOUBLE PRECISION NOT NULL,
    units DOUBLE PRECISION NOT NULL,
    updated TIMESTAMPTZ NOT NULL
)
"""
# The requests that a process runs or may run.
PARALLEL = """
CREATE TABLE parallel_requests (
    name TEXT, process BIGINT, requests BIGINT NOT NULL, PRIMARY KEY (name, process)
)
"""
# By the clock of the database alone. A step of it, also back, refills at most a minute's units.
REFILLED = (
    "LEAST(limits.per_minute, limits.units + limits.per_minute / 60 * "
    "ABS(EXTRACT(EPOCH FROM clock_timestamp() - limits.updated)))"
)
# In the order of names, so that no two processes wait for each other.
TAKE = (
    "INSERT INTO limits SELECT name, per_minute, per_minute - taken, clock_timestamp() "
    "FROM unnest(?::text[], ?::float8[], ?::float8[]) AS used (name, per_minute, taken) "
    "ORDER BY name ON CONFLICT (name) DO UPDATE SET per_minute = excluded.per_minute, "
    f"units = {REFILLED} - excluded.per_minute + excluded.units, updated = clock_timestamp()"
)
LEFT = f"SELECT name, {REFILLED} FROM limits WHERE {REFILLED} < per_minute"

DEAD = f"DELETE FROM parallel_requests WHERE process NOT IN (SELECT objid::bigint {PROCESSES})"
OTHERS = "SELECT name, sum(requests) FROM parallel_requests WHERE process != ? GROUP BY name"
HOLD = (
    "INSERT INTO parallel_requests VALUES (?, ?, ?) ON CONFLICT (name, process) DO UPDATE "
    "SET requests = excluded.requests WHERE parallel_requests.requests != excluded.requests"
)

Buckets = dict[str, TokenBucket]


class SharedLimits(Store):
    database: PostgresDatabase

    def __init__(self, database: PostgresDatabase, jobs: JobRunner) -> None:
        super().__init__(database, "limits", [LIMITS, PARALLEL])
        self._jobs = jobs
        self._exchanged_at = time.monotonic()
        jobs.stores.append(self)
        jobs.on_poll.append(self._poll)

    async def _poll(self) -> None:
        buckets = {
            f"{key.name} {unit}": bucket
            for key in self._jobs.app.keyring
            for unit, bucket in (("requests", key.requests), ("tokens", key.tokens))
            if bucket
        }
        parallel = {key.name: key.parallel for key in self._jobs.app.keyring if key.parallel}
        taken = {name: bucket.taken for name, bucket in buckets.items()}
        seconds = time.monotonic() - self._exchanged_at
        self._exchanged_at += seconds
        try:
            left, processes = await run_sync(self._exchange, buckets, taken, parallel)
        except DatabaseDown:
            for bucket in buckets.values():
                bucket.go_alone(seconds)
            for limit in parallel.values():
                limit.go_alone()
            return
        now = time.monotonic()
        for name, bucket in buckets.items():
            units = left.get(name, float(bucket.per_minute))
            bucket.exchange(taken[name], units, processes, now)

    def _exchange(
        self, buckets: Buckets, taken: dict[str, float], parallel: dict[str, ParallelLimit]
    ) -> tuple[dict[str, float], int]:
        """Return the units that buckets have left that are not full, and the number of processes.
        Raises DatabaseDown."""
        if names := sorted(name for name in buckets if taken[name]):
            limits = [float(buckets[name].per_minute) for name in names]
            self.database.execute(TAKE, (names, limits, [taken[name] for name in names]))
        left = {name: float(units) for name, units in self.database.execute(LEFT)}
        processes = self.database.count_processes()
        if parallel:
            own = lock_number(self.database.process) % (1 << 32)
            self.database.execute(DEAD)
            others: dict[str, int] = dict(self.database.execute(OTHERS, (own,)))
            for name, limit in parallel.items():
                limit.exchange(int(others.get(name, 0)), processes)
            held = [(name, own, limit.held) for name, limit in parallel.items()]
            self.database.execute_many(HOLD, held)
        return left, processes
