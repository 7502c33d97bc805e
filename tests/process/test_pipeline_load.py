"""Loads of `POST /` on a server process: its memory, clients that leave, a kill and a restart."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.model.test_pipelines_media import noise, png, wav
from tests.parity import text
from tests.processes import is_ready, started
from tests.serving import wait_until

CLIENTS = 16
PNGS = [png(n, (20 + n, 30)) for n in range(16)]
WAVS = [wav(noise(n, 0.2 + n / 20)) for n in range(16)]

Request = Callable[[int], dict[str, Any]]


@contextmanager
def serving(model: str, task: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server of a tiny model. `port`: 0: any."""
    only = {"PIPELINE_MODEL": str(tiny.folder(model)), "PIPELINE_TASK": task, "CHAT_MODEL": "none"}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--no-access-log"]
    environment = {**only, "EMBEDDING_MODEL": "none", "LOG_LEVEL": "error"}
    with started([*command, "--port", str(port)], **environment) as (child, actual):
        url = f"http://127.0.0.1:{actual}"
        wait_until(lambda: is_ready(url), 60)
        yield url, child


def resident_mb(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def post_all(url: str, numbers: range, request: Request) -> Counter[int]:
    """Send these requests from CLIENTS clients; return how often each status came."""
    statuses: Counter[int] = Counter()
    waiting = iter(numbers)
    async with httpx.AsyncClient(timeout=60) as client:

        async def send() -> None:
            for number in waiting:
                statuses[(await client.post(url, **request(number))).status_code] += 1

        await asyncio.gather(*(send() for _ in range(CLIENTS)))
    return statuses


def words(number: int) -> dict[str, Any]:
    return {"content": text(1 + number * 37 % 30, number)}


def image(number: int) -> dict[str, Any]:
    return {"content": PNGS[number % len(PNGS)], "headers": {"content-type": "image/png"}}


def recording(number: int) -> dict[str, Any]:
    return {"content": WAVS[number % len(WAVS)], "headers": {"content-type": "audio/wav"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "request_"),
    [
        ("text-classification", "bert-classify", words),
        ("token-classification", "bert-ner", words),
        ("image-classification", "vit", image),
        ("automatic-speech-recognition", "wav2vec2-ctc", recording),
    ],
)
def test_memory_after_20000_requests_is_that_after_1000(
    task: str, model: str, request_: Request
) -> None:
    with serving(model, task) as (url, process):
        first = asyncio.run(post_all(url, range(1000), request_))
        before = resident_mb(process)
        rest = asyncio.run(post_all(url, range(1000, 20_000), request_))
        after = resident_mb(process)
    assert first + rest == {200: 20_000}
    print(f"{task}: {before:.0f} MB after 1,000 requests, {after:.0f} after 20,000")
    assert after < 1.1 * before


@pytest.mark.matrix
def test_clients_that_leave_free_their_places() -> None:
    """Of 200 clients 100 leave after 50 ms. A place that stayed taken refuses a later round."""

    def gauges(url: str) -> set[float]:
        lines = httpx.get(url + "/metrics").text.splitlines()
        names = ("onequeue_queue_depth ", "onequeue_transfers ", "vllm:num_requests_waiting ")
        return {float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)}

    async def leave(url: str) -> Counter[int]:
        statuses: Counter[int] = Counter()
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as many:

            async def send(number: int) -> None:
                statuses[(await many.post(url, **words(number))).status_code] += 1

            for _ in range(10):
                tasks = [asyncio.create_task(send(number)) for number in range(200)]
                await asyncio.wait(tasks, timeout=0.05)
                for task in tasks[::2]:
                    task.cancel()
                await asyncio.wait(tasks)
                # The places of those that left are free a little later than their sockets.
                await asyncio.to_thread(wait_until, lambda: gauges(url) == {0.0})
        return statuses

    with serving("bert-classify", "text-classification") as (url, _):
        statuses = asyncio.run(leave(url))
        assert statuses.keys() == {200}
        assert statuses[200] >= 1000
        assert asyncio.run(post_all(url, range(200), words)) == {200: 200}


@pytest.mark.matrix
def test_clients_that_retry_lose_nothing_when_a_server_is_killed() -> None:
    """The server starts again on its port, while clients go on asking."""
    answered: Counter[str] = Counter()

    async def ask(url: str, stop: asyncio.Event, seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(timeout=60) as client:
            while not stop.is_set():
                content, sent_at = text(1 + rng.randrange(20)), time.monotonic()
                while time.monotonic() - sent_at < 60:
                    with suppress(httpx.TransportError):
                        if (await client.post(url, content=content)).status_code == 200:
                            answered["yes"] += 1
                            break
                    await asyncio.sleep(0.05)
                else:
                    answered["no"] += 1

    async def run() -> None:
        stop = asyncio.Event()
        first = serving("bert-classify", "text-classification")
        url, process = await asyncio.to_thread(first.__enter__)
        try:
            clients = [asyncio.create_task(ask(url, stop, seed)) for seed in range(CLIENTS)]
            await asyncio.to_thread(wait_until, lambda: answered["yes"] >= 100)
            process.kill()
        finally:
            await asyncio.to_thread(first.__exit__, None, None, None)
        port = int(url.rpartition(":")[2])
        with serving("bert-classify", "text-classification", port):
            before = answered["yes"]
            await asyncio.to_thread(wait_until, lambda: answered["yes"] >= before + 100)
            stop.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert answered["no"] == 0
