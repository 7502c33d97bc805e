"""The results of a load test: one JSON document, and tables for a terminal."""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from server.commands.load_test.samples import Record, percentile

COLUMNS = ("p50", "p90", "p95", "p99", "max")


def summarize(args: argparse.Namespace, url: str, record: Record) -> dict[str, Any]:
    """Return the JSON document of one target. Its keys are an interface."""
    elapsed = time.perf_counter() - record.started
    samples, ok = record.samples, [sample for sample in record.samples if sample.ok]
    statuses = dict(sorted(Counter(sample.status for sample in samples).items()))
    lag = percentiles([sample.send_lag for sample in samples], 99) if args.rate else None
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
        "latency_ms": percentiles(record.latencies, 50, 90, 95, 99),
        "latency_ms_by_status": {
            status: percentiles([x.latency for x in samples if x.status == status], 50, 90, 95, 99)
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
            "ttft_ms": percentiles(first, 50, 95),
            "inter_token_ms": percentiles([gap for sample in ok for gap in sample.gaps], 50, 95),
        }
    # Header values stay out: they may hold a key.
    settings = vars(args) | {"url": url, "header": [name for name, _ in args.header]}
    result["settings"] = {k: None if v == math.inf else v for k, v in settings.items()}
    return result


def percentiles(seconds: Sequence[float], *percents: float) -> dict[str, float] | None:
    """Return percentiles and the maximum, in milliseconds; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    values = {f"p{percent:g}": percentile(ordered, percent) for percent in percents}
    values["max"] = ordered[-1]
    return {name: round(1000 * value, 3) for name, value in values.items()}


def describe(args: argparse.Namespace, url: str) -> str:
    loop = f"closed loop, concurrency {args.concurrency}"
    if args.rate:
        loop = f"open loop, {args.rate:g}/s {args.arrivals}"
    kind = "streamed chat" if args.stream else args.kind
    return f"{kind}, {loop}, {url}"


def totals(result: dict[str, Any]) -> str:
    counts = ", ".join(f"{result[key]} {key}" for key in ("errors", "dropped", "unfinished"))
    rate = f"{result['elapsed_s']:.2f} s, {result['requests_per_s']:,.1f}/s"
    return f"{result['requests']:,} requests in {rate}, {counts}"


def duration(milliseconds: float) -> str:
    """Format with about three digits: 0.35 ms, 41.2 ms, 205 ms, 5.53 s, 61.2 s."""
    value, unit = (milliseconds, "ms") if milliseconds < 999.5 else (milliseconds / 1000, "s")
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def table(args: argparse.Namespace, url: str, result: dict[str, Any]) -> str:
    lines = [
        describe(args, url) + (" (interrupted)" if result["interrupted"] else ""),
        totals(result),
        "",
        f"{'status':24}{'requests':>10}" + "".join(f"{name:>11}" for name in COLUMNS),
    ]
    for status, values in result["latency_ms_by_status"].items():
        count = result["statuses"][status]
        lines.append(
            f"{status:24}{count:10,}" + "".join(f"{duration(values[c]):>11}" for c in COLUMNS)
        )
    lines.append("")
    for status, message in result["first_errors"].items():
        if message:
            lines.append(f"{'first ' + status:23} {message}")
    if result.get("output_tokens"):
        rate = result["output_tokens_per_s"]
        lines.append(f"{'output tokens':24}{result['output_tokens']:,}, {rate:,.1f}/s")
    for name, key in (("first token", "ttft_ms"), ("inter-token", "inter_token_ms")):
        if values := result.get(key):
            p50, p95 = duration(values["p50"]), duration(values["p95"])
            lines.append(f"{name:24}p50 {p50}, p95 {p95}")
    if result["retry_after"]:
        seen = ", ".join(f"{value!r} x {count}" for value, count in result["retry_after"].items())
        lines.append(f"{'Retry-After on 503':24}{seen}")
    lag, share = result["send_lag_p99_ms"], result["generator_cpu_share"]
    line = f"{'load generator':24}{100 * share:.0f} % of one core"
    line += "" if lag is None else f", send lag p99 {duration(lag)}"
    if share > 0.9:
        line += "; it may limit the rate"
    return "\n".join([*lines, line])


def side_by_side(urls: Sequence[str], results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a column per target, and ratios to the first one."""
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("answered (2xx)/s", "ok_per_s", "{:,.1f}".format),
        ("errors", "errors", "{:,}".format),
        *((name, f"latency_ms.{name}", duration) for name in COLUMNS),
        ("first token p50", "ttft_ms.p50", duration),
        ("output tokens/s", "output_tokens_per_s", "{:,.1f}".format),
    ]
    lines = [" " * 20 + "".join(f"{url.removeprefix('http://')[-28:]:>30}" for url in urls)]
    for label, path, show in rows:
        key, _, part = path.partition(".")
        of_key = [result.get(key) for result in results]
        values = [value and value[part] for value in of_key] if part else of_key
        if any(value is not None for value in values):
            cells = [_cell(value, values[0], show, n) for n, value in enumerate(values)]
            lines.append(f"{label:20}" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)


def _cell(value: float | None, first: float | None, show: Callable[[float], str], n: int) -> str:
    if value is None:
        return "–"
    return show(value) + (f" (× {value / first:.2f})" if n and first else "")
