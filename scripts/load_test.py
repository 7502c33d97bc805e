#!/usr/bin/env python3
"""Load-test an HTTP inference server by URL: send requests, then print and plot what came back.

Closed loop (--concurrency) or open loop (--rate; latency counts from the scheduled arrival).
It speaks plain HTTP/1.1: no https, proxies or redirects; and it does not judge what an answer says.
Latency percentiles are of 2xx answers only; of each kind of error, the first is shown.
The last line of stdout is one JSON document.

    scripts/load_test.py http://127.0.0.1:8000/ --concurrency 16 --requests 2000 --plot out.svg
    scripts/load_test.py http://127.0.0.1:8000 --kind chat --stream --rate 5 --duration 30 | tail -1
    scripts/load_test.py http://127.0.0.1:8000 http://127.0.0.1:9000 --kind embeddings --duration 10
    scripts/load_test.py http://127.0.0.1:8000 --kind upload --file speech.wav --requests 20
"""

import argparse
import asyncio
import json
import math
import random
import shutil
import signal
import sys
import time
from typing import Any

from http_client import FAILURES, ChatStream, Client, error_name
from latency_plot import percentile, plot
from load_args import make_parser, parse_args
from load_bodies import WORDS, make_bodies, make_client
from load_report import describe, milliseconds, shortened, side_by_side, summarize, table, totals
from load_samples import Record, Sample, read_tokens

__all__ = ["WORDS", "LoadTest", "make_client", "make_parser", "milliseconds", "plot"]


class LoadTest:
    def __init__(self, args: argparse.Namespace, client: Client, number: int = 0) -> None:
        self.args, self.client = args, client
        self.bodies = make_bodies(args, number)
        self.record = Record()

    def issue(self, at: float, requests: float, duration: float) -> bool:
        """Whether one more request may start at this many seconds into the run; counts it."""
        more = self.record.issued < requests and at < duration
        self.record.issued += more
        return more

    async def send(self, scheduled: float | None = None) -> None:
        record, stream = self.record, ChatStream() if self.args.stream else None
        body, on_event_data = next(self.bodies), stream.feed if stream else None
        sent = time.perf_counter()
        start = sent if scheduled is None else scheduled
        sample = Sample(start - record.started, "", 0.0, sent - start)
        record.in_flight += 1
        try:
            async with asyncio.timeout(self.args.timeout):
                response = await self.client.post(body, on_event_data)
            sample.status = str(response.status)
            if response.status == 503 and "retry-after" in response.headers:
                record.retry_after[response.headers["retry-after"]] += 1
            if not sample.ok:
                said = response.body.decode(errors="replace")
                record.first_errors.setdefault(sample.status, shortened(said))
            if sample.ok and self.args.kind == "chat":
                read_tokens(sample, start, response.body, stream)
        except asyncio.CancelledError:
            record.unfinished += 1
            raise
        except FAILURES as error:
            sample.status = error_name(error)
            record.first_errors.setdefault(sample.status, shortened(str(error)))
        finally:
            record.in_flight -= 1
        sample.latency = time.perf_counter() - start
        record.samples.append(sample)
        if sample.ok:
            record.latencies.append(sample.latency)

    async def closed_loop(self, requests: float, duration: float) -> None:
        async def client() -> None:
            started = self.record.started
            while self.issue(time.perf_counter() - started, requests, duration):
                await self.send()

        async with asyncio.TaskGroup() as group:
            for _ in range(int(min(self.args.concurrency, requests))):
                group.create_task(client())

    async def open_loop(self, requests: float, duration: float) -> None:
        args, record = self.args, self.record
        rng = random.Random(f"arrivals {args.seed}")
        poisson, due = args.arrivals == "poisson", 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                due += rng.expovariate(args.rate) if poisson else 1 / args.rate
                if not self.issue(due, requests, duration):
                    break
                scheduled = record.started + due
                # A late arrival still yields once, so that the requests before it get sent.
                await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
                if record.in_flight >= args.max_in_flight:
                    record.dropped += 1
                else:
                    group.create_task(self.send(scheduled))

    async def run(self) -> Record:
        args, loop, task = self.args, asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        progress = loop.create_task(self.show_progress()) if sys.stderr.isatty() else None
        try:
            try:
                await self.client.resolve()
                await self.closed_loop(args.warmup, math.inf)
            finally:
                self.record = Record()
            measure = self.open_loop if args.rate else self.closed_loop
            await measure(args.requests, args.duration)
        except asyncio.CancelledError:
            self.record.interrupted = True
        finally:
            if progress:
                progress.cancel()
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.client.close()
        return self.record

    async def show_progress(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            record = self.record
            elapsed, done = time.perf_counter() - record.started, len(record.samples)
            # A stride keeps the cost of the median the same however long the run gets.
            some = sorted(record.latencies[:: len(record.latencies) // 1000 + 1])
            first = list(record.first_errors.items())[-1:]  # the latest kind of error
            line = (
                f"{elapsed:6.1f} s  done {done:,}  {done / elapsed:,.1f}/s  "
                f"in flight {record.in_flight}  errors {done - len(record.latencies)}  "
                f"p50 {milliseconds(1000 * percentile(some, 50))}"
                + "".join(f"  first {status}: {said}" for status, said in first)
            )
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Load one of the targets, print what came of it, and hand that on as a document."""
    url = args.urls[number]
    record = asyncio.run(LoadTest(args, make_client(args, url), number).run())
    samples, result = record.samples, summarize(args, url, record)
    try:
        if args.plot:
            answers = [(sample.start, 1000 * sample.latency, sample.status) for sample in samples]
            curves = {
                "latency": [1000 * latency for latency in record.latencies],
                "first token": [1000 * x.ttft for x in samples if x.ttft is not None],
            }
            plot(args.plot, describe(args, url), totals(result), answers, curves)
    finally:
        print(table(args, url, result), flush=True)
        if len(args.urls) == 1:
            print(json.dumps(result))
    return result


def main() -> None:
    args = parse_args(__doc__ or "")
    results: list[dict[str, Any]] = []
    for number in range(len(args.urls)):
        results.append(run(args, number))
        if results[-1]["interrupted"]:
            break
        if len(args.urls) > 1:
            print()
    if len(args.urls) > 1:
        print(side_by_side(args.urls[: len(results)], results))
        print(json.dumps({"targets": results}))


if __name__ == "__main__":
    main()
