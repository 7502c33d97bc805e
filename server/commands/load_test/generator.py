"""Send request bodies to one server in a closed or an open loop, and record the responses.

    bodies → closed_loop | open_loop → Client → Record

Used by `onequeue load` and `onequeue calibrate`. It imports the standard library only, and it does
not check the content of responses.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator

from server.commands.load_test.http_client import FAILURES, ChatStream, Client, error_name
from server.commands.load_test.samples import Record, Sample, read_tokens

MAX_ERROR_CHARS = 200


class LoadGenerator:
    """Post bodies by one client. `record` is the current run's; replace it to start another."""

    def __init__(self, args: argparse.Namespace, client: Client, bodies: Iterator[bytes]) -> None:
        self.args, self.client, self.bodies = args, client, bodies
        self.record = Record()

    async def closed_loop(self, clients: int, requests: float, duration: float) -> None:
        """Run so many clients; each sends its next request when it has its response."""

        async def client() -> None:
            started = self.record.started
            while self._issue(time.perf_counter() - started, requests, duration):
                await self.send()

        async with asyncio.TaskGroup() as group:
            for _ in range(int(min(clients, requests))):
                group.create_task(client())

    async def open_loop(self, intervals: Iterator[float], requests: float, duration: float) -> None:
        """Send at scheduled times, `intervals` seconds apart, whether or not responses come."""
        record, due = self.record, 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                due += next(intervals)
                if not self._issue(due, requests, duration):
                    break
                scheduled = record.started + due
                # A late arrival still yields once, so that the requests before it get sent.
                await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
                if record.in_flight >= self.args.max_in_flight:
                    record.dropped += 1
                else:
                    group.create_task(self.send(scheduled))

    def _issue(self, at: float, requests: float, duration: float) -> bool:
        """Return whether one more request may start `at` seconds into the run; count it."""
        more = self.record.issued < requests and at < duration
        self.record.issued += more
        return more

    async def send(self, scheduled: float | None = None) -> None:
        """Post the next body; its latency counts from the scheduled time if there is one."""
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
                message = response.body.decode(errors="replace")
                record.first_errors.setdefault(sample.status, shortened(message))
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


def shortened(text: str) -> str:
    """Return a text on one line, cut, without characters that a terminal cannot show."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 1] + "…"
