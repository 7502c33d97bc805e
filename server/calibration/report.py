"""What a calibration found, for a terminal: a table, a plot in text, settings to paste."""

import math
from collections.abc import Sequence

from server.calibration.search import Stage

WIDTH = 40  # of the plot's bars, in characters
BAR = "▏▎▍▌▋▊▉█"  # eighths of one


def milliseconds(value: float) -> str:
    return "–" if math.isinf(value) else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def line(stage: Stage, limit_ms: float) -> str:
    """One stage, as it is told while others run; rates a second."""
    offered = f"{stage.rate:.1f}/s" if stage.rate else "as fast as it can"
    verdict = "holds" if stage.holds(limit_ms) else "does not hold"
    if stage.failed:
        verdict += f", {stage.failed} failed"
    return (
        f"{stage.knobs.cap:5d} {stage.knobs.wait_ms:6g} ms {offered:>18} {stage.served:8.1f}/s"
        f" {milliseconds(stage.p50_ms):>11} {milliseconds(stage.p95_ms):>11}  "
        + (verdict if stage.rate else "")
    ).rstrip()


HEADER = f"{'batch':>5} {'wait':>9} {'offered':>18} {'answered':>10} {'p50':>11} {'p95':>11}"


def plot(stages: Sequence[Stage], found: Stage, limit_ms: float) -> list[str]:
    """The 95th percentile over the rate, with the knobs that were found; `|` is the limit."""
    shown = sorted(
        (each for each in stages if each.rate and each.knobs == found.knobs),
        key=lambda each: each.rate,
    )
    scale = WIDTH / (2 * limit_ms)
    lines = [f"{'rate':>9}   95th percentile, | is {milliseconds(limit_ms)}"]
    for stage in shown:
        length = min(WIDTH, stage.p95_ms * scale)
        whole, part = int(length), int(8 * (length % 1))
        drawn = ("█" * whole + (BAR[part] if whole < WIDTH else "")).ljust(WIDTH + 1)
        mark = WIDTH // 2
        drawn = drawn[:mark] + (drawn[mark] if drawn[mark] != " " else "|") + drawn[mark + 1 :]
        lines.append(f"{stage.rate:7.1f}/s   {drawn} {milliseconds(stage.p95_ms)}")
    return lines


def settings(found: Stage, limit_ms: float, generates: bool) -> list[str]:
    """As lines of a .env file. What waits longer than the limit twice over is refused at once."""
    places = max(16, math.ceil(2 * found.rate * limit_ms / 1000))
    if generates:
        return [f"MAX_QUEUE_SIZE={places}"]
    cap, wait_ms = found.knobs.cap, found.knobs.wait_ms
    places = max(places, 2 * cap)  # one batch runs while the next fills
    return [f"MAX_BATCH_SIZE={cap}", f"MAX_BATCH_WAIT_MS={wait_ms:g}", f"MAX_QUEUE_SIZE={places}"]


def summary(stages: Sequence[Stage], found: Stage, limit_ms: float, generates: bool) -> list[str]:
    return [
        "",
        *plot(stages, found, limit_ms),
        "",
        f"{found.rate:.1f} requests/s can be sustained: 95 % of their answers come within "
        f"{milliseconds(found.p95_ms)}, of {milliseconds(limit_ms)}. As settings:",
        "",
        *settings(found, limit_ms, generates),
    ]
