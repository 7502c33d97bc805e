"""The texts that the demo models learn: the files of demo/, with their slots filled.

A section `[name]` has phrases, separated by a bar or a line. `3: ` before a phrase stands for three
of it, and `0..9` for the numbers from 0 to 9. A slot `{name}` takes any phrase of that section. A
paragraph of tables.txt is a table: it has sections of its own and names sections of facts. A fact
is up to three words for the slots {x}, {y} and {z}, with underscores for spaces.

The fill-mask and the embedding model learn the sayings of a table, where a tilde marks a word that
training may mask; the chat model learns its questions and answers. The names of a tool and of its
argument vary, so that the chat model copies them from the prompt.
"""

import json
import random
import re
from collections import ChainMap
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("demo")
SECTION = re.compile(r"^\[(\w+)\]\n(.*?)(?=^\[\w+\]\n|\Z)", re.DOTALL | re.MULTILINE)
SLOT = re.compile(r"\{(\w+)\}")
PLURALS = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "leaf": "leaves"}
CALLING, CALLED = "I have a tool for this.", "The tool has answered. I say it in a sentence."
THINKING, IN_JSON = 0.12, 0.1  # shares of the dialogues

Phrases = dict[str, list[str]]  # by section or slot
Turn = tuple[str, str]  # the user's text, the model's answer
Message = dict[str, Any]


# ── phrases and tables ──


def phrases(text: str) -> list[str]:
    found: list[str] = []
    for part in re.split(r"[|\n]", text.strip()):
        [(count, phrase)] = re.findall(r"^ *(?:(\d+):)? *(.*?) *$", part)
        first, dots, last = phrase.partition("..")
        numbers = map(str, range(int(first), int(last) + 1)) if dots else [phrase]
        found += [*numbers] * int(count or 1)
    return found


PHRASES = {
    name: phrases(text)
    for file in FOLDER.glob("*.txt")
    for name, text in SECTION.findall(file.read_text())
}
for kind, n in {"number": [*map(str, range(21))], "spelled_number": PHRASES["numbers"]}.items():
    factors = [(a, b) for a in range(1, 6) for b in range(1, 5)]
    ranges = [(a, b) for a in range(1, 13) for b in range(a + 2, min(20, a + 9) + 1)]
    PHRASES |= {
        f"{kind}_sums": [f"{n[a]} {n[b]} {n[a + b]}" for a in range(11) for b in range(11)],
        f"{kind}_products": [f"{n[a]} {n[b]} {n[a * b]}" for a, b in factors],
        f"{kind}_counts": [
            f"{n[a]} {n[b]} {',_'.join(map(str, range(a, b + 1)))}" for a, b in ranges
        ],
    }


def facts(section: str) -> list[dict[str, str]]:
    """Return the words of each fact, by slot; {xs} is the plural of {x}."""
    found = []
    for fact in PHRASES[section]:
        words = dict(zip("xyz", (word.replace("_", " ") for word in fact.split()), strict=False))
        noun = words["x"]
        plural = re.sub("y$", "ie", noun) + ("es" if noun[-1] in "ox" else "s")
        found.append(words | {"xs": PLURALS.get(noun, plural)})
    return found


class Table(NamedTuple):
    sections: Phrases
    facts: list[dict[str, str]]

    def first(self, section: str, default: str = "") -> str:
        return self.sections.get(section, [default])[0]

    @property
    def weight(self) -> float:
        return float(len(self.facts) ** 0.6 * int(self.first("times", "1")))


def parse_table(paragraph: str) -> Table:
    lines = (line.split(": ", 1) for line in re.split(r"\n(?! )", paragraph))
    sections = {name: phrases(text) for name, text in lines}
    known = [words for section in sections.get("facts", []) for words in facts(section)]
    return Table(sections, known or [{}])


PHRASES["swapped_opposites"] = [" ".join(fact.split()[::-1]) for fact in PHRASES["opposites"]]
TABLES = [*map(parse_table, (FOLDER / "tables.txt").read_text().strip().split("\n\n"))]
# The weight of each subject, and the reasoning before an answer.
SUBJECTS = {name: rest for name, *rest in (line.split(": ") for line in PHRASES["subjects"])}
PROPER_NOUNS = {*PHRASES["day"], *PHRASES["month"], "mars", "venus", "jupiter"}
for words in facts("capitals") + facts("united_kingdom") + facts("languages"):
    PROPER_NOUNS |= {words["x"], words["y"]}


