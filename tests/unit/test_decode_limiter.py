"""What is decoded at the same time is bounded, and nobody waits forever for its part."""

import base64
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from PIL import Image

from tests import tiny
from tests.serving import serving, wait_until
from worker.media.decode_limiter import SIZES_PER_REQUEST, DecodeLimiter


def take(budget: DecodeLimiter, count: int, go_on: threading.Event) -> None:
    with budget.lease() as lease:
        lease.take(count)
        go_on.wait(10)


def test_what_does_not_fit_waits_its_turn() -> None:
    budget = DecodeLimiter(10)
    first, second, third = (threading.Event() for _ in range(3))
    with ThreadPoolExecutor(3) as pool:
        one = pool.submit(take, budget, 6, first)
        wait_until(lambda: budget.taken == 6)
        two = pool.submit(take, budget, 9, second)
        wait_until(lambda: len(budget.queue) == 1)
        three = pool.submit(take, budget, 1, third)  # there is some left, but it came later
        wait_until(lambda: len(budget.queue) == 2)
        assert budget.taken == 6
        first.set()
        one.result(10)
        wait_until(lambda: budget.taken == 10)
        second.set()
        third.set()
        done: list[Future[None]] = [two, three]
        assert [each.result(10) for each in done] == [None, None]
    assert budget.taken == 0


def test_what_exceeds_the_budget_has_all_of_it() -> None:
    budget = DecodeLimiter(10)
    with budget.lease() as lease:
        lease.take(1000)
        assert budget.taken == 10
    assert budget.taken == 0


def test_what_was_taken_is_given_back_when_decoding_fails() -> None:
    budget = DecodeLimiter(10)
    with suppress(OSError), budget.lease() as lease:
        lease.take(10)
        raise OSError
    assert budget.taken == 0


def test_who_cannot_wait_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DecodeLimiter(10)

    def out_of_memory(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(budget.changed, "wait_for", out_of_memory)
        with pytest.raises(MemoryError), budget.lease() as lease:
            lease.take(1)
    with budget.lease() as lease:
        lease.take(10)
    assert budget.taken == 0


def test_a_server_takes_images_of_max_image_mp() -> None:
    named = str(tiny.folder("vit"))
    with serving(pipeline_model=named, max_image_mp=1, device="cpu") as server:
        for width, status in ((1000, 200), (1001, 400)):
            buffer = io.BytesIO()
            Image.new("RGB", (width, 1000)).save(buffer, format="PNG")
            answer = httpx.post(server.url, content=buffer.getvalue(), timeout=60)
            assert answer.status_code == status
    assert "1001 x 1000 pixels; at most 1000000" in answer.text


def test_the_images_of_a_list_have_a_sum() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (1000, 1000)).save(buffer, format="PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    with serving(
        pipeline_model=str(tiny.folder("vit")), max_image_mp=1, device="cpu", max_body_mb=1
    ) as server:
        most = SIZES_PER_REQUEST
        for count, status in ((most, 200), (most + 1, 400), (most, 200)):
            answer = httpx.post(server.url, json={"inputs": [image] * count}, timeout=60)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert error["param"].startswith("inputs[")
                assert "more than 16000000 pixels or samples in all" in error["message"]
