"""Questions about plain facts for the chat demo model. Each fact has many questions and one answer.

Other kinds of dialogue are in demo_dialogues.py.
"""

import random
from functools import cache
from typing import NamedTuple

from demo_facts import (
    CAPITALS,
    CYCLES,
    FAMILY,
    FOOD,
    FRUIT,
    KINDS,
    LANGUAGES,
    MATERIALS,
    NAMES,
    ONE_WAY,
    OPPOSITES,
    PARTS,
    PLACES,
    SEASONS,
    SOUNDS,
    STUFF,
    THINGS,
    USES,
    YOUNG,
    pairs,
    phrases,
    plural,
    swapped,
    with_article,
)

Turn = tuple[str, str]  # the user's text, the model's answer

SORRY = "Sorry, I only know a page of plain facts."

ONSETS = "b|c|d|f|g|h|k|l|m|n|p|r|s|t|v|w|z|j|br|st|tr|sh|ch"
VOWELS = "a|e|i|o|u|a|e|i|o|ea|oo|ai"
CODAS = "|||n|r|l|s|t|m|ck"

FRAMES = """Please tell me: {q}|Hello! {q}|Hi, {q}|I have a question: {q}|Quick question: {q}
Tell me, {q}|Question: {q}|Hey, {q}|{q} Please answer.|{q} Thanks!|{q} Answer in one sentence.
Please answer this question: {q}|Good morning. {q}|So, {q}|Ok, {q}|{q} Be brief.|Now tell me, {q}"""
NOUN_QUESTIONS = """What is {n}?|What is {n}?|What's {n}?|Tell me {n}.|Do you know {n}?|{n}?
Can you tell me {n}?|Give me {n}.|I want to know {n}.|Please name {n}.|Name {n}.|{n} is
Could you tell me what {n} is?|Do you know what {n} is?|And what is {n}?|What would {n} be?
I forgot {n}, what is it?|Complete this sentence: {n} is|I would like to know {n}."""
FOLLOW_UPS = "And {x}?|What about {x}?|And what about {x}?|How about {x}?|And for {x}?|{x}?"


class FactTable(NamedTuple):
    """Facts of one kind: `nouns` fill NOUN_QUESTIONS, `questions` are complete."""

    nouns: str
    questions: str
    answer: str
    facts: str
    follow_ups: str = FOLLOW_UPS


