"""Tools of a Responses request: flat, where chat templates and the other endpoints nest them.

Only functions are served: whatever would run here (web_search, code_interpreter, mcp, …) is
refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.openai.responses.store import Document
from server.openai.tools import MOST_TOOLS, NAME
from worker.protocol import Calls


class Tool(Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check(self, path: str) -> None:
        if self.type != "function":
            only = f"only function is served here, not {self.type[:50]!r}"
            raise InvalidInput(f"{path}.type: {only}", f"{path}.type")
        if not self.name:
            raise InvalidInput(f"{path}.name: is required", f"{path}.name")
        if not NAME.fullmatch(self.name):
            kind = f"{path}.name: must be 1 to 64 letters, digits and _ - . : /"
            raise InvalidInput(kind, f"{path}.name")
        check_depth(self.parameters, f"{path}.parameters")

    def nested(self) -> Document:
        """As chat templates read it."""
        function: Document = {"name": self.name}
        for key in ("description", "parameters", "strict"):
            if (value := getattr(self, key)) is not None:
                function[key] = value
        return {"type": "function", "function": function}

    def document(self) -> Document:
        return {
            "type": self.type,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class ChosenTool(Struct):
    type: str
    name: str | None = None


class ToolChoice(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Meta(max_length=MOST_TOOLS)] | None = None


def check_tools(tools: Sequence[Tool]) -> None:
    names: set[str | None] = set()
    for n, tool in enumerate(tools):
        path = f"tools[{n}]"
        tool.check(path)
        if tool.name in names:
            twice = f"{path}.name: there is a tool of this name before it"
            raise InvalidInput(twice, f"{path}.name")
        names.add(tool.name)


def check_depth(schema: Document | None, path: str) -> None:
    """JSON that is read may be nested deeper than what is written, and this is told again."""
    try:
        orjson.dumps([[[[[[schema]]]]]])  # at least as deep as it lies in an event
    except orjson.JSONEncodeError:
        raise InvalidInput(f"{path}: is nested too deeply", path) from None


def calls(
    tools: Sequence[Tool], choice: str | ToolChoice | None, parallel: bool | None
) -> Calls | None:
    """What an answer may call; None for nothing. Raises InvalidInput for what does not fit."""
    names = [str(tool.name) for tool in tools]
    required = False
    if isinstance(choice, ToolChoice):
        required = choice.type == "function" or choice.mode == "required"
        names = _chosen(choice, names)
    elif choice not in (None, "auto", "none", "required"):
        known = f"must be auto, none, required or an object, not {choice[:50]!r}"
        raise InvalidInput(f"tool_choice: {known}", "tool_choice")
    elif choice == "required":
        required = True
        if not names:
            raise InvalidInput("tool_choice: required goes with tools only", "tool_choice")
    if not names or choice == "none":
        return None
    return Calls(tuple(names), required, parallel is not False)


def _chosen(choice: ToolChoice, names: list[str]) -> list[str]:
    """The names that a choice of one function, or of several, leaves."""
    if choice.type == "function":
        return [_known(choice.name, names, "tool_choice.name")]
    if choice.type != "allowed_tools":
        known = f"must be function or allowed_tools, not {choice.type[:50]!r}"
        raise InvalidInput(f"tool_choice.type: {known}", "tool_choice.type")
    if choice.mode is None:
        raise InvalidInput("tool_choice.mode: is required", "tool_choice.mode")
    if not choice.tools:
        raise InvalidInput("tool_choice.tools: must not be empty", "tool_choice.tools")
    chosen = []
    for n, tool in enumerate(choice.tools):
        path = f"tool_choice.tools[{n}]"
        if tool.type != "function":
            only = f"only function is served here, not {tool.type[:50]!r}"
            raise InvalidInput(f"{path}.type: {only}", f"{path}.type")
        chosen.append(_known(tool.name, names, f"{path}.name"))
    return chosen


def _known(name: str | None, names: list[str], path: str) -> str:
    if name is None:
        raise InvalidInput(f"{path}: is required", path)
    if name not in names:
        raise InvalidInput(f"{path}: there is no tool {name[:50]!r}", path)
    return name
