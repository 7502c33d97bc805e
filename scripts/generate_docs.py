#!/usr/bin/env python3
"""Fill the generated tables in docs/: settings.md from the settings, metrics.md from the metrics.

    generate_docs.py --check          write nothing; a table that is out of date is an error
    generate_docs.py models           fill the table in architectures.md, in some minutes
    generate_docs.py models TYPE …    print that table for some model types

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. The rest of a page is
written by hand. For the table of models a tiny random-weight model of each type is loaded as the
server does, and its greedy output compared with that of `generate` (tests/causal_parity.py).
"""

import re
import sys
import tempfile
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


def models_table() -> str:
    """Return a line for each mode and reason, with the model types of which it is true."""
    from tests.causal_families import families
    from tests.causal_parity import NotBuilt, check_family

    groups: dict[tuple[str, str], list[str]] = {}
    for kind in sys.argv[2:] or families():
        with tempfile.TemporaryDirectory() as folder:
            try:
                mode, why = check_family(kind, Path(folder) / kind)
            except NotBuilt as error:
                mode, why = "not built", str(error).split(". ")[0].rstrip(":")
        why = re.sub(r"[\d.]+e[+-]\d+", "x", why).split(";")[0]
        groups.setdefault((mode, why), []).append(f"`{kind}`")
    rows = ["| runs | reason | model types |", "| --- | --- | --- |"]
    for of_mode, name in MODES.items():
        for mode, why in sorted(groups):
            if mode == of_mode:
                rows.append(f"| {name} | {why or '–'} | {', '.join(sorted(groups[mode, why]))} |")
    return "\n".join(rows)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (ROOT / "docs" / "settings.md", settings_table),
    "metrics": (ROOT / "docs" / "metrics.md", metrics_table),
    "models": (ROOT / "docs" / "architectures.md", models_table),
}
MODES = {
    "paged": "paged",
    "own cache": "transformers' cache",
    "refused": "refused",
    "not built": "not built tiny",
}


def filled(name: str) -> str:
    """Return the page with its table replaced."""
    page, table = TABLES[name]
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table()}\n{end}", page.read_text())


def main() -> None:
    if sys.argv[1:2] == ["models"] and sys.argv[2:]:
        return print(models_table())
    for name in ["models"] if sys.argv[1:] == ["models"] else ["settings", "metrics"]:
        page, text = TABLES[name][0], filled(name)
        if text != page.read_text():
            if "--check" in sys.argv:
                raise SystemExit(f"{page.name} is out of date: run scripts/generate_docs.py")
            page.write_text(text)


if __name__ == "__main__":
    main()
