"""The texts that the demo models learn, in the files of demo/, and functions to read them.

A section `[name]` has phrases, separated by a bar or a line. The facts are pairs "x y" in lower
case, separated by a semicolon or a line. The last word of a pair is y, and an underscore stands for
a space within x.
"""

import random
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("demo")
PLURALS = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "leaf": "leaves"}


def paragraphs(name: str) -> list[str]:
    """Return the paragraphs of a file without sections."""
    return (FOLDER / f"{name}.txt").read_text().strip().split("\n\n")


def phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in re.split(r"[|\n]", text)]


def drawn(section: str, rng: random.Random) -> str:
    return rng.choice(phrases(TEXTS[section]))


def pairs(facts: str) -> list[tuple[str, str]]:
    rows = (row.replace("_", " ").rsplit(" ", 1) for row in re.split(r"[;\n]", facts))
    return [(x, y) for x, y in rows]


def plural(noun: str) -> str:
    return PLURALS.get(noun, re.sub("y$", "ie", noun) + ("es" if noun[-1] in "ox" else "s"))


def with_article(text: str) -> str:
    """Replace a by an before a vowel; a tilde may mark the word."""
    return re.sub(r"\b([Aa]) (~?[aeioAEIO])", r"\1n \2", text)


SECTION = re.compile(r"^\[(\w+)\]\n(.*?)(?=^\[\w+\]\n|\Z)", re.DOTALL | re.MULTILINE)
TEXTS = {
    name: text.strip()
    for file in FOLDER.glob("*.txt")
    for name, text in SECTION.findall(file.read_text())
}
CYCLES = {kind: TEXTS[f"cycle_{kind}"].split() for kind in ("day", "month", "season")}
TEXTS["countries"] = TEXTS["capitals"].replace("the_united_kingdom london;", "")
TEXTS["swapped_opposites"] = re.sub(r"(\w+) (\w+)", r"\2 \1", TEXTS["opposites"])
