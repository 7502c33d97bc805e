"""The pools that prepare inputs and finish outputs."""

import queue

from batching.request_queue import WorkItem
from server.core.worker_client import Pool


def test_all_inputs_are_prepared_once_by_several_threads() -> None:
    done: queue.Queue[WorkItem] = queue.Queue()

    def work(items: list[WorkItem]) -> None:
        for item in items:
            done.put(item)

    pool = Pool[WorkItem]("test", 3, work)
    for thread in pool.threads:
        thread.start()
    items: list[WorkItem] = [WorkItem("x", 0.0, 0.0) for _ in range(500)]
    for first in range(0, len(items), 50):
        pool.put(items[first : first + 50])
    prepared = {done.get(timeout=60) for _ in items}
    assert prepared == {*items}
    pool.stop()
    for thread in pool.threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in pool.threads)
    assert done.empty()
