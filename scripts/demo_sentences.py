"""The sentences of the fill-mask demo model: every fact in many phrasings, and stories.

A tilde marks a word that training may mask, {n} stands for any name.
"""

import random
import re

from demo_corpus import CYCLES, FACTS, corpus, pairs, phrases, plural, swapped, with_article

TEXTS = corpus("sentences")
TABLES = [
    ("capitals", TEXTS["capital_sayings"], FACTS["capitals"]),
    ("colours", TEXTS["stuff_sayings"], FACTS["stuff"]),
    ("colours", TEXTS["thing_sayings"], f"{FACTS['things']};{FACTS['fruit']}"),
    ("colours", "a ripe {x} is {y}|ripe {xs} are {y}|the ripe {x} is {y}", FACTS["fruit"]),
    ("opposites", TEXTS["opposite_sayings"], FACTS["opposites"]),
    ("opposites", TEXTS["opposite_sayings"], swapped(FACTS["opposites"])),
    ("opposites", TEXTS["opposite_sayings"], FACTS["one_way"]),
    ("animals", TEXTS["sound_sayings"], FACTS["sounds"]),
    ("animals", TEXTS["young_sayings"], FACTS["young"]),
    ("objects", "a {x} is a {y}|the {x} is a {y}|a {x} is a kind of {y}", FACTS["kinds"]),
    ("objects", "{x} is a {y}|{x} is the name of a {y}", FACTS["names"]),
    (
        "objects",
        "a {x} works in a {y}|the {x} is at work in the {y}|in a {y} works a {x}",
        FACTS["places"],
    ),
    (
        "objects",
        "a {x} is made of {y}|{xs} are made of {y}|the {x} is made of {y}",
        FACTS["materials"],
    ),
    ("objects", "{x} is made from {y}|we make {x} from {y}|{x} comes from {y}", FACTS["food"]),
    ("objects", "we use a {x} to {y}|a {x} is used to {y}|with a {x} you can {y}", FACTS["uses"]),
    ("objects", "people in {x} speak {y}|in {x} they speak {y}", FACTS["languages"]),
    ("objects", "{x} is a month in {y}|{x} is in {y}|in {x} it is {y}", FACTS["seasons"]),
]


def say(sayings: str, **words: str) -> list[str]:
    """Fill every phrasing; a tilde marks the words that training may mask."""
    marked = {slot: re.sub(r"(\w+)$", r"~\1", word) for slot, word in words.items()}
    return [with_article(saying.format(**marked)) for saying in phrases(sayings)]


def table(sayings: str, facts: str) -> list[str]:
    texts = []
    for x, y in pairs(facts):
        texts += say(sayings, x=x, y=y, xs=plural(x))
    return texts


def calendar() -> list[str]:
    texts = say("{x} and {y} are the weekend", x="saturday", y="sunday")
    for kind, text in CYCLES.items():
        names = text.split()
        for x, y, z in zip(names, names[1:] + names, names[2:] + names, strict=False):
            texts += say(TEXTS["next_sayings"], k=kind, x=x, y=y, z=z)
            texts += say(TEXTS["day_sayings"], x=x, y=y) if kind == "day" else []
        whole = "week" if kind == "day" else "year"
        for nth, x in [*zip(FACTS["ordinals"].split(), names, strict=False), ("last", names[-1])]:
            texts += say("the {n} {k} of the {w} is {x}", n=nth, k=kind, w=whole, x=x)
            texts += say("{x} is the {n} {k} of the {w}", n=nth, k=kind, w=whole, x=x)
    return texts


def arithmetic() -> list[str]:
    texts = []
    for names in (FACTS["numbers"].split(), [str(n) for n in range(21)]):
        for a in range(11):
            for b in range(11):
                texts += say(TEXTS["sum_sayings"], a=names[a], b=names[b], c=names[a + b])
                if 0 < a < 6 and 0 < b < 5:
                    texts += say(TEXTS["times_sayings"], a=names[a], b=names[b], c=names[a * b])
        for x, y, z in zip(names, names[1:], names[2:], strict=False):
            texts += say(TEXTS["next_sayings"], k="number", x=x, y=y, z=z)
    return texts


def sentences(rng: random.Random) -> dict[str, list[str]]:
    story = [TEXTS[f"story_{part}"] for part in range(4)]
    stories = [[rng.choice(phrases(part)) for part in story] for _ in range(2000)]
    groups = {
        "calendar": calendar(),
        "arithmetic": arithmetic(),
        "plain": phrases(TEXTS["plain"]) * 4,
        "stories": [" ".join(story[: rng.randint(2, 4)]) for story in stories],
    }
    for group, sayings, facts in TABLES:
        groups.setdefault(group, []).extend(table(sayings, facts))
    return groups


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")
