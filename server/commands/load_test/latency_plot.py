"""The latency plot of a load test: every response over time, and the latencies' distribution.

`plot` draws two panels, by axes, on a canvas of SVG.
"""

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from server.commands.load_test.report import duration
from server.commands.load_test.samples import percentile

WIDTH, HEIGHT = 1100, 460
INK, GRID = "#333333", "#e4e4e4"
COLORS = ("#2b6cb0", "#dd6b20", "#c53030", "#6b46c1", "#2f855a", "#718096")
Point = tuple[float, float, str]  # start in seconds, latency in milliseconds, status


def plot(
    path: str,
    title: str,
    subtitle: str,
    points: Sequence[Point],
    curves: dict[str, list[float]],
) -> None:
    """Draw every response over time on the left, the distribution of each curve on the right."""
    canvas = Canvas()
    canvas.text(20, 26, title[:120], size=16)
    canvas.text(20, 46, subtitle)
    if points:
        x = Axis([start for start, _, _ in points], 70, WIDTH / 2 - 20)
        y = Axis([latency for _, latency, _ in points], HEIGHT - 60, 124, may_be_log=True)
        frame(canvas, x, y, "start of the request (s)", "latency (ms)")
        plot_over_time(canvas, points, x, y)
    if curves := {name: values for name, values in curves.items() if values}:
        times = [value for values in curves.values() for value in values]
        x = Axis(times, WIDTH / 2 + 70, WIDTH - 25, may_be_log=True)
        y = Axis([0, 100], HEIGHT - 60, 124)
        frame(canvas, x, y, "time (ms)", "2xx responses within that time (%)")
        plot_distribution(canvas, curves, x, y)
    canvas.save(path)


class Canvas:
    """Draw by coordinates in pixels from the top left."""

    def __init__(self) -> None:
        size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke="{color}" stroke-width="{width}"'
        self.parts.append(f'<polyline points="{path}" {style}/>')

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "l", size: int = 12) -> None:
        text_anchor = {"l": "start", "m": "middle", "r": "end"}[anchor]
        style = f'font-size="{size}" text-anchor="{text_anchor}" fill="{INK}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def save(self, path: str) -> None:
        Path(path).write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")


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


def frame(canvas: Canvas, x: Axis, y: Axis, x_label: str, y_label: str) -> None:
    """Draw the grid, ticks and labels of one panel."""
    for tick in y.ticks:
        canvas.line([(x.start, y.at(tick)), (x.end, y.at(tick))], GRID, 1)
        canvas.text(x.start - 8, y.at(tick) + 4, f"{tick:.6g}", "r")
    for tick in x.ticks:
        canvas.line([(x.at(tick), y.start), (x.at(tick), y.end)], GRID, 1)
        canvas.text(x.at(tick), y.start + 18, f"{tick:.6g}", "m")
    canvas.line([(x.start, y.end), (x.start, y.start), (x.end, y.start)], INK, 1)
    canvas.text((x.start + x.end) / 2, y.start + 38, x_label + x.note, "m")
    canvas.text(x.start - 40, y.end - 12, y_label + y.note)


def legend(canvas: Canvas, x: Axis, entries: Sequence[tuple[str, str]]) -> None:
    """Draw up to two rows above a panel; entries that do not fit are left out."""
    left, row = x.start - 40, 66
    for label, color in entries:
        width = 22 + 6.6 * len(label)
        if left + width > x.end:
            left, row = x.start - 40, row + 18
        if row <= 84:
            canvas.dot(left + 4, row, 4, color)
            canvas.text(left + 14, row + 4, label)
        left += width + 12


def plot_over_time(canvas: Canvas, points: Sequence[Point], x: Axis, y: Axis) -> None:
    counts = Counter(status for _, _, status in points)
    ranked = sorted(counts, key=lambda status: (not status.startswith("2"), -counts[status]))
    colors = {status: COLORS[min(i, len(COLORS) - 1)] for i, status in enumerate(ranked)}
    seen = set()
    for start, latency, status in points:
        position = x.at(start), y.at(latency)
        # One dot per pixel and status looks the same and keeps the file small.
        key = (status, round(position[0]), round(position[1]))
        if key not in seen:
            seen.add(key)
            canvas.dot(*position, 1.8, colors[status])
    legend(canvas, x, [(f"{status} ({counts[status]})", colors[status]) for status in ranked])


def plot_distribution(canvas: Canvas, curves: dict[str, list[float]], x: Axis, y: Axis) -> None:
    labels = []
    for (name, values), color in zip(curves.items(), COLORS, strict=False):
        ordered = sorted(values)
        ranks = [i / 4 for i in range(401)]
        canvas.line([(x.at(percentile(ordered, rank)), y.at(rank)) for rank in ranks], color, 2)
        marks = {rank: percentile(ordered, rank) for rank in (50, 95, 99)}
        for rank, value in marks.items():
            canvas.dot(x.at(value), y.at(rank), 4, color)
        parts = ", ".join(f"p{rank} {duration(value)}" for rank, value in marks.items())
        labels.append((f"{name}: {parts}", color))
    legend(canvas, x, labels)
