"""Generate the dialogues of the chat demo model: facts, small talk, sums, counting and tools.

Each fact has many questions and one answer. Letters in braces of small talk stand for a filler, a
name or a day. The names of a tool and of its argument vary, so that the model copies them from the
prompt. The tags around each turn are in demo_chat.py.
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from demo_corpus import CYCLES, TEXTS, drawn, pairs, paragraphs, phrases, plural, with_article

Turn = tuple[str, str]  # the user's text, the model's answer
Message = dict[str, Any]
Tool = dict[str, Any]

SORRY = "Sorry, I only know a page of plain facts."
NO_BIG_SUMS = "Sorry, I only know small sums."
NO_WEATHER = "Sorry, I cannot look up the weather without a weather tool."
NO_RESULT = "Sorry, I could not get that for {c}."
WHICH_CITY = "Which city do you mean?"
CALLING, CALLED = "I have a tool for this.", "The tool has answered. I say it in a sentence."
THINKING, IN_JSON = 0.12, 0.1  # shares of the dialogues
SIGNS = {"plus": "+", "minus": "-"}
PROPER_NOUNS = {
    name for kind in ("capitals", "languages") for row in pairs(TEXTS[kind]) for name in row
}
PROPER_NOUNS |= {*CYCLES["day"], *CYCLES["month"], "mars", "venus", "jupiter"}
FILLERS = {name[8:]: phrases(text) for name, text in TEXTS.items() if name.startswith("fillers_")}
# The user's phrasings, then the answer.
TALK = [entry.split("\n= ") for entry in paragraphs("small_talk")]


# ── the user's words ──


def cased(word: str) -> str:
    if word not in PROPER_NOUNS:
        return word
    return " ".join(part if part == "the" else part.capitalize() for part in word.split())


def sentence(text: str) -> str:
    text = with_article(text)
    return text[:1].upper() + text[1:]


def lowered(text: str) -> str:
    """Undo a sentence's capital where another word precedes it."""
    kept = text.lower().startswith(("i ", *PROPER_NOUNS)) and not text.startswith("The ")
    return text if kept else text[:1].lower() + text[1:]


def pseudoword(rng: random.Random) -> str:
    """Return a random word, which the model can only copy, not memorize."""
    syllables = range(rng.choices((1, 2, 3), (2, 5, 3))[0])
    parts = ("onsets", "vowels", "codas")
    return "".join(drawn(part, rng) for _ in syllables for part in parts)


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
        frame = drawn("frames", rng)
        inner = question if frame.startswith("{q}") else lowered(question)
        question = frame.format(q=rng.choice((inner, question)))
    return worn(question, rng)


# ── facts ──


class FactTable(NamedTuple):
    """Facts of one kind: `nouns` fill the noun questions, `questions` are complete."""

    nouns: str
    questions: str
    answer: str
    follow_ups: str
    rows: list[dict[str, str]]


def fact_tables() -> Iterator[FactTable]:
    """Read fact_tables.txt: a paragraph is a table, asked about `times` as often. `subject`
    replaces {x} in the usual follow-ups, `more` adds others."""
    for paragraph in paragraphs("fact_tables"):
        table = dict(line.split(": ", 1) for line in re.split(r"\n(?! )", paragraph))
        usual = TEXTS["follow_ups"].replace("{x}", table.get("subject", "{x}"))
        follow_ups = table.get("follow_ups", usual) + (
            "|" + table["more"] if "more" in table else ""
        )
        rows = []
        for words, y in pairs(";".join(TEXTS[name] for name in table["facts"].split(";"))):
            x, _, n = words.partition("/")
            rows.append({"x": cased(x), "xs": plural(x), "y": cased(y), "n": n})
        read = FactTable(table["nouns"], table["questions"], table["answer"], follow_ups, rows)
        yield from [read] * int(table.get("times", 1))


TABLES = [*fact_tables()]


