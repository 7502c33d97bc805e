#!/usr/bin/env python3
"""Load-test an HTTP inference server by URL: send requests, then print and plot what came back.

Closed loop (--concurrency) or open loop (--rate; latency counts from the scheduled arrival).
It speaks plain HTTP/1.1: no https, proxies or redirects; and it does not judge what an answer says.
Latency percentiles are of 2xx answers only; of each kind of error, the first is shown.
The last line of stdout is one JSON document.

    scripts/load_test.py http://127.0.0.1:8000/ --concurrency 16 --requests 2000 --plot out.svg
    scripts/load_test.py http://127.0.0.1:8000 --kind chat --stream --rate 5 --duration 30 | tail -1
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import math
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_client import FAILURES, ChatStream, Client, IncompleteStreamError, error_name
from latency_plot import percentile, plot

CHAT_PATH = "/v1/chat/completions"
MAX_SHOWN = 200  # characters of an error
WORDS = (
    "the a old new small river city morning engine letter music winter garden teacher window "
    "quiet bright heavy simple open runs keeps finds moves answers over under beside before after "
    "and but because while people water paper number story market island question memory light"
)


@dataclass(slots=True)
class Sample:
    start: float
    status: str
    latency: float
    send_lag: float = 0.0
    ttft: float | None = None
    gaps: Sequence[float] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status.startswith("2")


@dataclass
class Record:
    """What one run has seen so far."""

    started: float = field(default_factory=time.perf_counter)
    cpu_started: float = field(default_factory=time.process_time)
    samples: list[Sample] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    retry_after: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)  # by status: what it said
    issued: int = 0
    in_flight: int = 0
    dropped: int = 0
    unfinished: int = 0
    interrupted: bool = False


class LoadTest:
    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self.args, self.client = args, client
        self.bodies = make_bodies(args)
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
            line = (
                f"{elapsed:6.1f} s  done {done}  {done / elapsed:.1f}/s  "
                f"in flight {record.in_flight}  errors {done - len(record.latencies)}  "
                f"p50 {1000 * percentile(some, 50):.1f} ms"
            )
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)


def read_tokens(sample: Sample, start: float, body: bytes, stream: ChatStream | None) -> None:
    if stream is None or body:
        usage = json.loads(body).get("usage") or {}
        sample.output_tokens = usage.get("completion_tokens", 0)
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        return
    if not stream.done:
        raise IncompleteStreamError
    times = stream.times
    sample.output_tokens = len(times) if stream.usage is None else stream.usage
    sample.prompt_tokens = stream.prompt_tokens
    first = times[0] if times else stream.first  # a token may have no text of its own
    sample.ttft = first - start if first else None
    sample.gaps = [later - earlier for earlier, later in itertools.pairwise(times)]


def make_bodies(args: argparse.Namespace) -> Iterator[bytes]:
    rng, vocabulary = random.Random(args.seed), WORDS.split()
    chat: dict[str, Any] = {"model": args.model} if args.model else {}
    chat |= args.fields
    if args.max_tokens:
        chat["max_tokens"] = args.max_tokens
    if args.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    while True:
        words = rng.choices(vocabulary, k=rng.randint(*args.words))
        if args.mask:
            words.insert(rng.randint(0, len(words)), args.mask)
        text = " ".join(words)
        if args.kind == "text":
            yield text.encode()
        elif args.kind == "json":
            yield json.dumps({args.json_key: text}).encode()
        else:
            system = [{"role": "system", "content": args.system}] if args.system else []
            messages = [*system, {"role": "user", "content": text}]
            yield json.dumps(chat | {"messages": messages}).encode()


def make_client(args: argparse.Namespace) -> Client:
    url = urlsplit(args.url)
    if args.kind == "chat" and not url.path.endswith(CHAT_PATH):
        url = url._replace(path=url.path.rstrip("/").removesuffix("/v1") + CHAT_PATH)
    content_type = "text/plain; charset=utf-8" if args.kind == "text" else "application/json"
    return Client(url, {"content-type": content_type} | dict(args.header))


def shortened(text: str) -> str:
    """On one line, of what a terminal can show."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 1] + "…"


