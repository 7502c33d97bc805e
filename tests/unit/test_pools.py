"""The pools that prepare inputs and finish outputs."""

import queue
import threading
import time

import pytest

from batching.fair_share import Priority, WorkOwner
from batching.request_queue import WorkItem
from server.core.worker_client import FairPool, Pool


def work_item(payload: str, client: str, priority: Priority) -> WorkItem:
    owner = WorkOwner(client, priority=priority)
    return WorkItem(payload, time.monotonic() + 600, 0.0, owner=owner)


def run_one_thread(pool: Pool[WorkItem]) -> None:
    (thread,) = pool.threads
    thread.start()


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.BATCH])
def test_an_input_does_not_wait_for_a_thousand_of_another_client(priority: Priority) -> None:
    groups: queue.Queue[list[object]] = queue.Queue()
    may_run = threading.Semaphore(0)

    def work(items: list[WorkItem]) -> None:
        groups.put([item.payload for item in items])
        assert may_run.acquire(timeout=60)

    pool = FairPool("test", 1, work)
    pool.put([work_item("bulk", "a", priority) for _ in range(1000)])
    run_one_thread(pool)
    first = groups.get(timeout=60)
    assert len(first) < 100
    pool.put([work_item("short", "b", Priority.INTERACTIVE)])
    may_run.release()
    assert "short" in groups.get(timeout=60)
    pool.stop()
    may_run.release(2)
    pool.threads[0].join(60)
    assert not pool.threads[0].is_alive()


def test_all_inputs_are_prepared_once_by_several_threads() -> None:
    done: queue.Queue[WorkItem] = queue.Queue()

    def work(items: list[WorkItem]) -> None:
        for item in items:
            done.put(item)

    pool = FairPool("test", 3, work)
    for thread in pool.threads:
        thread.start()
    items = [work_item("x", "ab"[n % 2], Priority.INTERACTIVE) for n in range(500)]
    for first in range(0, len(items), 50):
        pool.put(items[first : first + 50])
    prepared = {done.get(timeout=60) for _ in items}
    assert prepared == {*items}
    pool.stop()
    for thread in pool.threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in pool.threads)
    assert done.empty()
