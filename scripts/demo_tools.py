"""Weather and time tools for the chat demo model, their results, and the answers from those.

The names of a tool and of its argument vary, so that the model copies them from the prompt.
"""

import json
import random
from typing import Any

from demo_facts import CAPITALS, pairs, phrases
from demo_questions import Turn, cased, worn

Message = dict[str, Any]
Tool = dict[str, Any]

NO_WEATHER = "Sorry, I cannot look up the weather without a weather tool."
NO_RESULT = "Sorry, I could not get that for {c}."
WHICH_CITY = "Which city do you mean?"

CITIES = """New York|Los Angeles|San Francisco|San Francisco, CA|Boston, MA|Chicago|Hong Kong
Sydney|Melbourne|Toronto|Barcelona|Munich|Hamburg|Frankfurt|Zurich|Geneva|Milan|Naples|Lyon
Manchester|Glasgow|Istanbul|Shanghai|Mumbai|Rio de Janeiro|Cape Town|Seattle|Dallas|Kyoto|Osaka
Paris, France|London, UK|Tokyo, Japan|Berlin, Germany|Mexico City|Buenos Aires|St. Petersburg"""
WEATHER_QUESTIONS = """What is the weather in {c}?|What is the weather like in {c}?|weather in {c}
How is the weather in {c}?|What's the weather in {c}?|What's the weather like in {c} today?
Is it sunny in {c}?|Is it raining in {c}?|Will it rain in {c}?|How warm is it in {c}?|{c} weather
How cold is it in {c} now?|What is the temperature in {c}?|Tell me the weather in {c}.
Can you check the weather in {c}?|I am going to {c}, how is the weather?|Do I need a coat in {c}?
Please look up the weather in {c}.|What is the weather in {c} right now?|Weather for {c}, please.
Do I need an umbrella in {c}?|What is the forecast for {c}?|How hot is it in {c} today?
Give me the weather for {c}.|What is the current weather in {c}?|How's the weather in {c}?
Use the tool to get the weather in {c}.|Is it cold in {c} today?|What will the weather be in {c}?"""
TIME_QUESTIONS = """What time is it in {c}?|What is the time in {c}?|Tell me the time in {c}.
What's the time in {c} now?|Which time is it in {c}?|How late is it in {c}?|time in {c}"""
FOLLOW_UPS = "And in {c}?|What about {c}?|And {c}?|And what about {c}?|How about {c}?|In {c}?"
PAIR_QUESTIONS = """What is the weather in {c} and {c2}?|What is the weather in {c} and in {c2}?
How is the weather in {c} and {c2}?|Compare the weather in {c} and {c2}.|weather in {c} and {c2}
Tell me the weather in {c} and {c2}.|What's the weather like in {c} and {c2} today?"""
NO_CITY = """What is the weather?|How is the weather?|What's the weather like?|Will it rain?
Is it sunny today?|How is the weather today?|What will the weather be tomorrow?|Is it cold?"""

WEATHER_NAMES = """get_weather|get_current_weather|weather|fetch_weather|get_weather|current_weather
lookup_weather|weather_report|get_forecast|getWeather|weather_tool|check_weather|getCurrentWeather
get_temperature|weather_api|forecast"""
TIME_NAMES = "get_time|get_current_time|time|clock|current_time|local_time|getTime"
ARGUMENTS = "city|location|city|location|place|town|city_name|q|query|where|name"
WEATHER_DOCS = """Get the weather in a city|Get the current weather|Current weather for a place
Get the current weather in a given location|Returns the weather|Look up the weather.
Get current temperature for a given location.|Weather by city|The weather in a city now."""
TIME_DOCS = "Get the time in a city|The current time of a place|Returns the local time."
ARGUMENT_DOCS = """The city|Name of the city|The city and state, e.g. San Francisco, CA
The name of the city, e.g. Paris|City and country e.g. Bogotá, Colombia|A place|Where to look"""
OTHERS = """search:query:Search the web|send_email:to:Send an email|calculate:expression:Calculator
get_stock_price:symbol:Get the price of a stock|play_music:song:Play a song|translate:text:Translate
open_door:door:Open a door|set_alarm:when:Set an alarm|get_news:topic:Get the news
read_file:path:Read a file|run_code:code:Run Python code|book_table:restaurant:Book a table"""

SKIES = """sunny|cloudy|rainy|windy|snowy|foggy|clear|stormy|overcast|light rain|partly cloudy
heavy rain|dry|hot|light snow|hazy|mostly sunny"""
ERRORS = (
    '{"error": "not found"}|{"error": "unknown city"}|error|not found|{"error": "timeout"}|null'
)


def city(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return cased(rng.choice(pairs(CAPITALS))[1])
    return rng.choice(phrases(CITIES))


def named(names: str, rng: random.Random) -> str:
    return rng.choice(phrases(names))


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


def city_tool(names: str, docs: str, rng: random.Random) -> Tool:
    argument, doc = named(ARGUMENTS, rng), rng.choice(phrases(docs))
    return schema(named(names, rng), argument, doc, rng.choice(phrases(ARGUMENT_DOCS)), rng)


def other_tools(count: int, rng: random.Random) -> list[Tool]:
    drawn = [row.split(":") for row in rng.sample(phrases(OTHERS), count)]
    return [schema(tool, argument, doc, f"The {argument}", rng) for tool, argument, doc in drawn]


def call(tool: Tool, where: str) -> dict[str, Any]:
    function = tool["function"]
    arguments = {next(iter(function["parameters"]["properties"])): where}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def weather_result(where: str, rng: random.Random) -> tuple[str, str]:
    """Return a weather tool's result, and the same as a sentence."""
    degrees, sky = str(rng.randint(-15, 42)), rng.choice(phrases(SKIES))
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
            result, answer = rng.choice(phrases(ERRORS)), NO_RESULT.format(c=where)
        results.append((result, answer))
    calls = [call(tool, where) for where in places]
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": result} for result, _ in results),
        {"role": "assistant", "content": " ".join(answer for _, answer in results)},
    ]
    return messages


def weather_turns(tool: Tool, questions: str, rng: random.Random) -> list[Message]:
    where, second = city(rng), city(rng)
    roll = rng.random()
    if roll < 0.12:
        asked = worn(rng.choice(phrases(PAIR_QUESTIONS)), rng)
        return turn(tool, place(asked, where, second), [where, second], rng)
    if roll < 0.22 and questions is WEATHER_QUESTIONS:
        opening: list[Message] = [
            {"role": "user", "content": worn(rng.choice(phrases(NO_CITY)), rng)},
            {"role": "assistant", "content": WHICH_CITY},
        ]
        asked = place(rng.choice(("{c}", "In {c}.", "I mean {c}.", "{c}, please")), where)
        return opening + turn(tool, asked, [where], rng)
    asked = worn(rng.choice(phrases(questions)), rng)
    messages = turn(tool, place(asked, where), [where], rng)
    if rng.random() < 0.4:
        asked = worn(rng.choice(phrases(FOLLOW_UPS)), rng)
        messages += turn(tool, place(asked, second), [second], rng)
    return messages


def place(asked: str, where: str, second: str = "") -> str:
    """Insert the places after the text was varied, since the model must copy them exactly."""
    return asked.replace("{C2}", "{c2}").replace("{C}", "{c}").format(c=where, c2=second)


def weather_without_tool(rng: random.Random) -> list[Turn]:
    asked = worn(rng.choice(phrases(f"{WEATHER_QUESTIONS}\n{NO_CITY}")), rng)
    return [(place(asked, city(rng)), NO_WEATHER)]