def spread(seconds: Sequence[float], *percents: float) -> dict[str, float] | None:
    """Percentiles and the largest, in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{percent:g}": percentile(ordered, percent) for percent in percents}
    return {name: round(1000 * value, 3) for name, value in (found | {"max": ordered[-1]}).items()}


def summarize(args: argparse.Namespace, record: Record) -> dict[str, Any]:
    elapsed = time.perf_counter() - record.started
    samples, ok = record.samples, [sample for sample in record.samples if sample.ok]
    statuses = dict(sorted(Counter(sample.status for sample in samples).items()))
    lag = spread([sample.send_lag for sample in samples], 99) if args.rate else None
    result: dict[str, Any] = {
        "requests": len(samples),
        "ok": len(ok),
        "errors": len(samples) - len(ok),
        "dropped": record.dropped,
        "unfinished": record.unfinished,
        "interrupted": record.interrupted,
        "elapsed_s": round(elapsed, 3),
        "requests_per_s": round(len(samples) / elapsed, 3),
        "ok_per_s": round(len(ok) / elapsed, 3),
        "statuses": statuses,
        "latency_ms": spread(record.latencies, 50, 90, 95, 99),
        "latency_ms_by_status": {
            status: spread([x.latency for x in samples if x.status == status], 50, 90, 95, 99)
            for status in statuses
        },
        "first_errors": record.first_errors,
        "retry_after": dict(record.retry_after),
        "send_lag_p99_ms": lag and lag["p99"],
        "generator_cpu_share": round((time.process_time() - record.cpu_started) / elapsed, 3),
    }
    if args.kind == "chat":
        tokens = sum(sample.output_tokens for sample in ok)
        first = [sample.ttft for sample in ok if sample.ttft is not None]
        result |= {
            "prompt_tokens": sum(sample.prompt_tokens for sample in ok),
            "output_tokens": tokens,
            "output_tokens_per_s": round(tokens / elapsed, 3),
            "ttft_ms": spread(first, 50, 95),
            "inter_token_ms": spread([gap for sample in ok for gap in sample.gaps], 50, 95),
        }
    # Header values stay out: they may hold a key.
    settings = vars(args) | {"header": [name for name, _ in args.header]}
    result["settings"] = {k: None if v == math.inf else v for k, v in settings.items()}
    return result


def describe(args: argparse.Namespace) -> str:
    loop = f"closed loop, concurrency {args.concurrency}"
    if args.rate:
        loop = f"open loop, {args.rate:g}/s {args.arrivals}"
    kind = "streamed chat" if args.stream else args.kind
    return f"{kind}, {loop}, {args.url}"


def totals(result: dict[str, Any]) -> str:
    counts = ", ".join(f"{result[key]} {key}" for key in ("errors", "dropped", "unfinished"))
    rate = f"{result['elapsed_s']:.2f} s, {result['requests_per_s']:.1f}/s"
    return f"{result['requests']} requests in {rate}, {counts}"


def table(args: argparse.Namespace, result: dict[str, Any]) -> str:
    columns = ("p50", "p90", "p95", "p99", "max")
    lines = [
        describe(args) + (" (interrupted)" if result["interrupted"] else ""),
        totals(result),
        "",
        f"{'status':24}{'requests':>10}" + "".join(f"{name + ' ms':>11}" for name in columns),
    ]
    for status, values in result["latency_ms_by_status"].items():
        count = result["statuses"][status]
        lines.append(f"{status:24}{count:10}" + "".join(f"{values[c]:11.2f}" for c in columns))
    lines.append("")
    lines += [f"{'first ' + s:24}{said}" for s, said in result["first_errors"].items() if said]
    if result.get("output_tokens"):
        rate = result["output_tokens_per_s"]
        lines.append(f"{'output tokens':24}{result['output_tokens']}, {rate:.1f}/s")
    for name, key in (("first token", "ttft_ms"), ("inter-token", "inter_token_ms")):
        if values := result.get(key):
            lines.append(f"{name:24}p50 {values['p50']:.2f} ms, p95 {values['p95']:.2f} ms")
    if result["retry_after"]:
        seen = ", ".join(f"{value!r} x {count}" for value, count in result["retry_after"].items())
        lines.append(f"{'Retry-After on 503':24}{seen}")
    lag, share = result["send_lag_p99_ms"], result["generator_cpu_share"]
    line = f"{'load generator':24}{100 * share:.0f} % of one core"
    line += "" if lag is None else f", send lag p99 {lag:.2f} ms"
    if share > 0.9 or (lag or 0) > 20:
        line += "; it may be the bottleneck itself"
    return "\n".join([*lines, line])


def http_url(text: str) -> str:
    url = urlsplit(text)
    plain = url.scheme == "http" and url.hostname and "@" not in url.netloc
    if not (plain and text.isascii() and text.isprintable() and " " not in text and url.port != 0):
        message = "must be http://host[:port][/path] in ASCII; https is not supported"
        raise argparse.ArgumentTypeError(message)
    return text


def word_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    words = int(low), int(high if dash else low)
    if not 1 <= words[0] <= words[1]:
        raise ValueError
    return words


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and text.isprintable() and text.encode("latin-1")):
        raise ValueError
    return name.strip().lower(), value.strip()


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError
    return value


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def make_parser() -> argparse.ArgumentParser:
    description, _, examples = (__doc__ or "").partition("\n\n    ")
    parser = argparse.ArgumentParser(
        description=description,
        epilog="    " + examples,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("url", type=http_url, help="http:// only")
    add("--kind", choices=("text", "json", "chat"), default="text")
    add("--concurrency", type=count, default=1, help="closed loop: clients (and for --warmup)")
    add("--rate", type=positive, help="open loop: this many arrivals per second")
    add("--arrivals", choices=("poisson", "constant"), default="poisson")
    add("--max-in-flight", type=count, default=512, help="open loop: drop arrivals beyond it")
    add("--requests", type=count, default=math.inf, help="stop after this many")
    add("--duration", type=positive, default=math.inf, help="stop sending after these seconds")
    add("--warmup", type=int, default=0, help="requests sent first and not counted")
    add("--timeout", type=positive, default=60.0, help="seconds for one whole request")
    add("--words", type=word_range, default=(4, 20), metavar="N|LOW-HIGH", help="of a text (4-20)")
    add("--mask", help='put this word into each text at a random place, e.g. "[MASK]"')
    add("--json-key", default="inputs")
    add("--model", help="chat: the model to name")
    add("--max-tokens", type=count, help="chat")
    add("--system", help="chat: a system message, the same in every request")
    add("--fields", type=json.loads, default={}, metavar="JSON", help="chat: more of the request")
    add("--stream", action="store_true", help="chat: measure first-token and inter-token times")
    add("--header", type=header, action="append", default=[], metavar='"K: V"')
    add("--seed", type=int, default=0)
    add("--plot", metavar="FILE", help="write a latency plot, .svg, or .png (needs Pillow)")
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.stream and args.kind != "chat":
        parser.error("--stream needs --kind chat")
    if args.plot and not args.plot.endswith((".svg", ".png")):
        parser.error("--plot takes a name that ends in .svg or .png")
    if args.plot and not Path(args.plot).parent.is_dir():
        parser.error("--plot names a directory that is not there")
    if args.plot and args.plot.endswith(".png") and not importlib.util.find_spec("PIL"):
        parser.error("a .png plot needs Pillow; .svg needs nothing")
    if args.requests == args.duration == math.inf:
        parser.error("give --requests, --duration or both")
    return args


def main() -> None:
    args = parse_args()
    record = asyncio.run(LoadTest(args, make_client(args)).run())
    samples, result = record.samples, summarize(args, record)
    try:
        if args.plot:
            answers = [(sample.start, 1000 * sample.latency, sample.status) for sample in samples]
            curves = {
                "latency": [1000 * latency for latency in record.latencies],
                "first token": [1000 * x.ttft for x in samples if x.ttft is not None],
            }
            plot(args.plot, describe(args), totals(result), answers, curves)
    finally:
        print(table(args, result))
        print(json.dumps(result))


if __name__ == "__main__":
    main()
