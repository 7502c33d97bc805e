#!/usr/bin/env python3
"""Fill the table in docs/architectures.md: how each causal language model of transformers runs.

A tiny random-weight model of each type is loaded as the server does, and its greedy output compared
with that of `generate` (tests/causal_parity.py). Takes some minutes. With names of model types as
arguments only those are run, and printed.
"""

import re
import sys
import tempfile
from pathlib import Path

from environment import ROOT

sys.path.insert(0, str(ROOT))

from tests.causal_families import families
from tests.causal_parity import NotBuilt, Row, check_family

PAGE = ROOT / "docs" / "architectures.md"
MODES = {
    "paged": "paged",
    "own cache": "transformers' cache",
    "refused": "refused",
    "not built": "not built tiny",
}


def row(kind: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return check_family(kind, Path(folder) / kind)
        except NotBuilt as error:
            return Row("not built", str(error).split(". ")[0].rstrip(":"))


def table(rows: dict[str, Row]) -> str:
    """Return a line for each mode and reason, with the model types of which it is true."""
    groups: dict[tuple[str, str], list[str]] = {}
    for kind, (mode, why) in rows.items():
        why = re.sub(r"[\d.]+e[+-]\d+", "x", why).split(";")[0]
        groups.setdefault((mode, why), []).append(kind)
    lines = ["| runs | reason | model types |", "| --- | --- | --- |"]
    for mode, name in MODES.items():
        for (of_mode, why), kinds in sorted(groups.items()):
            if of_mode == mode:
                kinds_text = ", ".join(f"`{kind}`" for kind in sorted(kinds))
                lines.append(f"| {name} | {why or '–'} | {kinds_text} |")
    return "\n".join(lines)


def main() -> None:
    if kinds := sys.argv[1:]:
        return print(table({kind: row(kind) for kind in kinds}))
    text = PAGE.read_text()
    begin, end = "<!-- begin: models -->\n", "\n<!-- end: models -->"
    before, rest = text.split(begin)
    filled = table({kind: row(kind) for kind in families()})
    PAGE.write_text(before + begin + filled + end + rest.split(end)[1])


if __name__ == "__main__":
    main()
