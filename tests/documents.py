"""The fenced blocks of the documents; `<!-- not run -->` is on the line above those that only are
checked."""

import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(
    r'^(<!-- not run -->\n)?```(bash|python)(?: title="[^"]*")?\n(.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
LOCAL = "localhost:8000"


class Block(NamedTuple):
    page: str
    language: str
    runs: bool
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(page.name, match[2], match[1] is None, match[3])
        for match in FENCE.finditer(page.read_text())
    ]
