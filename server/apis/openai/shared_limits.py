"""The limits of API keys over all servers with one PostgreSQL database.

    each second: units taken by this process → a row of each bucket → units left → its part of them

A request never waits for the database: it reads and changes the bucket of its process. While the
database is down each process enforces its part of a limit.
"""

import time

from anyio.to_thread import run_sync

from batching.token_bucket import TokenBucket
from server.apis.openai.database import DatabaseDown
from server.apis.openai.jobs import JobRunner
from server.apis.openai.postgres import PostgresDatabase
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


class SharedLimits(Store):
    database: PostgresDatabase

    def __init__(self, database: PostgresDatabase, jobs: JobRunner) -> None:
        super().__init__(database, "limits", [LIMITS])
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
        taken = {name: bucket.taken for name, bucket in buckets.items()}
        seconds = time.monotonic() - self._exchanged_at
        self._exchanged_at += seconds
        try:
            left, processes = await run_sync(self._exchange, buckets, taken)
        except DatabaseDown:
            for bucket in buckets.values():
                bucket.go_alone(seconds)
            return
        now = time.monotonic()
        for name, bucket in buckets.items():
            units = left.get(name, float(bucket.per_minute))
            bucket.exchange(taken[name], units, processes, now)

    def _exchange(
        self, buckets: dict[str, TokenBucket], taken: dict[str, float]
    ) -> tuple[dict[str, float], int]:
        """Return the units that buckets have left that are not full, and the number of processes.
        Raises DatabaseDown."""
        if names := sorted(name for name in buckets if taken[name]):
            limits = [float(buckets[name].per_minute) for name in names]
            self.database.execute(TAKE, (names, limits, [taken[name] for name in names]))
        left = {name: float(units) for name, units in self.database.execute(LEFT)}
        return left, self.database.count_processes()
