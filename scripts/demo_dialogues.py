"""Generate the dialogues of the chat demo model: facts, small talk, sums, counting and tools.

The facts are in demo_questions.py, the small talk in demo_talk.py, the tools in demo_tools.py,
and the tags around each turn in demo_tokenizer.py.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from demo_corpus import CYCLES, FACTS, corpus, phrases
from demo_questions import Turn, cased, fact, framed, sentence, worn
from demo_talk import filled, talk, unknown
from demo_tools import (
    Message,
    Tool,
    city_tool,
    other_tools,
    weather_turns,
    weather_without_tool,
)

TEXTS = corpus("dialogues")

NO_BIG_SUMS = "Sorry, I only know small sums."

SIGNS = {"plus": "+", "minus": "-"}


def number(value: int, spelled: bool) -> str:
    return FACTS["numbers"].split()[value] if spelled else str(value)


def small_sum(rng: random.Random) -> Turn:
    """Return a sum as a question, and with its result."""
    word = rng.choice(("plus", "minus"))
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if word == "minus":
        a += b
    c = a + b if word == "plus" else a - b
    if c <= 20 and rng.random() < 0.4:
        asked = f"{number(a, True)} {word} {number(b, True)}"
        return asked, f"{asked} is {number(c, True)}."
    sign = SIGNS[word]
    shown = rng.choice((f" {sign} ", f" {sign} ", f" {word} ", sign))
    return f"{a}{shown}{b}", f"{a} {sign} {b} = {c}."


def big_sum(rng: random.Random) -> Turn:
    numbers = [str(rng.randint(21, 9999)), str(rng.randint(2, 9999))]
    rng.shuffle(numbers)
    sign = rng.choice(phrases("+|-|*|/|plus|minus|times|divided by"))
    return f" {sign} ".join(numbers), NO_BIG_SUMS


def sums(rng: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3), (7, 2, 1))[0]):
        asked, answer = (big_sum if rng.random() < 0.04 else small_sum)(rng)
        frames = phrases(TEXTS["further_sums"] if turns and rng.random() < 0.5 else TEXTS["sums"])
        question = rng.choice(frames).format(s=asked)
        turns.append((worn(sentence(question), rng), sentence(answer)))
    return turns


def calendar(rng: random.Random) -> list[Turn]:
    kind = rng.choice([*CYCLES, "number"])
    spelled = rng.random() < 0.5
    names = [number(n, spelled) for n in range(21)]
    if kind in CYCLES:
        names = [cased(name) for name in CYCLES[kind].split()]
    whole = "week" if kind == "day" else "year"
    roll = rng.random()
    if kind == "day" and roll < 0.2:
        x = rng.randrange(7)
        question = rng.choice(phrases(TEXTS["today"])).format(x=names[x])
        answer = f"If today is {names[x]}, tomorrow is {names[(x + 1) % 7]}."
        return [(framed(question, rng), answer)]
    if kind in CYCLES and roll < 0.4:
        nths = [*zip(FACTS["ordinals"].split(), names, strict=False), ("last", names[-1])]
        nth, x_name = rng.choice(nths)
        question = rng.choice(phrases(TEXTS["nth"])).format(n=nth, k=kind, w=whole)
        answer = f"The {nth} {kind} of the {whole} is {x_name}."
        return [(framed(sentence(question), rng), answer)]
    direction = rng.choice(("after", "before"))
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3), (7, 2, 1))[0]):
        x = rng.randrange(1, 20) if kind == "number" else rng.randrange(len(names))
        question = rng.choice(phrases(TEXTS[f"steps_{direction}"]))
        if turns:
            direction = rng.choice(("after", "before"))
            question = rng.choice((f"And {direction} {{x}}?", f"What about {direction} {{x}}?"))
        y = names[(x + (1 if direction == "after" else -1)) % len(names)]
        answer = f"The {kind} {direction} {names[x]} is {y}."
        question = sentence(question.format(k=kind, x=names[x]))
        turns.append((worn(question, rng), answer))
    return turns


def counting(rng: random.Random) -> list[Turn]:
    direction = rng.choice(("up", "up", "from", "from", "down"))
    start = rng.randint(1, 12) if direction == "from" else 1
    end = min(20, start + rng.randint(2, 9))
    spelled = end <= 20 and rng.random() < 0.5
    question = rng.choice(phrases(TEXTS[f"counts_{direction}"]))
    question = question.format(a=number(start, spelled), b=number(end, spelled))
    counted = list(range(start, end + 1))[:: -1 if direction == "down" else 1]
    return [(framed(sentence(question), rng), ", ".join(map(str, counted)) + ".")]


class Subject(NamedTuple):
    draw: Callable[[random.Random], list[Turn]]
    weight: float
    thought: str  # the reasoning before the answer


SUBJECTS = [
    Subject(fact, 42, "The user asks for a fact. I know it."),
    Subject(calendar, 10, "This is about the order of things. I say which one it is."),
    Subject(sums, 14, "This is a sum. I work it out."),
    Subject(counting, 9, "I have to count. I go step by step."),
    Subject(talk, 13, "The user is talking to me. I am polite."),
    Subject(unknown, 5, "I do not know this. I say so."),
    Subject(weather_without_tool, 3, "This is about the weather, and I have no tool for it."),
]
CALLING, CALLED = "I have a tool for this.", "The tool has answered. I say it in a sentence."
THINKING, IN_JSON = 0.12, 0.1  # shares of the dialogues
KEYS = phrases("""answer|name|city|country|capital|value|result|number|count|title|text|color|colour
    kind|type|summary|reason|language|animal|day|month|items|tags|id|ok|valid|population|age|score
    opposite|sound|note|year|first|second|places|facts|question|subject|data|message|status|key""")


def turns(rng: random.Random) -> tuple[list[Turn], str]:
    subject = rng.choices(SUBJECTS, [subject.weight for subject in SUBJECTS])[0]
    return subject.draw(rng), subject.thought


def with_reasoning(messages: list[Message], thought: str) -> list[Message]:
    """Add reasoning to the assistant's messages after the user's last one."""
    asked = max(n for n, message in enumerate(messages) if message["role"] == "user")
    last = messages[asked + 1 :]
    called = [CALLED] * (len(last) - 1)  # a call, its results, and the answer
    thoughts = [CALLING, *called] if called else [thought]
    return messages[: asked + 1] + [
        message | {"reasoning_content": text} if message["role"] == "assistant" else message
        for message, text in zip(last, thoughts, strict=True)
    ]


def spoken(said: list[Turn]) -> list[Message]:
    return [
        {"role": role, "content": text}
        for turn in said
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.5:
        return []
    texts = rng.choices(phrases(TEXTS["systems"]), k=rng.choice((1, 1, 1, 2)))
    return [{"role": "system", "content": filled(" ".join(texts), rng)}]


def described(turn: Turn, rng: random.Random) -> str:
    """Return an answer as a random JSON document: short texts from the turn, numbers, lists."""
    words = [word.strip(".,?!") for text in turn for word in text.split()]
    last = turn[1].split()[-1].strip(".?!")

    def text() -> str:
        return rng.choice((last, last, turn[1], " ".join(rng.choices(words, k=rng.randint(1, 2)))))

    def value(depth: int) -> Any:
        roll = rng.random()
        if roll < 0.6:
            return text()
        if roll < 0.78:
            return rng.choice((rng.randint(0, 20), rng.randint(0, 9999), rng.randint(1, 99) / 10))
        if roll < 0.86 or depth:
            return rng.choice((True, False, None))
        if roll < 0.95:
            return [value(1) if rng.random() < 0.2 else text() for _ in range(rng.randint(1, 3))]
        return {key: value(1) for key in rng.sample(KEYS, rng.randint(1, 2))}

    document = {key: value(0) for key in rng.sample(KEYS, rng.choice((1, 1, 2, 2, 3, 4)))}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def dialogue(rng: random.Random) -> tuple[list[Message], list[Tool]]:
    """Return the messages of one dialogue and its tools."""
    messages, tools, thought = conversation(rng)
    roll = rng.random()
    if roll < THINKING:
        messages = with_reasoning(messages, thought)
    elif roll < THINKING + IN_JSON and not tools:
        asked, answered = (message["content"] for message in messages[-2:])
        text = described((asked, answered), rng)
        messages = [*messages[:-1], {"role": "assistant", "content": text}]
    return messages, tools


def conversation(rng: random.Random) -> tuple[list[Message], list[Tool], str]:
    thought = ""
    if rng.random() > 0.2:
        messages = system(rng)
        for _ in range(rng.choices((1, 2, 3, 4), (50, 27, 15, 8))[0]):
            said, thought = turns(rng)
            messages += spoken(said)
        return messages, [], thought
    tool = city_tool("weather", rng)
    tools, asked = [tool], [(tool, "weather")]
    if rng.random() < 0.04:
        clock = city_tool("time", rng)
        tools.append(clock)
        asked.append((clock, "time"))
    tools += other_tools(rng.choices((0, 1, 2), (92, 7, 1))[0], rng)
    rng.shuffle(tools)
    messages = system(rng)
    for _ in range(rng.choices((1, 2, 3), (45, 35, 20))[0]):
        plain, thought = turns(rng)
        if rng.random() < 0.65 or (plain[0][1].startswith("Sorry, I cannot look up")):
            messages += weather_turns(*rng.choice(asked), rng)
        else:
            messages += spoken(plain)
    return messages, tools, thought


def document(rng: random.Random) -> str:
    """Return plain text for completions: some facts, at times with their questions."""
    said = [turn for _ in range(rng.choice((1, 1, 1, 2, 3))) for turn in fact(rng)]
    if rng.random() < 0.25:
        return "\n".join(f"{question}\n{answer}" for question, answer in said)
    return " ".join(answer for _, answer in said)
