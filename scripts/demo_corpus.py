"""The texts that the demo models learn, in the files of demo/, and functions to read them.

A section `[name]` has phrases, separated by a bar or a line. The facts are pairs "x y" in lower
case, separated by a semicolon or a line. The last word of a pair is y, and an underscore stands for
a space within x.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).with_name("demo")
PLURALS = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "leaf": "leaves"}


def corpus(name: str) -> dict[str, str]:
    """Return the sections of a file, by name."""
    _, *parts = re.split(r"^\[(\w+)\]\n", (FOLDER / f"{name}.txt").read_text(), flags=re.MULTILINE)
    return {part: text.strip() for part, text in zip(parts[::2], parts[1::2], strict=True)}


def phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in re.split(r"[|\n]", text)]


def pairs(facts: str) -> list[tuple[str, str]]:
    rows = (row.replace("_", " ").rsplit(" ", 1) for row in re.split(r"[;\n]", facts))
    return [(x, y) for x, y in rows]


def swapped(facts: str) -> str:
    return re.sub(r"(\w+) (\w+)", r"\2 \1", facts)


def plural(noun: str) -> str:
    return PLURALS.get(noun, re.sub("y$", "ie", noun) + ("es" if noun[-1] in "ox" else "s"))


def with_article(text: str) -> str:
    """Replace a by an before a vowel; a tilde may mark the word."""
    return re.sub(r"\b([Aa]) (~?[aeioAEIO])", r"\1n \2", text)


FACTS = corpus("facts")
CYCLES = {kind: FACTS[f"cycle_{kind}"] for kind in ("day", "month", "season")}
