"""Questions about plain facts for the chat demo model. Each fact has many questions and one answer.

Other kinds of dialogue are in demo_dialogues.py.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from demo_corpus import CYCLES, FACTS, FOLDER, corpus, pairs, phrases, plural, swapped, with_article

TEXTS = corpus("questions")

Turn = tuple[str, str]  # the user's text, the model's answer

SORRY = "Sorry, I only know a page of plain facts."


class FactTable(NamedTuple):
    """Facts of one kind: `nouns` fill the noun questions, `questions` are complete."""

    nouns: str
    questions: str
    answer: str
    facts: str
    follow_ups: str


def fact_tables() -> Iterator[FactTable]:
    """Read fact_tables.txt: a paragraph is a table. `subject` replaces {x} in the usual follow-ups,
    `more` adds others."""
    facts = FACTS | {
        "countries": FACTS["capitals"].replace("the_united_kingdom london;", ""),
        "both_opposites": ";".join(
            (FACTS["opposites"], swapped(FACTS["opposites"]), FACTS["one_way"])
        ),
    }
    for paragraph in (FOLDER / "fact_tables.txt").read_text().strip().split("\n\n"):
        row = dict(line.split(": ", 1) for line in re.split(r"\n(?! )", paragraph))
        usual = TEXTS["follow_ups"].replace("{x}", row.get("subject", "{x}"))
        follow_ups = row.get("follow_ups", usual) + ("|" + row["more"] if "more" in row else "")
        names = row["facts"].split(";")
        table = FactTable(
            row["nouns"],
            row["questions"],
            row["answer"],
            ";".join(facts[name] for name in names),
            follow_ups,
        )
        yield from [table] * (2 if names == ["both_opposites"] else 1)  # asked twice as often


TABLES = [*fact_tables()]


@cache
def proper_nouns() -> frozenset[str]:
    names = {name for pair in pairs(f"{FACTS['capitals']};{FACTS['languages']}") for name in pair}
    days = {name for kind in ("day", "month") for name in CYCLES[kind].split()}
    return frozenset(names | days | {"mars", "venus", "jupiter"})


def cased(word: str) -> str:
    if word not in proper_nouns():
        return word
    return " ".join(part if part == "the" else part.capitalize() for part in word.split())


def sentence(text: str) -> str:
    text = with_article(text)
    return text[:1].upper() + text[1:]


def lowered(text: str) -> str:
    """Undo a sentence's capital where another word precedes it."""
    kept = text.lower().startswith(("i ", *proper_nouns())) and not text.startswith("The ")
    return text if kept else text[:1].lower() + text[1:]


def pseudoword(rng: random.Random) -> str:
    """Return a random word, which the model can only copy, not memorize."""
    return "".join(
        "".join(
            rng.choice(phrases(part)) for part in (TEXTS["onsets"], TEXTS["vowels"], TEXTS["codas"])
        )
        for _ in range(rng.choices((1, 2, 3), (2, 5, 3))[0])
    )


def worn(text: str, rng: random.Random) -> str:
    """Vary the text as users type it: in lower case, in capitals, without its last character."""
    roll = rng.random()
    if roll < 0.27:
        text = text.lower()
    elif roll < 0.33:
        text = text.upper()
    roll = rng.random()
    if roll < 0.25:
        text = text.rstrip("?.")
    elif roll < 0.30 and text.endswith("?"):
        text += rng.choice(("?", " ", "!", "\n"))
    return text


def framed(question: str, rng: random.Random) -> str:
    if rng.random() < 0.25:
        frame = rng.choice(phrases(TEXTS["frames"]))
        inner = question if frame.startswith("{q}") else lowered(question)
        question = frame.format(q=rng.choice((inner, question)))
    return worn(question, rng)


def asking(kind: FactTable, words: dict[str, str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        noun = rng.choice(phrases(kind.nouns))
        question = rng.choice(phrases(TEXTS["noun_questions"])).replace("{n}", noun)
    else:
        question = rng.choice(phrases(kind.questions))
    return framed(sentence(question.format(**words)), rng)


@cache
def rows(kind: FactTable) -> list[dict[str, str]]:
    words = []
    for pair in pairs(kind.facts):
        (x, _, n), y = pair[0].partition("/"), pair[1]
        words.append({"x": cased(x), "xs": plural(x), "y": cased(y), "n": n})
    return words


def fact(rng: random.Random) -> list[Turn]:
    """Return one question, at times with follow-ups that refer to it."""
    kind = rng.choices(TABLES, [len(rows(kind)) ** 0.6 for kind in TABLES])[0]
    turns: list[Turn] = []
    for words in rng.sample(rows(kind), k=rng.choices((1, 2, 3), (8, 2, 1))[0]):
        if turns:
            follow_up = rng.choice(phrases(kind.follow_ups)).format(**words)
            question = worn(sentence(follow_up), rng)
        else:
            question = asking(kind, words, rng)
        turns.append((question, sentence(kind.answer.format(**words))))
    if rng.random() < 0.06:
        word = pseudoword(rng)
        unknown = dict.fromkeys(("x", "y", "xs", "n"), rng.choice((word, word.capitalize())))
        turns.append((asking(kind, unknown, rng), SORRY))
    return turns
