"""Turns and tools that are made up to see what a chat template makes of them (learning.py).

Their names and values occur nowhere else, so that they are found again in what it writes.
"""

import json
from typing import Any

from worker.text.turns import BLOCKS, Message

CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES, IDS = ("nameone", "nametwo"), ("callidone", "callidtwo")
TEXT, NUMBER = "valueone", 12
ARGUMENTS = {"keyone": TEXT, "keytwo": NUMBER}


def assistant(
    *calls: dict[str, Any], content: str = "", thought: str = "", key: str = ""
) -> Message:
    """A turn, in the API's form, with calls of these arguments."""
    turn: Message = {"role": "assistant", "content": content}
    if thought and key == BLOCKS:
        blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
        turn["content"] = blocks
    elif thought:
        turn[key] = thought
    if calls:
        turn["tool_calls"] = [call(n, arguments) for n, arguments in enumerate(calls)]
    return turn


def call(n: int, arguments: dict[str, Any]) -> Message:
    function = {"name": NAMES[n], "arguments": json.dumps(arguments)}
    return {"id": IDS[n], "type": "function", "function": function}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    described = {key: {"description": "any", **each} for key, each in properties.items()}
    parameters = {"type": "object", "properties": described, "required": []}
    function = {"name": name, "description": "any", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool(name, {"keyone": {"type": "string"}, "keytwo": {"type": "integer"}}) for name in NAMES
]