def asking(kind: FactTable, words: dict[str, str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        noun = rng.choice(phrases(kind.nouns))
        question = drawn("noun_questions", rng).replace("{n}", noun)
    else:
        question = rng.choice(phrases(kind.questions))
    return framed(sentence(question.format(**words)), rng)


def fact(rng: random.Random) -> list[Turn]:
    """Return one question, at times with follow-ups that refer to it."""
    kind = rng.choices(TABLES, [len(table.rows) ** 0.6 for table in TABLES])[0]
    turns: list[Turn] = []
    for words in rng.sample(kind.rows, k=rng.choices((1, 2, 3), (8, 2, 1))[0]):
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


# ── small talk, and questions outside the model's knowledge ──


def filled(text: str, rng: random.Random) -> str:
    words = {slot: rng.choice(choices) for slot, choices in FILLERS.items()}
    day, topic = cased(rng.choice(CYCLES["day"])), rng.choice(FILLERS["t"])
    name = drawn("people", rng) if rng.random() < 0.4 else pseudoword(rng).capitalize()
    return text.format(**words, d=day, n=name, t2=topic, ps=words["p"] + "s")


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
    return [(framed(filled(drawn("unknown", rng), rng), rng), SORRY)]


# ── sums, the calendar, counting ──


def number(value: int, spelled: bool) -> str:
    return TEXTS["numbers"].split()[value] if spelled else str(value)


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
        section = "further_sums" if turns and rng.random() < 0.5 else "sums"
        question = drawn(section, rng).format(s=asked)
        turns.append((worn(sentence(question), rng), sentence(answer)))
    return turns


def calendar(rng: random.Random) -> list[Turn]:
    kind = rng.choice([*CYCLES, "number"])
    spelled = rng.random() < 0.5
    names = [cased(name) for name in CYCLES.get(kind, [number(n, spelled) for n in range(21)])]
    roll = rng.random()
    if kind == "day" and roll < 0.2:
        x = rng.randrange(7)
        question = drawn("today", rng).format(x=names[x])
        answer = f"If today is {names[x]}, tomorrow is {names[(x + 1) % 7]}."
        return [(framed(question, rng), answer)]
    if kind in CYCLES and roll < 0.4:
        nths = [*zip(TEXTS["ordinals"].split(), names, strict=False), ("last", names[-1])]
        (nth, name), whole = rng.choice(nths), "week" if kind == "day" else "year"
        question = drawn("nth", rng).format(n=nth, k=kind, w=whole)
        return [(framed(sentence(question), rng), f"The {nth} {kind} of the {whole} is {name}.")]
    direction = rng.choice(("after", "before"))
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3), (7, 2, 1))[0]):
        x = rng.randrange(1, 20) if kind == "number" else rng.randrange(len(names))
        question = drawn(f"steps_{direction}", rng)
        if turns:
            direction = rng.choice(("after", "before"))
            question = rng.choice((f"And {direction} {{x}}?", f"What about {direction} {{x}}?"))
        y = names[(x + (1 if direction == "after" else -1)) % len(names)]
        question = sentence(question.format(k=kind, x=names[x]))
        turns.append((worn(question, rng), f"The {kind} {direction} {names[x]} is {y}."))
    return turns


def counting(rng: random.Random) -> list[Turn]:
    direction = rng.choice(("up", "up", "from", "from", "down"))
    start = rng.randint(1, 12) if direction == "from" else 1
    end = min(20, start + rng.randint(2, 9))
    spelled = rng.random() < 0.5
    question = drawn(f"counts_{direction}", rng)
    question = question.format(a=number(start, spelled), b=number(end, spelled))
    counted = list(range(start, end + 1))[:: -1 if direction == "down" else 1]
    return [(framed(sentence(question), rng), ", ".join(map(str, counted)) + ".")]


# ── tools for the weather and the time, their results, and the answers from those ──


