from worker.registry import Breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(threshold=3, cooldown_s=5)
    breaker.failed(0)
    breaker.failed(1)
    breaker.succeeded()
    breaker.failed(2)
    breaker.failed(3)
    assert not breaker.is_open
    breaker.failed(4)
    assert breaker.is_open
    assert breaker.probe_at == 9


def test_one_successful_probe_closes_it() -> None:
    breaker = Breaker(threshold=1, cooldown_s=5)
    breaker.failed(0)
    breaker.succeeded()
    assert not breaker.is_open


def test_a_failed_probe_keeps_it_open_for_another_cooldown() -> None:
    breaker = Breaker(threshold=2, cooldown_s=5)
    breaker.failed(0)
    breaker.failed(0)
    breaker.failed(5)
    assert breaker.probe_at == 10
