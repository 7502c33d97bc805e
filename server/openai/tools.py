"""The tools of a request and which of them may be called.

    tools → their names, tool_choice → a mode and the tools that it leaves; both → Calls

Chat nests a function's fields, as chat templates read them; the Responses API has them flat. Only
functions are served: whatever would run here (web_search, code_interpreter, mcp, …) is refused.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.params import required
from server.openai.structured import check_depth
from worker.protocol import Calls

MOST_TOOLS = 128
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MOST_TOOLS)]

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
MODES = ("none", "auto", "required")
Named = Iterable[tuple[str, Any]]  # paths, and what stands there for a function's name
Choice = tuple[str, Named]  # a mode, and the tools that it leaves; none: all


def _object(**properties: Any) -> Document:
    return {"type": "object", "properties": properties, "required": [*properties]}


# For the OpenAPI document.
FUNCTION = _object(
    type={"const": "function"}, function=_object(name={"type": "string", "minLength": 1})
)
ALLOWED = _object(
    type={"const": "allowed_tools"},
    allowed_tools=_object(
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": FUNCTION, "minItems": 1},
    ),
)
TOOL_CHOICE = {"anyOf": [{"enum": [*MODES, None]}, FUNCTION, ALLOWED]}


def _names(tools: Named, twice: str) -> list[str]:
    """`twice` is the error of a name that was there before; {} stands for it."""
    names: list[str] = []
    for path, name in tools:
        if not isinstance(name, str) or not name:
            raise InvalidInput.at(path, "is required")
        if not NAME.fullmatch(name):
            raise InvalidInput.at(path, "must be 1 to 64 letters, digits and _ - . : /")
        if name in names:
            raise InvalidInput.at(path, twice.format(repr(name)))
        names.append(name)
    return names


def _calls(names: list[str], choice: Choice, parallel: bool | None, quoted: int) -> Calls | None:
    """None: nothing may be called. InvalidInput for a choice of a tool that there is not, which
    quotes so many characters of its name."""
    mode, chosen = choice
    left: dict[str, None] = {}
    for path, name in chosen:
        if name not in names:
            raise InvalidInput.at(path, f"there is no tool {name[:quoted]!r}")
        left[name] = None
    if mode == "none" or not names:
        return None
    return Calls(tuple(left or names), mode == "required", parallel is not False)


# ── nested, as Chat Completions has them ──


def chat_calls(tools: Tools | None, choice: Any, parallel: bool | None) -> Calls | None:
    """None: nothing may be called. InvalidInput for tools that are none, and a choice among
    them that cannot be made."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidInput.at("tool_choice", "goes with tools only")
        return None
    if not tools:
        raise InvalidInput.at("tools", "must not be empty; leave it out")
    return _calls(_names(_named(tools), "there are two tools {}"), _choice(choice), parallel, 100)


def _named(tools: Tools) -> Named:
    for n, tool in enumerate(tools):
        path = f"tools[{n}]"
        if tool.get("type") != "function":
            raise InvalidInput.at(f"{path}.type", "must be function")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidInput.at(f"{path}.function", "must be an object")
        yield f"{path}.function.name", function.get("name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidInput.at(f"{path}.function.parameters", "must be an object")


def _choice(choice: Any) -> Choice:
    if choice is None:
        return "auto", ()
    if isinstance(choice, str) and choice in MODES:
        return choice, ()
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_chosen(choice, "tool_choice")]
    if kind != "allowed_tools":
        known = f"must be one of {', '.join(MODES)}, or an object that names a function"
        raise InvalidInput.at("tool_choice", known)
    path, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise InvalidInput.at(f"{path}.mode", "must be auto or required")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidInput.at(f"{path}.tools", "must be a list of tools")
    return allowed["mode"], [_chosen(each, f"{path}.tools[{n}]") for n, each in enumerate(tools)]


def _chosen(tool: Any, path: str) -> tuple[str, str]:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidInput.at(f"{path}.function.name", "is required")
    return f"{path}.function.name", name


# ── flat, as the Responses API has them ──


class Tool(Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> Document:
        """As chat templates read it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "type"}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": self.type, "function": function}


class ChosenTool(Struct):
    type: str
    name: str | None = None


class ToolChoice(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Meta(max_length=MOST_TOOLS)] | None = None


def flat_calls(
    tools: Sequence[Tool], choice: str | ToolChoice | None, parallel: bool | None
) -> Calls | None:
    """As `chat_calls`; without tools there is nothing to call."""
    names = _names(_flat_named(tools, "tools"), "there is a tool of this name before it")
    return _calls(names, _flat_choice(choice, names), parallel, 50)


def _flat_named(tools: Sequence[Tool | ChosenTool], path: str) -> Named:
    for n, tool in enumerate(tools):
        at = f"{path}[{n}]"
        if tool.type != "function":
            only = f"only function is served here, not {tool.type[:50]!r}"
            raise InvalidInput.at(f"{at}.type", only)
        yield f"{at}.name", required(tool.name, f"{at}.name")
        if isinstance(tool, Tool):
            check_depth(tool.parameters, f"{at}.parameters")


def _flat_choice(choice: str | ToolChoice | None, names: Sequence[str]) -> Choice:
    if not isinstance(choice, ToolChoice):
        if choice is not None and choice not in MODES:
            known = f"must be auto, none, required or an object, not {choice[:50]!r}"
            raise InvalidInput.at("tool_choice", known)
        if choice == "required" and not names:
            raise InvalidInput.at("tool_choice", "required goes with tools only")
        return choice or "auto", ()
    if choice.type == "function":
        return "required", [("tool_choice.name", required(choice.name, "tool_choice.name"))]
    if choice.type != "allowed_tools":
        known = f"must be function or allowed_tools, not {choice.type[:50]!r}"
        raise InvalidInput.at("tool_choice.type", known)
    mode = required(choice.mode, "tool_choice.mode")
    if not choice.tools:
        raise InvalidInput.at("tool_choice.tools", "must not be empty")
    return mode, _flat_named(choice.tools, "tool_choice.tools")