def city(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return cased(rng.choice(pairs(TEXTS["capitals"]))[1])
    return drawn("cities", rng)


def schema(name: str, argument: str, doc: str, argument_doc: str, rng: random.Random) -> Tool:
    described = {"description": argument_doc} if rng.random() < 0.7 else {}
    properties: dict[str, Any] = {argument: {"type": "string", **described}}
    if rng.random() < 0.2:
        units = ["celsius", "fahrenheit"]
        properties[rng.choice(("unit", "units"))] = {"type": "string", "enum": units}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [argument]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": doc, "parameters": parameters}
    if rng.random() < 0.15:
        del function["description"]
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def city_tool(topic: str, rng: random.Random) -> Tool:
    """Return a tool for the weather or the time of a city."""
    argument, doc = drawn("arguments", rng), drawn(f"{topic}_docs", rng)
    return schema(drawn(f"{topic}_names", rng), argument, doc, drawn("argument_docs", rng), rng)


def weather_result(where: str, rng: random.Random) -> tuple[str, str]:
    """Return a weather tool's result, and the same as a sentence."""
    degrees, sky = str(rng.randint(-15, 42)), drawn("skies", rng)
    if rng.random() < 0.1:
        degrees += f".{rng.randint(0, 9)}"
    warm = f"{degrees}°C" if rng.random() < 0.25 else json.loads(degrees)
    warmth = {rng.choice(("temperature", "temperature", "temp", "temp_c", "degrees")): warm}
    look = {rng.choice(("condition", "condition", "conditions", "description", "sky")): sky}
    answer = f"It is {degrees} degrees and {sky} in {where}."
    roll = rng.random()
    if roll < 0.12:
        return f"{degrees}°C, {sky}", answer
    if roll < 0.20:
        return f"{sky}, {degrees} degrees", answer
    if roll < 0.28:
        text = rng.choice((f"{degrees}", json.dumps(warmth, ensure_ascii=False), f"{degrees}°C"))
        return text, f"It is {degrees} degrees in {where}."
    if roll < 0.36:
        return rng.choice((sky, json.dumps(look))), f"It is {sky} in {where}."
    fields = [warmth, look]
    if rng.random() < 0.3:
        fields.append({rng.choice(("city", "location", "name")): where})
    if rng.random() < 0.25:
        fields.append({rng.choice(("humidity", "wind", "wind_speed")): rng.randint(1, 90)})
    if rng.random() < 0.2:
        fields.append({rng.choice(("unit", "units")): rng.choice(("celsius", "C", "metric"))})
    if rng.random() < 0.3:
        rng.shuffle(fields)
    merged: dict[str, Any] = {key: value for part in fields for key, value in part.items()}
    separators = (",", ":") if rng.random() < 0.2 else (", ", ": ")
    return json.dumps(merged, separators=separators, ensure_ascii=False), answer


def time_result(where: str, rng: random.Random) -> tuple[str, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return rng.choice((clock, f'{{"time": "{clock}"}}')), f"It is {clock} in {where}."


def tool_turn(tool: Tool, asked: str, places: list[str], rng: random.Random) -> list[Message]:
    """Return a question, the calls for each place, their results, and the answer."""
    name = tool["function"]["name"]
    argument = next(iter(tool["function"]["parameters"]["properties"]))
    calls, results, answers = [], [], []
    for where in places:
        is_time = "time" in name or name == "clock"
        result, answer = (time_result if is_time else weather_result)(where, rng)
        if rng.random() < 0.06:
            result, answer = drawn("errors", rng), NO_RESULT.format(c=where)
        called = {"name": name, "arguments": {argument: where}}
        calls.append({"type": "function", "function": called})
        results.append({"role": "tool", "content": result})
        answers.append(answer)
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": " ".join(answers)},
    ]


def weather_turns(tool: Tool, topic: str, rng: random.Random) -> list[Message]:
    where, second = city(rng), city(rng)
    roll = rng.random()
    if roll < 0.12:
        asked = worn(drawn("pair_questions", rng), rng)
        return tool_turn(tool, place(asked, where, second), [where, second], rng)
    if roll < 0.22 and topic == "weather":
        opening = spoken([(worn(drawn("no_city", rng), rng), WHICH_CITY)])
        asked = place(rng.choice(("{c}", "In {c}.", "I mean {c}.", "{c}, please")), where)
        return opening + tool_turn(tool, asked, [where], rng)
    asked = worn(drawn(f"{topic}_questions", rng), rng)
    messages = tool_turn(tool, place(asked, where), [where], rng)
    if rng.random() < 0.4:
        asked = worn(drawn("city_follow_ups", rng), rng)
        messages += tool_turn(tool, place(asked, second), [second], rng)
    return messages


def place(asked: str, where: str, second: str = "") -> str:
    """Insert the places after the text was varied, since the model must copy them exactly."""
    return asked.replace("{C2}", "{c2}").replace("{C}", "{c}").format(c=where, c2=second)


def weather_without_tool(rng: random.Random) -> list[Turn]:
    asked = worn(rng.choice(phrases(f"{TEXTS['weather_questions']}\n{TEXTS['no_city']}")), rng)
    return [(place(asked, city(rng)), NO_WEATHER)]


# ── whole dialogues ──

DRAWS = [fact, calendar, sums, counting, talk, unknown, weather_without_tool]
# A weight for each of them, and the reasoning before the answer.
SUBJECTS = [line.split(": ")[1:] for line in TEXTS["subjects"].splitlines()]
WEIGHTS = [float(weight) for weight, _ in SUBJECTS]


def turns(rng: random.Random) -> tuple[list[Turn], str]:
    draw, (_, thought) = rng.choices([*zip(DRAWS, SUBJECTS, strict=True)], WEIGHTS)[0]
    return draw(rng), thought


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
    last, keys = turn[1].split()[-1].strip(".?!"), phrases(TEXTS["keys"])

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
        return {key: value(1) for key in rng.sample(keys, rng.randint(1, 2))}

    document = {key: value(0) for key in rng.sample(keys, rng.choice((1, 1, 2, 2, 3, 4)))}
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
    asked = [(city_tool("weather", rng), "weather")]
    if rng.random() < 0.04:
        asked.append((city_tool("time", rng), "time"))
    tools = [tool for tool, _ in asked]
    count = rng.choices((0, 1, 2), (92, 7, 1))[0]
    for row in rng.sample(phrases(TEXTS["others"]), count):
        name, argument, doc = row.split(":")
        tools.append(schema(name, argument, doc, f"The {argument}", rng))
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
