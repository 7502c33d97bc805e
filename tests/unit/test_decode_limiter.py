"""The decode limiter bounds what is decoded at a time, and no input waits forever."""

import base64
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from PIL import Image

from batching.errors import ClientGone
from tests import tiny
from tests.serving import serving, wait_until
from worker.media.bounded_file import BoundedFile
from worker.media.decode_limiter import SIZES_PER_REQUEST, DecodeLimiter


def take(limiter: DecodeLimiter, count: int, done: threading.Event) -> None:
    with limiter.lease() as lease:
        lease.take(count)
        done.wait(10)


def test_inputs_wait_in_order_of_arrival() -> None:
    limiter = DecodeLimiter(10)
    first, second, third = (threading.Event() for _ in range(3))
    with ThreadPoolExecutor(3) as pool:
        one = pool.submit(take, limiter, 6, first)
        wait_until(lambda: limiter.taken == 6)
        two = pool.submit(take, limiter, 9, second)
        wait_until(lambda: len(limiter.queue) == 1)
        three = pool.submit(take, limiter, 1, third)  # it would fit, but arrived later
        wait_until(lambda: len(limiter.queue) == 2)
        assert limiter.taken == 6
        first.set()
        one.result(10)
        wait_until(lambda: limiter.taken == 10)
        second.set()
        third.set()
        done: list[Future[None]] = [two, three]
        assert [future.result(10) for future in done] == [None, None]
    assert limiter.taken == 0


def test_an_input_above_the_limit_takes_all_of_it() -> None:
    limiter = DecodeLimiter(10)
    with limiter.lease() as lease:
        lease.take(1000)
        assert limiter.taken == 10
    assert limiter.taken == 0


def test_a_failed_decode_returns_its_share() -> None:
    limiter = DecodeLimiter(10)
    with suppress(OSError), limiter.lease() as lease:
        lease.take(10)
        raise OSError
    assert limiter.taken == 0


def test_an_error_while_waiting_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = DecodeLimiter(10)

    def out_of_memory(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(limiter.changed, "wait_for", out_of_memory)
        with pytest.raises(MemoryError), limiter.lease() as lease:
            lease.take(1)
    with limiter.lease() as lease:
        lease.take(10)
    assert limiter.taken == 0


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


def test_an_image_and_the_images_of_a_list_are_accepted_up_to_max_image_mp() -> None:
    model = str(tiny.folder("vit"))
    image = base64.b64encode(png(1000, 1000)).decode()
    limit = SIZES_PER_REQUEST
    with serving(pipeline_model=model, device="cpu", max_image_mp=1, max_body_mb=1) as server:
        for width, status in ((1000, 200), (1001, 400)):
            response = httpx.post(server.url, content=png(width, 1000), timeout=60)
            assert response.status_code == status
        assert "1001 x 1000 pixels; at most 1000000" in response.text
        for count, status in ((limit, 200), (limit + 1, 400), (limit, 200)):
            response = httpx.post(server.url, json={"inputs": [image] * count}, timeout=60)
            assert response.status_code == status, response.text
            if status == 400:
                error = response.json()["error"]
                assert error["param"].startswith("inputs[")
                assert "more than 16000000 pixels or samples in all" in error["message"]


def test_text_does_not_wait_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are decoded in threads of their own, until their clients have left."""
    reads, stopped = [], []

    def read(file: BoundedFile, size: int | None = -1) -> bytes:
        reads.append(file)
        wait_until(lambda: not file._is_wanted())
        stopped.append(file)
        raise ClientGone("left")

    image = png(10, 10)
    with (
        serving(
            pipeline_model=str(tiny.folder("vit")), embedding_model="demo", device="cpu"
        ) as server,
        ThreadPoolExecutor(10) as pool,
    ):
        monkeypatch.setattr(BoundedFile, "read", read)

        def send_image(_: int) -> None:
            with suppress(httpx.ReadTimeout):
                httpx.post(server.url, content=image, timeout=httpx.Timeout(60, read=1))

        images = pool.map(send_image, range(10))
        wait_until(lambda: len(reads) > 1)
        url = server.url + "/v1/embeddings"
        assert httpx.post(url, json={"input": "a"}, timeout=60).status_code == 200
        assert not stopped
        list(images)
        wait_until(lambda: len(stopped) == len(reads))
