"""The sentences of the fill-mask and embedding demo models: facts in many phrasings, and stories.

A tilde marks a word that training may mask, {n} stands for any name.
"""

import random
import re
from collections.abc import Iterator

from demo_corpus import CYCLES, TEXTS, pairs, phrases, plural, with_article


def say(sayings: str, **words: str) -> list[str]:
    """Fill every phrasing; a tilde marks the words that training may mask."""
    marked = {slot: re.sub(r"(\w+)$", r"~\1", word) for slot, word in words.items()}
    return [with_article(saying.format(**marked)) for saying in phrases(sayings)]


def tables() -> Iterator[tuple[str, list[str]]]:
    """Yield a group and the phrasings of each fact."""
    for line in TEXTS["sentence_tables"].splitlines():
        group, sayings, names = line.split()
        for x, y in pairs(";".join(TEXTS[name] for name in names.split(";"))):
            yield group, say(TEXTS[sayings], x=x, y=y, xs=plural(x))


def cycle(kind: str) -> Iterator[list[str]]:
    """Yield the phrasings of the order of two or three days, months or seasons."""
    names = CYCLES[kind]
    for x, y, z in zip(names, names[1:] + names, names[2:] + names, strict=False):
        texts = say(TEXTS["next_sayings"], k=kind, x=x, y=y, z=z)
        yield texts + (say(TEXTS["day_sayings"], x=x, y=y) if kind == "day" else [])


def calendar() -> Iterator[str]:
    yield from say("{x} and {y} are the weekend", x="saturday", y="sunday")
    for kind, names in CYCLES.items():
        yield from (text for texts in cycle(kind) for text in texts)
        whole = "week" if kind == "day" else "year"
        for nth, x in [*zip(TEXTS["ordinals"].split(), names, strict=False), ("last", names[-1])]:
            yield from say(TEXTS["nth_sayings"], n=nth, k=kind, w=whole, x=x)


def arithmetic() -> Iterator[str]:
    for names in (TEXTS["numbers"].split(), [str(n) for n in range(21)]):
        for a in range(11):
            for b in range(11):
                yield from say(TEXTS["sum_sayings"], a=names[a], b=names[b], c=names[a + b])
                if 0 < a < 6 and 0 < b < 5:
                    yield from say(TEXTS["times_sayings"], a=names[a], b=names[b], c=names[a * b])
        for x, y, z in zip(names, names[1:], names[2:], strict=False):
            yield from say(TEXTS["next_sayings"], k="number", x=x, y=y, z=z)


def sentences(rng: random.Random) -> dict[str, list[str]]:
    story = [TEXTS[f"story_{part}"] for part in range(4)]
    stories = [[rng.choice(phrases(part)) for part in story] for _ in range(2000)]
    groups = {
        "calendar": [*calendar()],
        "arithmetic": [*arithmetic()],
        "plain": phrases(TEXTS["plain"]) * 4,
        "stories": [" ".join(story[: rng.randint(2, 4)]) for story in stories],
    }
    for group, texts in tables():
        groups.setdefault(group, []).extend(texts)
    return groups


def facts() -> list[tuple[str, list[str]]]:
    """Return the kind of each fact, and its phrasings."""
    collected = [*tables(), *((kind, texts) for kind in CYCLES for texts in cycle(kind))]
    collected += [("plain", [text]) for text in phrases(TEXTS["plain"])]
    return [(kind, [plain(text) for text in texts]) for kind, texts in collected]


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")
