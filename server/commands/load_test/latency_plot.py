"""The latency plot of a load test: every response over time, and the latencies' distribution.

`plot` draws two panels, by axes. Coordinates are pixels from the top left of an SVG image.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from server.commands.load_test.report import duration
from server.commands.load_test.samples import percentile

WIDTH, HEIGHT = 1100, 460
TOP, BOTTOM = 124, HEIGHT - 60  # of the panels
INK, GRID = "#333333", "#e4e4e4"
COLORS = ("#2b6cb0", "#dd6b20", "#c53030", "#6b46c1", "#2f855a", "#718096")
Point = tuple[float, float, str]  # start in seconds, latency in milliseconds, status


def plot(
    path: str, title: str, subtitle: str, points: Sequence[Point], curves: dict[str, list[float]]
) -> None:
    """Draw every response over time on the left, the distribution of each curve on the right."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(20, 26, title[:120], size=16),
        text(20, 46, subtitle),
    ]
    if points:
        x = Axis([start for start, _, _ in points], 70, WIDTH / 2 - 20)
        y = Axis([latency for _, latency, _ in points], BOTTOM, TOP, may_be_log=True)
        svg += frame(x, y, "start of the request (s)", "latency (ms)")
        svg += responses_over_time(points, x, y)
    if curves := {name: values for name, values in curves.items() if values}:
        times = [value for values in curves.values() for value in values]
        x = Axis(times, WIDTH / 2 + 70, WIDTH - 25, may_be_log=True)
        y = Axis([0, 100], BOTTOM, TOP)
        svg += frame(x, y, "time (ms)", "2xx responses within that time (%)")
        svg += distributions(curves, x, y)
    Path(path).write_text("\n".join([*svg, "</svg>\n"]), encoding="utf-8")


def line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def dot(x: float, y: float, radius: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 12) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


class Axis:
    """Map values to pixels: linearly from 0, or logarithmically if the values lie far apart."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, may_be_log: bool = False
    ) -> None:
        low, high = min(values), max(values)
        self.start, self.end = start, end
        self.log = may_be_log and high > 30 * percentile(sorted(values), 5)
        self.note = ", log scale" if self.log else ""
        steps = [m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)]
        if self.log:
            self.low = max(step for step in steps if step <= max(low, steps[0]))
            self.high = min(step for step in steps if step >= high)
            self.ticks = [step for step in steps if self.low <= step <= self.high]
            if len(self.ticks) > 8:
                self.ticks = [tick for tick in self.ticks if tick in steps[::3]]
        else:
            step = next(step for step in steps if step >= high / 6)
            self.low, self.high = 0.0, max(high, step) * 1.02
            self.ticks = [i * step for i in range(int(self.high / step) + 1)]

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def frame(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    """Draw the grid, ticks and labels of one panel."""
    for tick in y.ticks:
        yield line([(x.start, y.at(tick)), (x.end, y.at(tick))], GRID, 1)
        yield text(x.start - 8, y.at(tick) + 4, f"{tick:.6g}", "end")
    for tick in x.ticks:
        yield line([(x.at(tick), y.start), (x.at(tick), y.end)], GRID, 1)
        yield text(x.at(tick), y.start + 18, f"{tick:.6g}", "middle")
    yield line([(x.start, y.end), (x.start, y.start), (x.end, y.start)], INK, 1)
    yield text((x.start + x.end) / 2, y.start + 38, x_label + x.note, "middle")
    yield text(x.start - 40, y.end - 12, y_label + y.note)


def legend(x: Axis, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Draw up to two rows above a panel; entries that do not fit are left out."""
    left, row = x.start - 40, 66
    for label, color in entries:
        width = 22 + 6.6 * len(label)
        if left + width > x.end:
            left, row = x.start - 40, row + 18
        if row <= 84:
            yield dot(left + 4, row, 4, color)
            yield text(left + 14, row + 4, label)
        left += width + 12


def responses_over_time(points: Sequence[Point], x: Axis, y: Axis) -> Iterator[str]:
    """Draw a dot per pixel and status, which looks the same as all and keeps the file small."""
    counts = Counter(status for _, _, status in points)
    ranked = sorted(counts, key=lambda status: (not status.startswith("2"), -counts[status]))
    colors = {status: COLORS[min(i, len(COLORS) - 1)] for i, status in enumerate(ranked)}
    dots: dict[tuple[str, int, int], tuple[float, float]] = {}
    for start, latency, status in points:
        at = x.at(start), y.at(latency)
        dots.setdefault((status, round(at[0]), round(at[1])), at)
    for (status, _, _), position in dots.items():
        yield dot(*position, 1.8, colors[status])
    yield from legend(x, [(f"{status} ({counts[status]})", colors[status]) for status in ranked])


def distributions(curves: dict[str, list[float]], x: Axis, y: Axis) -> Iterator[str]:
    labels = []
    for (name, values), color in zip(curves.items(), COLORS, strict=False):
        ordered = sorted(values)
        ranks = [i / 4 for i in range(401)]
        yield line([(x.at(percentile(ordered, rank)), y.at(rank)) for rank in ranks], color, 2)
        marks = {rank: percentile(ordered, rank) for rank in (50, 95, 99)}
        for rank, value in marks.items():
            yield dot(x.at(value), y.at(rank), 4, color)
        parts = ", ".join(f"p{rank} {duration(value)}" for rank, value in marks.items())
        labels.append((f"{name}: {parts}", color))
    yield from legend(x, labels)
