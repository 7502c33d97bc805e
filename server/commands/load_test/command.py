"""`onequeue load`: load one or more servers by URL, then print and plot the results.

    arguments → LoadGenerator, one target at a time → table and JSON on stdout, progress on stderr

`scripts/load_test.py` is the same. It runs on any Python without installed packages.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from server.commands.load_test.arguments import parse_args
from server.commands.load_test.generator import LoadGenerator
from server.commands.load_test.http_client import Client
from server.commands.load_test.latency_plot import plot
from server.commands.load_test.report import (
    describe,
    duration,
    side_by_side,
    summarize,
    table,
    totals,
)
from server.commands.load_test.request_bodies import BOUNDARY, make_bodies, media_type
from server.commands.load_test.samples import Record, percentile

# The endpoint of a URL that has none.
PATHS = {
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "upload": "/v1/audio/transcriptions",
}
CONTENT_TYPES = {
    "text": "text/plain; charset=utf-8",
    "upload": f"multipart/form-data; boundary={BOUNDARY}",
}
PROGRESS_S = 0.25


def load_command(program: str, argv: Sequence[str]) -> None:
    args = parse_args(program, argv)
    results: list[dict[str, Any]] = []
    for number in range(len(args.urls)):
        results.append(load_target(args, number))
        if results[-1]["interrupted"]:
            break
        if len(args.urls) > 1:
            print()
    if len(args.urls) > 1:
        print(side_by_side(args.urls[: len(results)], results))
        print(json.dumps({"targets": results}))


def load_target(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Load one of the targets, print its table and plot, and return its result document."""
    url = args.urls[number]
    record = asyncio.run(measure(args, make_generator(args, number)))
    samples, result = record.samples, summarize(args, url, record)
    try:
        if args.plot:
            points = [(sample.start, 1000 * sample.latency, sample.status) for sample in samples]
            curves = {
                "latency": [1000 * latency for latency in record.latencies],
                "first token": [1000 * x.ttft for x in samples if x.ttft is not None],
            }
            plot(args.plot, describe(args, url), totals(result), points, curves)
    finally:
        print(table(args, url, result), flush=True)
        if len(args.urls) == 1:
            print(json.dumps(result))
    return result


def make_generator(args: argparse.Namespace, number: int = 0) -> LoadGenerator:
    url = urlsplit(args.urls[number])
    if (path := PATHS.get(args.kind)) and not url.path.startswith("/v1/"):
        url = url._replace(path=url.path.rstrip("/").removesuffix("/v1") + path)
    content_type = CONTENT_TYPES.get(args.kind, "application/json")
    if args.kind == "file":
        content_type = media_type(args.file[0])
    client = Client(url, {"content-type": content_type} | dict(args.header))
    return LoadGenerator(args, client, make_bodies(args, number))


async def measure(args: argparse.Namespace, generator: LoadGenerator) -> Record:
    """Run the warm-up and the load; SIGINT and SIGTERM end it and keep the record so far."""
    cancel_on_signal()
    progress = asyncio.create_task(show_progress(generator)) if sys.stderr.isatty() else None
    try:
        try:
            await generator.closed_loop(args.concurrency, args.warmup, math.inf)
        finally:
            generator.record = Record()
        await send_load(args, generator)
    except asyncio.CancelledError:
        generator.record.interrupted = True
    finally:
        if progress:
            progress.cancel()
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        generator.client.close()
    return generator.record


async def send_load(args: argparse.Namespace, generator: LoadGenerator) -> None:
    """Send requests in an open loop at `--rate`, or else in a closed loop."""
    if args.rate:
        await generator.open_loop(arrival_intervals(args), args.requests, args.duration)
    else:
        await generator.closed_loop(args.concurrency, args.requests, args.duration)


def cancel_on_signal() -> list[int]:
    """Let SIGINT and SIGTERM cancel this task; return the list that receives their numbers."""
    loop, task, received = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    assert task is not None

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    return received


def arrival_intervals(args: argparse.Namespace) -> Iterator[float]:
    """Yield the seconds between arrivals at `--rate`."""
    if args.arrivals == "constant":
        return itertools.repeat(1 / args.rate)
    rng = random.Random(f"arrivals {args.seed}")
    return (rng.expovariate(args.rate) for _ in itertools.count())


async def show_progress(generator: LoadGenerator) -> None:
    """Rewrite one line of the terminal while the load runs."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        record = generator.record
        elapsed, done = time.perf_counter() - record.started, len(record.samples)
        # The stride bounds the cost of the median in a long run.
        sampled = sorted(record.latencies[:: len(record.latencies) // 1000 + 1])
        latest_error = list(record.first_errors.items())[-1:]
        line = (
            f"{elapsed:6.1f} s  done {done:,}  {done / elapsed:,.1f}/s  "
            f"in flight {record.in_flight}  errors {done - len(record.latencies)}  "
            f"p50 {duration(1000 * percentile(sampled, 50))}"
            + "".join(f"  first {status}: {message}" for status, message in latest_error)
        )
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