def cased(word: str) -> str:
    if word not in PROPER_NOUNS:
        return word
    return " ".join(part if part == "the" else part.capitalize() for part in word.split())


PHRASES["capital"] = [cased(words["y"]) for words in facts("capitals")]


def fill(text: str, rng: random.Random, own: Phrases | None = None, /, **words: str) -> str:
    """Fill the slots with words, with phrases of one's own, or with those of the files. Words and
    phrases may have slots too."""
    known = ChainMap({slot: [word] for slot, word in words.items()}, own or {}, PHRASES)
    filled = ""
    while filled != text:
        filled = text
        text = SLOT.sub(lambda slot: rng.choice(known[slot[1].lower()]), text)
    return text


def with_article(text: str) -> str:
    """Replace a by an before a vowel; a tilde may mark the word."""
    return re.sub(r"\b([Aa]) (~?[aeioAEIO])", r"\1n \2", text)


# ── questions and answers ──


def sentence(text: str) -> str:
    text = with_article(text)
    return text[:1].upper() + text[1:]


def typed(text: str, rng: random.Random) -> str:
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
    elif roll > 0.75 and text[-1].isalpha():
        text += rng.choice("!.")
    return text


def framed(question: str, rng: random.Random) -> str:
    """Put the question into a frame, which may undo its capital."""
    frame = rng.choice(PHRASES["frame"])
    kept = question.lower().startswith(("i ", *PROPER_NOUNS)) and not question.startswith("The ")
    if not kept and not frame.startswith("{q}") and rng.random() < 0.5:
        question = question[:1].lower() + question[1:]
    return frame.replace("{q}", question)


def ask(table: Table, words: dict[str, str], rng: random.Random) -> str:
    by_noun = "nouns" in table.sections and rng.random() < 0.5
    asked = "{noun_questions}" if by_noun else "{questions}"
    question = sentence(fill(asked, rng, table.sections, **words))
    if table.first("subject") != "talk" and rng.random() < 0.25:
        question = framed(question, rng)
    return typed(question, rng)


def turns(rng: random.Random, subject: str = "") -> tuple[list[Turn], str]:
    """Return questions about one table with their answers, and the reasoning for the last one."""
    weights = [float(weight) for weight, _ in SUBJECTS.values()]
    subject = subject or rng.choices([*SUBJECTS], weights)[0]
    asked = [table for table in TABLES if "questions" in table.sections]
    tables = [table for table in asked if table.first("subject", "fact") == subject]
    table = rng.choices(tables, [table.weight for table in tables])[0]
    count = min(len(table.facts), rng.choices((1, 2, 3), (8, 2, 1))[0])
    said: list[Turn] = []
    for fact in rng.sample(table.facts, count):
        words = {slot: cased(word) for slot, word in fact.items()}
        if said:
            follow_up = fill("{follow_ups}", rng, table.sections, **words)
            question = typed(sentence(follow_up), rng)
        else:
            question = ask(table, words, rng)
        said.append((question, sentence(fill("{answer}", rng, table.sections, **words))))
    if "nouns" in table.sections and rng.random() < 0.06:
        unknown = dict.fromkeys(("x", "xs", "y", "z"), fill("{unknown_word}", rng))
        said.append((ask(table, unknown, rng), fill("{sorry}", rng)))
    return said, SUBJECTS[subject][1]


def document(rng: random.Random) -> str:
    """Return plain text for completions: some facts, at times with their questions."""
    said = [turn for _ in range(rng.choice((1, 1, 1, 2, 3))) for turn in turns(rng, "fact")[0]]
    if rng.random() < 0.25:
        return "\n".join(f"{question}\n{answer}" for question, answer in said)
    return " ".join(answer for _, answer in said)


# ── tools for the weather and the time of a city ──


def make_tool(rng: random.Random, **words: str) -> dict[str, Any]:
    """Return the schema of a tool; without words, of one that no question needs."""
    if not words:
        name, argument, doc = rng.choice(PHRASES["others"]).split(":")
        words = {"name": name, "argument": argument, "doc": doc, "argument_doc": f"The {argument}"}
    tool: dict[str, Any] = json.loads(fill("{tool}", rng, **words))
    return tool


