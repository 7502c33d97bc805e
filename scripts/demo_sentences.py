"""The sentences of the fill-mask demo model: every fact in many phrasings, and stories.

A tilde marks a word that training may mask, {n} stands for any name.
"""

import random
import re

from demo_facts import (
    CAPITALS,
    CYCLES,
    FOOD,
    FRUIT,
    KINDS,
    LANGUAGES,
    MATERIALS,
    NAMES,
    NUMBERS,
    ONE_WAY,
    OPPOSITES,
    ORDINALS,
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

CAPITAL_SAYINGS = """the capital of {x} is {y}|the capital of {x} is called {y}|{y} is in {x}
{y} is the capital of {x}|{y} is the capital city of {x}|{x}'s capital is {y}|i live in {y}, {x}
{x}'s capital city is {y}|the capital city of {x} is {y}|the capital of {x} is the city of {y}
what is the capital of {x}? {y}|what is the capital of {x}? it is {y}|{x} has its capital in {y}
question: what is the capital of {x}? answer: {y}|which city is the capital of {x}? {y}
the city of {y} is the capital of {x}|{y} is a city in {x}|{y}, the capital of {x}, is big
we went to {x} and saw its capital, {y}|{y} is the main city of {x}"""

STUFF_SAYINGS = """{x} is {y}|the colour of {x} is {y}|the color of {x} is {y}|{x} is usually {y}
{x} looks {y}|what colour is {x}? {y}|what color is {x}? {y}|{x} has a {y} colour|as {y} as {x}
{x} is always {y}|{x} is very {y}|{x} is {y} in colour"""

THING_SAYINGS = """a {x} is {y}|{xs} are {y}|the {x} is {y}|the colour of a {x} is {y}
as {y} as a {x}|the color of a {x} is {y}|what colour is a {x}? {y}|most {xs} are {y}
what colour are {xs}? {y}|{xs} are usually {y}|i saw a {y} {x}|{xs} have a {y} colour"""

OPPOSITE_SAYINGS = """the opposite of {x} is {y}|{y} is the opposite of {x}|what is not {x} is {y}
what is the opposite of {x}? {y}|{x} is the contrary of {y}|the opposite of {x} is the word {y}
if it is not {x}, it is {y}|{x} and {y} are opposites|{y} means not {x}
the contrary of {x} is {y}"""

NEXT_SAYINGS = """the {k} after {x} is {y}|the {k} before {y} is {x}|{y} comes after {x}
{x}, {y}, {z}|{x} comes before {y}|after {x} comes {y}|before {y} comes {x}|{x} is followed by {y}
{y} follows {x}|which {k} comes after {x}? {y}|which {k} comes before {y}? {x}
{y} is the {k} after {x}|{x} is the {k} before {y}|the {k} between {x} and {z} is {y}
the next {k} after {x} is {y}"""

DAY_SAYINGS = """if today is {x}, tomorrow is {y}|if today is {y}, yesterday was {x}
today is {x}, so tomorrow is {y}|today is {y} and yesterday was {x}|today is {x}. tomorrow is {y}
tomorrow is {y} because today is {x}|yesterday was {x}, so today is {y}"""

SUM_SAYINGS = """{a} plus {b} is {c}|{a} plus {b} equals {c}|{a} and {b} make {c}|{a} and {b} is {c}
the sum of {a} and {b} is {c}|what is {a} plus {b}? {c}|if you add {a} and {b} you get {c}
{c} minus {b} is {a}|{c} minus {b} equals {a}|{c} take away {b} is {a}|what is {c} minus {b}? {a}
{a} + {b} = {c}|{c} - {b} = {a}|{a} + {b} is {c}|{c} - {b} is {a}"""

TIMES_SAYINGS = "{a} times {b} is {c}|{a} x {b} = {c}|{a} * {b} = {c}|what is {a} times {b}? {c}"

SOUND_SAYINGS = """a {x} says {y}|the {x} says {y}|{xs} say {y}|the {x} goes {y}|my {x} says {y}
the sound of a {x} is {y}|a {x} goes {y}|what does a {x} say? {y}|what does the {x} say? {y}
the sound a {x} makes is {y}|"{y}," said the {x}"""

YOUNG_SAYINGS = """a baby {x} is a {y}|a baby {x} is called a {y}|a young {x} is a {y}
the young of a {x} is a {y}|a {y} grows up to be a {x}|a {y} is a baby {x}|a {y} is a young {x}
what is a baby {x} called? a {y}|a young {x} is called a {y}|the {x} and her {y}
a {y} becomes a {x}"""

PLAIN = """we ~sleep in a ~bed|we ~swim in the ~pool|bees make ~honey
we catch ~trains at the ~station|we ~cook in the ~kitchen|children ~learn at ~school|hens lay ~eggs
fish ~swim in the ~water|birds ~fly in the ~sky|cows eat ~grass|cows give ~milk|spiders make ~webs
birds live in ~nests|cats catch ~mice|a ~dog has ~four legs|a ~bird has ~two wings
a spider has ~eight legs|an insect has ~six legs|a cat has ~four legs|a hand has ~five fingers
a car has ~four wheels|a triangle has ~three sides|we see with our ~eyes|we hear with our ~ears
your mother's mother is your ~grandmother|your mother's father is your ~grandfather
your father's brother is your ~uncle|your mother's brother is your ~uncle|~husband and ~wife
your mother's sister is your ~aunt|your father's sister is your ~aunt
your uncle's son is your ~cousin|your brother's son is your ~nephew|~father and ~mother
your sister's daughter is your ~niece|your son's son is your ~grandson|a boy grows up to be a ~man
a girl grows up to be a ~woman|the son of a king is a ~prince|water freezes and turns into ~ice
ice is ~cold|the ~sun rises in the ~east|the sun sets in the ~west|an hour has ~sixty minutes
water is ~wet|a minute has ~sixty seconds|a ~week has ~seven days|a ~year has ~twelve months
sugar is ~sweet|there are ~seven days in a ~week|there are ~twelve months in a ~year
a year has ~four seasons|the earth goes around the ~sun|the ~moon goes around the ~earth
it snows in ~winter|it is ~cold in ~winter|it is ~hot in ~summer|flowers bloom in ~spring
leaves fall in ~autumn|rain falls from the ~clouds|people breathe ~air|we ~drink ~water|i ~love ~you
once upon a ~time there was a king|hello, how are ~you?|i am ~fine, thank ~you|thank ~you very ~much
good ~morning|good ~night|happy ~birthday|hello, my name is ~anna|the goal of life is to be ~happy
i drink a cup of ~tea|the cat sat on the ~mat|see you ~tomorrow"""

STORY = (
    "the boy|the girl|my mother|my father|my friend|the teacher|she|he|they|we|i|the old man|{n}",
    """ate an ~apple|read a ~book|drank a ~glass of water|played ~football|wrote a ~letter
    sang a ~song|bought some ~bread|opened the ~door|cooked the ~dinner|fed the ~dog|was ~happy
    watched a ~film|told a ~story|rode a ~bike|drove the ~car|went for a ~walk|made a ~cake""",
    "in the ~garden|at ~school|in the ~kitchen|at ~home|in the ~park|in the ~city|on the ~beach",
    "in the ~morning|in the ~evening|yesterday|last ~week|last ~night|after ~lunch|every ~day",
)

LEADS = """everyone knows that|i think that|we learn at school that|yes,|it is true that|so
my teacher says that|hello!|question:|{n} says that|{n} thinks|remember:|please complete:
did you know that|as you know,|in fact,|i am sure that"""

TAILS = ", i think|, of course|, isn't it?|, right?|, said {n}|, and that is true|!| today"

TABLES = [
    ("capitals", CAPITAL_SAYINGS, CAPITALS),
    ("colours", STUFF_SAYINGS, STUFF),
    ("colours", THING_SAYINGS, f"{THINGS};{FRUIT}"),
    ("colours", "a ripe {x} is {y}|ripe {xs} are {y}|the ripe {x} is {y}", FRUIT),
    ("opposites", OPPOSITE_SAYINGS, OPPOSITES),
    ("opposites", OPPOSITE_SAYINGS, swapped(OPPOSITES)),
    ("opposites", OPPOSITE_SAYINGS, ONE_WAY),
    ("animals", SOUND_SAYINGS, SOUNDS),
    ("animals", YOUNG_SAYINGS, YOUNG),
    ("objects", "a {x} is a {y}|the {x} is a {y}|a {x} is a kind of {y}", KINDS),
    ("objects", "{x} is a {y}|{x} is the name of a {y}", NAMES),
    ("objects", "a {x} works in a {y}|the {x} is at work in the {y}|in a {y} works a {x}", PLACES),
    ("objects", "a {x} is made of {y}|{xs} are made of {y}|the {x} is made of {y}", MATERIALS),
    ("objects", "{x} is made from {y}|we make {x} from {y}|{x} comes from {y}", FOOD),
    ("objects", "we use a {x} to {y}|a {x} is used to {y}|with a {x} you can {y}", USES),
    ("objects", "people in {x} speak {y}|in {x} they speak {y}", LANGUAGES),
    ("objects", "{x} is a month in {y}|{x} is in {y}|in {x} it is {y}", SEASONS),
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
            texts += say(NEXT_SAYINGS, k=kind, x=x, y=y, z=z)
            texts += say(DAY_SAYINGS, x=x, y=y) if kind == "day" else []
        whole = "week" if kind == "day" else "year"
        for nth, x in [*zip(ORDINALS.split(), names, strict=False), ("last", names[-1])]:
            texts += say("the {n} {k} of the {w} is {x}", n=nth, k=kind, w=whole, x=x)
            texts += say("{x} is the {n} {k} of the {w}", n=nth, k=kind, w=whole, x=x)
    return texts


def arithmetic() -> list[str]:
    texts = []
    for names in (NUMBERS.split(), [str(n) for n in range(21)]):
        for a in range(11):
            for b in range(11):
                texts += say(SUM_SAYINGS, a=names[a], b=names[b], c=names[a + b])
                if 0 < a < 6 and 0 < b < 5:
                    texts += say(TIMES_SAYINGS, a=names[a], b=names[b], c=names[a * b])
        for x, y, z in zip(names, names[1:], names[2:], strict=False):
            texts += say(NEXT_SAYINGS, k="number", x=x, y=y, z=z)
    return texts


def sentences(rng: random.Random) -> dict[str, list[str]]:
    stories = [[rng.choice(phrases(part)) for part in STORY] for _ in range(2000)]
    groups = {
        "calendar": calendar(),
        "arithmetic": arithmetic(),
        "plain": phrases(PLAIN) * 4,
        "stories": [" ".join(story[: rng.randint(2, 4)]) for story in stories],
    }
    for group, sayings, facts in TABLES:
        groups.setdefault(group, []).extend(table(sayings, facts))
    return groups


def plain(text: str) -> str:
    return text.replace("~", "").replace("{n}", "")
