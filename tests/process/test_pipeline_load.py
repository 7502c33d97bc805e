"""The memory of a server process under long loads of `POST /`."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
def serving(model: str, task: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server of a tiny model."""
    only = {"PIPELINE_MODEL": str(tiny.folder(model)), "PIPELINE_TASK": task, "CHAT_MODEL": "none"}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--no-access-log"]
    environment = {**only, "EMBEDDING_MODEL": "none", "LOG_LEVEL": "error"}
    with started([*command, "--port", "0"], **environment) as (child, port):
        url = f"http://127.0.0.1:{port}"
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