def call(tool: dict[str, Any], topic: str, asked: str, rng: random.Random) -> list[Message]:
    """Return a question about one or two cities, the calls, their results, and the answer."""
    function, calls, results, answers = tool["function"], [], [], []
    cities = [fill("{city}", rng) for _ in range(2 if "{second}" in asked.lower() else 1)]
    for city in cities:
        known = {name: fill(f"{{{name}}}", rng) for name in ("degrees", "sky", "clock")}
        line = fill(f"{{{topic}_result}}", rng, city=city, **known)
        result, _, answer = line.partition(" = ")
        if rng.random() < 0.2:
            result = result.replace('": ', '":').replace(', "', ',"')
        argument = next(iter(function["parameters"]["properties"]))
        called = {"name": function["name"], "arguments": {argument: city}}
        calls.append({"type": "function", "function": called})
        results.append({"role": "tool", "content": result})
        answers.append(answer)
    question = fill(asked, rng, city=cities[0], second=cities[-1])
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": " ".join(answers)},
    ]


def tool_turns(tool: dict[str, Any], topic: str, rng: random.Random) -> list[Message]:
    def asked(section: str) -> str:
        """Return a question whose slots are filled later, since the model must copy a city."""
        return typed(rng.choice(PHRASES[section]), rng)

    roll = rng.random()
    if roll < 0.12:
        return call(tool, topic, asked("pair_questions"), rng)
    if roll < 0.22 and topic == "weather":
        opening = spoken([(asked("no_city"), "Which city do you mean?")])
        return opening + call(tool, topic, rng.choice(PHRASES["named_city"]), rng)
    messages = call(tool, topic, asked(f"{topic}_questions"), rng)
    if rng.random() < 0.4:
        messages += call(tool, topic, asked("city_follow_ups"), rng)
    return messages


# ── whole dialogues ──


def spoken(said: list[Turn]) -> list[Message]:
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for turn in said
        for role, text in zip(roles, turn, strict=True)
    ]


def add_reasoning(messages: list[Message], thought: str) -> None:
    """Add reasoning to the assistant's messages after the user's last one."""
    asked = max(n for n, message in enumerate(messages) if message["role"] == "user")
    last = [message for message in messages[asked:] if message["role"] == "assistant"]
    thoughts = [thought] if len(last) == 1 else [CALLING, CALLED]
    for message, text in zip(last, thoughts, strict=True):
        message["reasoning_content"] = text


def as_json(turn: Turn, rng: random.Random) -> str:
    """Return an answer as a random JSON document: short texts from the turn, numbers, lists."""
    words = [word.strip(".,?!") for text in turn for word in text.split()]
    said = [words[-1]] * 2 + [turn[1], " ".join(rng.choices(words, k=2))]
    escaped = [json.dumps(text, ensure_ascii=False)[1:-1] for text in said]
    document = json.loads(fill("{document}", rng, {"text": escaped}))
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def dialogue(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages of one dialogue and its tools."""
    system = fill("{system}", rng)
    messages = [{"role": "system", "content": system}] if system else []
    usable: list[tuple[dict[str, Any], str]] = []
    others: list[dict[str, Any]] = []
    if rng.random() < 0.2:
        for topic in ("weather", "time")[: 2 if rng.random() < 0.04 else 1]:
            slots = {"name": f"{{{topic}_name}}", "doc": f"{{{topic}_doc}}"}
            argument = rng.choice(PHRASES["argument"])
            usable.append((make_tool(rng, argument=argument, **slots), topic))
        others = [make_tool(rng) for _ in range(rng.choices((0, 1, 2), (92, 7, 1))[0])]
    for _ in range(rng.choices((1, 2, 3, 4), (50, 27, 15, 8))[0]):
        said, thought = turns(rng)
        if usable and (rng.random() < 0.65 or said[0][1].startswith("Sorry, I cannot look up")):
            messages += tool_turns(*rng.choice(usable), rng)
        else:
            messages += spoken(said)
    tools = [tool for tool, _ in usable] + others
    rng.shuffle(tools)
    roll = rng.random()
    if roll < THINKING:
        add_reasoning(messages, thought)
    elif roll < THINKING + IN_JSON and not tools:
        asked, answered = (message["content"] for message in messages[-2:])
        messages[-1]["content"] = as_json((asked, answered), rng)
    return messages, tools
