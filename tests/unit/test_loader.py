"""The thread that loads and unloads models runs its jobs one after another."""

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
