#!/usr/bin/env python3
"""Fill the generated tables in docs/: settings.md from the settings, metrics.md from the metrics.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. The rest of a page is
written by hand. With --check nothing is written, and a table that is out of date is an error.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from environment import ROOT
from prometheus_client import ProcessCollector

from server.core.metrics import Metrics
from server.core.settings import Settings


def default_text(default: Any) -> str:
    """Return the default as a user writes it in the environment."""
    if default is None:
        return "auto"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "empty"
    return f"{default:g}" if isinstance(default, float) else str(default)


def settings_table() -> str:
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for spec in fields(Settings):
        choices = ", ".join(spec.metadata["choices"])
        text = spec.metadata["help"] + (f": {choices}" if choices else "")
        rows.append(f"| `{spec.name.upper()}` | `{default_text(spec.default)}` | {text} |")
    return "\n".join(rows)


def metrics_table() -> str:
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    metrics = Metrics(lambda: 0.0)
    instruments: dict[Any, None] = dict.fromkeys(metrics.registry._names_to_collectors.values())
    for instrument in instruments:
        if instrument is metrics or isinstance(instrument, ProcessCollector):
            continue
        name, kind = instrument._name, instrument._type
        suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
        labels = ", ".join(f"`{label}`" for label in instrument._labelnames) or "–"
        rows.append(f"| `{name}{suffix}` | {kind} | {labels} | {instrument._documentation} |")
    return "\n".join(rows)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (ROOT / "docs" / "settings.md", settings_table),
    "metrics": (ROOT / "docs" / "metrics.md", metrics_table),
}


def filled(name: str) -> str:
    """Return the page with its table replaced."""
    page, table = TABLES[name]
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table()}\n{end}", page.read_text())


def main() -> None:
    for name, (page, _) in TABLES.items():
        text = filled(name)
        if text != page.read_text():
            if "--check" in sys.argv:
                raise SystemExit(f"{page.name} is out of date: run scripts/generate_docs.py")
            page.write_text(text)


if __name__ == "__main__":
    main()
