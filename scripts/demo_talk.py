"""Small talk for the chat demo model, and questions outside its knowledge.

Letters in braces stand for a word of FILLERS, a name or a day.
"""

import random

from demo_corpus import CYCLES, FOLDER, corpus, phrases
from demo_questions import SORRY, Turn, cased, framed, pseudoword, sentence, worn

TEXTS = corpus("talk")
FILLERS = {
    name.removeprefix("fillers_"): text for name, text in TEXTS.items() if "fillers_" in name
}
# The user's phrasings, then the answer.
TALK = [
    entry.split("\n= ") for entry in (FOLDER / "small_talk.txt").read_text().strip().split("\n\n")
]


def person(rng: random.Random) -> str:
    return (
        rng.choice(phrases(TEXTS["people"])) if rng.random() < 0.4 else pseudoword(rng).capitalize()
    )


def filled(text: str, rng: random.Random) -> str:
    words = {slot: rng.choice(phrases(choices)) for slot, choices in FILLERS.items()}
    day = cased(rng.choice(CYCLES["day"].split()))
    topic = rng.choice(phrases(FILLERS["t"]))
    return text.format(**words, d=day, n=person(rng), t2=topic, ps=words["p"] + "s")


def talk(rng: random.Random) -> list[Turn]:
    said, answer = rng.choice(TALK[:14] * 2 + TALK[14:])
    text = filled(rng.choice(phrases(said)), rng)
    if text[-1].isalpha():
        text += rng.choice(("", "", "!", "."))
    return [(worn(text, rng), answer)]


def unknown(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.1:
        words = [pseudoword(rng) for _ in range(rng.randint(1, 6))]
        return [(worn(sentence(" ".join(words)) + rng.choice("?.!"), rng), SORRY)]
    return [(framed(filled(rng.choice(phrases(TEXTS["unknown"])), rng), rng), SORRY)]
