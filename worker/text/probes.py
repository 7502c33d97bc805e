"""Turns and tools that are made up to see what a chat template makes of them.

Their names and values occur nowhere else, so that they are found again in what it writes.
"""

import json
from collections.abc import Callable
from typing import Any

from worker.text.turns import Message

# Messages, tools and variables as the template's text; nothing where it raises.
Render = Callable[..., str]

QUESTION: Message = {"role": "user", "content": "?"}
CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES, IDS = ("nameone", "nametwo"), ("callidone", "callidtwo")
TEXT, NUMBER = "valueone", 12
ARGUMENTS = {"keyone": TEXT, "keytwo": NUMBER}
# One of each type of JSON, and a text that looks like a number.
TYPED = {
    "keyone": "value-1.b",
    "keytwo": 12,
    "keythree": 1.5,
    "keyfour": True,
    "keyfive": ["ab", 2],
    "keysix": {"inner": "c"},
    "keyseven": "7",
}
TYPES = ("string", "integer", "number", "boolean", "array", "object", "string")


def assistant(*calls: dict[str, Any], content: str = "", thought: str = "") -> Message:
    """A turn, in the API's form, with calls of these arguments."""
    turn: Message = {"role": "assistant", "content": content}
    if thought:
        turn["reasoning_content"] = thought
    if calls:
        made = zip(IDS, NAMES, calls, strict=False)
        turn["tool_calls"] = [call(id, name, arguments) for id, name, arguments in made]
    return turn


def call(id: str, name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def _tool(name: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"description": "any", "type": type_} for key, type_ in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": "any", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(name, {"keyone": "string", "keytwo": "integer"}) for name in NAMES]
TYPED_TOOLS = [_tool(name, dict(zip(TYPED, TYPES, strict=True))) for name in NAMES]
