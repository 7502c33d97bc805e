"""The thread that loads and unloads models runs its jobs one after another."""

import threading

from worker.loader import Loader


def test_a_cancelled_job_does_not_run_and_the_next_one_does() -> None:
    loader, ran = Loader(), list[str]()
    loader.submit(lambda: ran.append("cancelled")).cancel()
    following = loader.submit(lambda: ran.append("next"))
    loader.thread.start()
    following.result(60)
    assert ran == ["next"]
    loader.stop()
    loader.thread.join(60)
    assert not loader.thread.is_alive()


def test_an_abandoned_job_keeps_its_thread_and_another_one_runs_the_next_job() -> None:
    loader, entered, gate = Loader(), threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        gate.wait(60)

    stuck = loader.submit(hang)
    following = loader.submit(threading.current_thread)
    first = loader.thread
    first.start()
    assert entered.wait(60)
    assert not loader.abandon(stuck, lambda: False)
    assert loader.abandon(stuck, lambda: True)
    assert following.result(60) is loader.thread is not first
    assert not loader.abandon(stuck, lambda: True)
    gate.set()
    first.join(60)
    assert not first.is_alive()
    assert loader.submit(threading.current_thread).result(60) is loader.thread
    assert not loader.abandon(following, lambda: True)  # it has ended
    loader.stop()
    loader.thread.join(60)


def test_a_job_that_waits_is_cancelled() -> None:
    loader = Loader()
    waiting = loader.submit(lambda: None)
    assert loader.abandon(waiting, lambda: False)
    assert waiting.cancelled()
