"""Runs requests without a connection: background responses, and batches with their lines.

    start → job.run → job.abort, by a client of any process → close

A job is in a store from its beginning, and named by its row's id. Its process runs it to its end.
"""

import asyncio
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from anyio.to_thread import run_sync

from server.apis.openai.store import Store
from server.core.worker_client import WorkerClient
from server.http.request import Application

log = logging.getLogger("onequeue.jobs")

POLL_S = 1.0  # how often cancellations by other processes are read
SWEEP_POLLS = 60


class StoredJob(ABC):
    """Work that a client of `namespace` finds by its id."""

    task: "asyncio.Task[None]"

    def __init__(self, id: str, namespace: bytes) -> None:
        self.id, self.namespace = id, namespace

    @abstractmethod
    async def run(self) -> None:
        """Do the work, and store its result. Errors are part of it."""

    @abstractmethod
    def abort(self) -> None:
        """End the work soon."""

    def drain(self) -> None:  # noqa: B027
        """Prepare for the end of the server, which aborts the work later."""


J = TypeVar("J", bound=StoredJob)


class JobRunner:
    """Owns the jobs that have not ended, and the stores. `start` and `close` run on the loop."""

    app: Application

    def __init__(self, worker_client: WorkerClient) -> None:
        self.worker_client = worker_client
        self.jobs: dict[str, StoredJob] = {}  # by id, oldest first
        self.stores: list[Store] = []
        self.on_start: list[Callable[[], None]] = []
        self.on_poll: list[Callable[[], Awaitable[None]]] = []
        self.is_stopping = False

    def start(self, app: Application) -> None:
        self.app = app
        self.worker_client.on_drain.add(self._drain)
        self._polling = asyncio.get_running_loop().create_task(self._poll())
        for resume in self.on_start:
            resume()

    async def close(self) -> None:
        """Wait for the end of all jobs; the worker client has stopped."""
        self._drain()
        self.worker_client.cancel_all()
        self._polling.cancel()
        tasks = [job.task for job in self.jobs.values()]
        await asyncio.gather(self._polling, *tasks, return_exceptions=True)
        for store in self.stores:
            await run_sync(store.close)

    def run(self, job: StoredJob) -> None:
        self.jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(job.run())
        job.task.add_done_callback(lambda _: self.jobs.pop(job.id))

    def find(self, kind: type[J], namespace: bytes, id: str) -> J | None:
        job = self.jobs.get(id)
        return job if isinstance(job, kind) and job.namespace == namespace else None

    def _drain(self) -> None:
        self.is_stopping = True
        for job in self.jobs.values():
            job.drain()

    async def _poll(self) -> None:
        """Abort the jobs that other processes have cancelled, end those of dead ones, and remove
        expired rows."""
        has_failed = False
        for n in count():
            had_failed, has_failed = has_failed, False
            for store in self.stores:
                try:
                    if store.database.is_shared:
                        await run_sync(store.database.renew)
                        await run_sync(store.release_abandoned)
                    if not n % SWEEP_POLLS:
                        await run_sync(store.remove_expired)
                    if not (self.jobs and store.database.is_shared):
                        continue
                    for id in await run_sync(store.cancelled):
                        if job := self.jobs.get(id):
                            job.abort()
                except (OSError, sqlite3.Error) as error:
                    if not (has_failed or had_failed):  # an outage has one line
                        log.error("store not read error=%.200r", error)
                    has_failed = True
            for poll in self.on_poll:
                await poll()
            await asyncio.sleep(POLL_S)
