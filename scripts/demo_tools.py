"""Weather and time tools for the chat demo model, their results, and the answers from those.

The names of a tool and of its argument vary, so that the model copies them from the prompt.
"""

import json
import random
from typing import Any

from demo_corpus import FACTS, corpus, pairs, phrases
from demo_questions import Turn, cased, worn

TEXTS = corpus("tools")

Message = dict[str, Any]
Tool = dict[str, Any]

NO_WEATHER = "Sorry, I cannot look up the weather without a weather tool."
NO_RESULT = "Sorry, I could not get that for {c}."
WHICH_CITY = "Which city do you mean?"


def city(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return cased(rng.choice(pairs(FACTS["capitals"]))[1])
    return drawn("cities", rng)


def drawn(section: str, rng: random.Random) -> str:
    return rng.choice(phrases(TEXTS[section]))


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


def other_tools(count: int, rng: random.Random) -> list[Tool]:
    rows = [row.split(":") for row in rng.sample(phrases(TEXTS["others"]), count)]
    return [schema(tool, argument, doc, f"The {argument}", rng) for tool, argument, doc in rows]


def call(tool: Tool, where: str) -> dict[str, Any]:
    function = tool["function"]
    arguments = {next(iter(function["parameters"]["properties"])): where}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def weather_result(where: str, rng: random.Random) -> tuple[str, str]:
    """Return a weather tool's result, and the same as a sentence."""
    degrees, sky = str(rng.randint(-15, 42)), drawn("skies", rng)
    if rng.random() < 0.1:
        degrees += f".{rng.randint(0, 9)}"
    warm = f"{degrees}°C" if rng.random() < 0.25 else json.loads(degrees)
    warmth = {rng.choice(("temperature", "temperature", "temp", "temp_c", "degrees")): warm}
    look = {rng.choice(("condition", "condition", "conditions", "description", "sky")): sky}
    roll = rng.random()
    if roll < 0.12:
        return f"{degrees}°C, {sky}", f"It is {degrees} degrees and {sky} in {where}."
    if roll < 0.20:
        return f"{sky}, {degrees} degrees", f"It is {degrees} degrees and {sky} in {where}."
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
    text = json.dumps(merged, separators=separators, ensure_ascii=False)
    return text, f"It is {degrees} degrees and {sky} in {where}."


def time_result(where: str, rng: random.Random) -> tuple[str, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return rng.choice((clock, f'{{"time": "{clock}"}}')), f"It is {clock} in {where}."


def turn(tool: Tool, asked: str, places: list[str], rng: random.Random) -> list[Message]:
    """Return a question, the calls for each place, their results, and the answer."""
    results = []
    for where in places:
        is_time = "time" in tool["function"]["name"] or tool["function"]["name"] == "clock"
        result, answer = (time_result if is_time else weather_result)(where, rng)
        if rng.random() < 0.06:
            result, answer = drawn("errors", rng), NO_RESULT.format(c=where)
        results.append((result, answer))
    calls = [call(tool, where) for where in places]
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": result} for result, _ in results),
        {"role": "assistant", "content": " ".join(answer for _, answer in results)},
    ]
    return messages


def weather_turns(tool: Tool, topic: str, rng: random.Random) -> list[Message]:
    where, second = city(rng), city(rng)
    roll = rng.random()
    if roll < 0.12:
        asked = worn(drawn("pair_questions", rng), rng)
        return turn(tool, place(asked, where, second), [where, second], rng)
    if roll < 0.22 and topic == "weather":
        opening: list[Message] = [
            {"role": "user", "content": worn(drawn("no_city", rng), rng)},
            {"role": "assistant", "content": WHICH_CITY},
        ]
        asked = place(rng.choice(("{c}", "In {c}.", "I mean {c}.", "{c}, please")), where)
        return opening + turn(tool, asked, [where], rng)
    asked = worn(drawn(f"{topic}_questions", rng), rng)
    messages = turn(tool, place(asked, where), [where], rng)
    if rng.random() < 0.4:
        asked = worn(drawn("follow_ups", rng), rng)
        messages += turn(tool, place(asked, second), [second], rng)
    return messages


def place(asked: str, where: str, second: str = "") -> str:
    """Insert the places after the text was varied, since the model must copy them exactly."""
    return asked.replace("{C2}", "{c2}").replace("{C}", "{c}").format(c=where, c2=second)


def weather_without_tool(rng: random.Random) -> list[Turn]:
    asked = worn(rng.choice(phrases(f"{TEXTS['weather_questions']}\n{TEXTS['no_city']}")), rng)
    return [(place(asked, city(rng)), NO_WEATHER)]
