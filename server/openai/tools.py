"""The tools of a request and which of them may be called, as Chat Completions has them."""

import re
from typing import Annotated, Any

from msgspec import Meta

from batching.errors import InvalidInput
from worker.protocol import Calls

MOST_TOOLS = 128
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MOST_TOOLS)]

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
WAYS = ("none", "auto", "required")
# For the OpenAPI document.
FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": FUNCTION, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
TOOL_CHOICE = {"anyOf": [{"enum": [*WAYS, None]}, FUNCTION, ALLOWED]}


def calls_of(tools: Tools | None, choice: Any, parallel: bool | None) -> Calls | None:
    """None: nothing may be called. InvalidInput for tools that are none, and a choice among
    them that cannot be made."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidInput("tool_choice: goes with tools only", "tool_choice")
        return None
    if not tools:
        raise InvalidInput("tools: must not be empty; leave it out", "tools")
    names = _names(tools)
    way, wanted = _choice(choice)
    for name, param in wanted.items():
        if name not in names:
            unknown = f"{param}: there is no tool {name[:100]!r}"
            raise InvalidInput(unknown, param)
    if way == "none":
        return None
    return Calls(tuple(wanted) or tuple(names), way == "required", parallel is not False)


def _names(tools: Tools) -> list[str]:
    names: list[str] = []
    for n, tool in enumerate(tools):
        path = f"tools[{n}]"
        if tool.get("type") != "function":
            raise InvalidInput(f"{path}.type: must be function", f"{path}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidInput(f"{path}.function: must be an object", f"{path}.function")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"{path}.function.name: is required", f"{path}.function.name")
        if not NAME.fullmatch(name):
            kind = f"{path}.function.name: must be 1 to 64 letters, digits and _ - . : /"
            raise InvalidInput(kind, f"{path}.function.name")
        if name in names:
            twice = f"{path}.function.name: there are two tools {name[:100]!r}"
            raise InvalidInput(twice, f"{path}.function.name")
        if not isinstance(function.get("parameters") or {}, dict):
            param = f"{path}.function.parameters"
            raise InvalidInput(f"{param}: must be an object", param)
        names.append(name)
    return names


def _choice(choice: Any) -> tuple[str, dict[str, str]]:
    """How calls are asked for, and of which tools alone, with what errors call each."""
    if choice is None:
        return "auto", {}
    if isinstance(choice, str) and choice in WAYS:
        return choice, {}
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "required", {_named(choice, "tool_choice"): "tool_choice.function.name"}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    known = f"must be one of {', '.join(WAYS)}, or an object that names a function"
    raise InvalidInput(f"tool_choice: {known}", "tool_choice")


def _allowed(allowed: Any) -> tuple[str, dict[str, str]]:
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise InvalidInput(f"{path}.mode: must be auto or required", f"{path}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise InvalidInput(f"{path}.tools: must be a list of tools", f"{path}.tools")
    wanted = {}
    for n, tool in enumerate(listed):
        param = f"{path}.tools[{n}]"
        wanted[_named(tool, param)] = f"{param}.function.name"
    return allowed["mode"], wanted


def _named(tool: Any, path: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        param = f"{path}.function.name"
        raise InvalidInput(f"{param}: is required", param)
    return name