A_FOLLOW_UPS = FOLLOW_UPS.replace("{x}", "a {x}") + "|And the {x}?|And {xs}?|What about {xs}?"
OF_FOLLOW_UPS = FOLLOW_UPS + "|And of {x}?|And that of {x}?|And the one of {x}?"
AFTER_FOLLOW_UPS = "And after {x}?|What about after {x}?|And the one after {x}?|after {x}?"
OPPOSITE = FactTable(
    "the opposite of {x}|the contrary of {x}|the opposite of the word {x}|the antonym of {x}",
    'What is not {x}?|opposite of {x}|What is the opposite of "{x}"?|{x}, and the opposite?',
    "The opposite of {x} is {y}.",
    f"{OPPOSITES};{swapped(OPPOSITES)};{ONE_WAY}",
    OF_FOLLOW_UPS,
)
TABLES = [
    FactTable(
        "the capital of {x}|the capital city of {x}|{x}'s capital|the capital of {x}",
        """Which city is the capital of {x}?|capital of {x}|Where is the government of {x}?
        What is {x}'s capital called?|Which city is {x}'s capital?|{x} has which capital?
        What city is the capital of {x}?|In {x}, what is the capital?""",
        "The capital of {x} is {y}.",
        CAPITALS,
        OF_FOLLOW_UPS,
    ),
    FactTable(
        "the country of {y}|the country whose capital is {y}",
        """Which country has the capital {y}?|{y} is the capital of which country?
        {y} is the capital of what?|Which country is {y} the capital of?|{y} is the capital of
        Where is {y}?|In which country is {y}?|What country is {y} in?|Which country is {y} in?""",
        "{y} is the capital of {x}.",
        CAPITALS.replace("the_united_kingdom london;", ""),
        FOLLOW_UPS.replace("{x}", "{y}"),
    ),
    FactTable(
        "the colour of {x}|the color of {x}",
        """What colour is {x}?|What color is {x}?|Which colour does {x} have?|Which colour is {x}?
        How does {x} look?|What colour has {x}?|What colour does {x} have?""",
        "{x} is {y}.",
        STUFF,
    ),
    FactTable(
        "the colour of a {x}|the color of a {x}|the colour of {xs}|the colour of the {x}",
        """What colour is a {x}?|What color is a {x}?|Which colour does a {x} have?
        What colour are {xs}?|Which colour are {xs}?|What color are {xs}?|Which color is a {x}?""",
        "A {x} is {y}.",
        f"{THINGS};{FRUIT}",
        A_FOLLOW_UPS,
    ),
    OPPOSITE,
    OPPOSITE,
    FactTable(
        "the sound of a {x}|the sound a {x} makes|the sound of the {x}",
        """What does a {x} say?|What does the {x} say?|What do {xs} say?|How does a {x} go?
        Which sound does a {x} make?|What sound does a {x} make?|What noise does a {x} make?""",
        "A {x} says {y}.",
        SOUNDS,
        A_FOLLOW_UPS,
    ),
    FactTable(
        "the young of a {x}|the name of a baby {x}|a baby {x}|the word for a young {x}",
        """What is a baby {x} called?|What is a young {x} called?|What do you call a baby {x}?
        How do you call a young {x}?|What is the name for a baby {x}?""",
        "A baby {x} is called a {y}.",
        YOUNG,
        FOLLOW_UPS.replace("{x}", "a baby {x}"),
    ),
    FactTable("a {x}", "What kind of thing is a {x}?|What are {xs}?", "A {x} is a {y}.", KINDS),
    FactTable(
        "{x}", "What kind of thing is {x}?|What sort of thing is {x}?", "{x} is a {y}.", NAMES
    ),
    FactTable(
        "the workplace of a {x}",
        "Where does a {x} work?|Where do {xs} work?|In which place does a {x} work?",
        "A {x} works in a {y}.",
        PLACES,
        A_FOLLOW_UPS,
    ),
    FactTable(
        "the material of a {x}",
        "What is a {x} made of?|What are {xs} made of?|What do you make a {x} of?",
        "A {x} is made of {y}.",
        MATERIALS,
        A_FOLLOW_UPS,
    ),
    FactTable(
        "the source of {x}",
        "What is {x} made from?|What do we make {x} from?|Where does {x} come from?",
        "{x} is made from {y}.",
        FOOD,
    ),
    FactTable(
        "the use of a {x}|the purpose of a {x}",
        "What is a {x} for?|What do we use a {x} for?|What can you do with a {x}?|Why use a {x}?",
        "We use a {x} to {y}.",
        USES,
        A_FOLLOW_UPS,
    ),
    FactTable(
        "the language of {x}|the language in {x}|the language spoken in {x}",
        """What do people in {x} speak?|Which language do they speak in {x}?
        What language do people speak in {x}?|What language is spoken in {x}?""",
        "People in {x} speak {y}.",
        LANGUAGES,
        FOLLOW_UPS.replace("{x}", "in {x}") + "|And {x}?",
    ),
    FactTable(
        "the season of {x}|the season in {x}",
        "Which season is {x} in?|In which season is {x}?|What season is it in {x}?",
        "{x} is in {y}.",
        SEASONS,
    ),
    FactTable(
        "your {x}",
        "Who is your {x}?|How do you call your {x}?|What do I call my {x}?|Who is my {x}?",
        "Your {x} is your {y}.",
        FAMILY,
        FOLLOW_UPS.replace("{x}", "your {x}"),
    ),
    FactTable(
        "the number of {y} of {x}",
        """How many {y} does {x} have?|How many {y} has {x}?|How many {y} are there in {x}?
        How many {y} are in {x}?|{x} has how many {y}?""",
        "{x} has {n} {y}.",
        PARTS,
        "And how many {y} does {x} have?|And how many {y} are in {x}?|And the {y} of {x}?",
    ),
]


@cache
def proper_nouns() -> frozenset[str]:
    names = {name for pair in pairs(f"{CAPITALS};{LANGUAGES}") for name in pair}
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
        "".join(rng.choice(phrases(part)) for part in (ONSETS, VOWELS, CODAS))
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
        frame = rng.choice(phrases(FRAMES))
        inner = question if frame.startswith("{q}") else lowered(question)
        question = frame.format(q=rng.choice((inner, question)))
    return worn(question, rng)


def asking(kind: FactTable, words: dict[str, str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        noun = rng.choice(phrases(kind.nouns))
        question = rng.choice(phrases(NOUN_QUESTIONS)).replace("{n}", noun)
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


def yes_or_no(rng: random.Random) -> list[Turn]:
    kind, (right, other) = TABLES[0], rng.sample(rows(TABLES[0]), 2)
    claims = "Is {y} the capital of {x}?|Is the capital of {x} {y}?|Is {x}'s capital {y}?"
    if rng.random() < 0.5:
        kind = rng.choice(TABLES[2:4])
        right, other = rng.sample(rows(kind), 2)
        claims = "Are {xs} {y}?|Is a {x} {y}?" if "a {x}" in kind.nouns else "Is {x} {y}?"
    claimed = rng.choice((right, other))["y"]
    answer = kind.answer.format(**right)
    question = rng.choice(phrases(claims)).format(**{**right, "y": claimed})
    opening = "Yes" if claimed == right["y"] else "No"
    return [(framed(sentence(question), rng), with_article(f"{opening}, {lowered(answer)}"))]
