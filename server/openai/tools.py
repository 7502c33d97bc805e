"""The tools of a request and which of them may be called.

    tools → their names, tool_choice → a mode and the tools that it leaves; both → ToolCallPolicy

Chat nests a function's fields, as chat templates read them; the Responses API has them flat. Only
functions are served: whatever would run here (web_search, code_interpreter, mcp, …) is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.request_fields import convert
from server.openai.response_format import check_depth
from worker.messages.generation import ToolCallPolicy

MOST_TOOLS = 128
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MOST_TOOLS)]  # a template gets all of them
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,64}\Z")]
Mode = Literal["none", "auto", "required"]


def _calls(
    names: Mapping[str, str], mode: Mode, chosen: Mapping[str, str], parallel: bool | None
) -> ToolCallPolicy | None:
    """What may be called, of the tools' `names` and those `chosen` among them, each by the field
    that it stands in. None: nothing. InvalidInput for two of a name, and one that is not there."""
    known: set[str] = set()
    for path, name in names.items():
        if name in known:
            raise InvalidInput.at(path, f"there is a tool {name!r} before it")
        known.add(name)
    for path, name in chosen.items():
        if name not in known:
            raise InvalidInput.at(path, f"there is no tool {name[:50]!r}")
    if mode == "none" or not names:
        return None
    left = dict.fromkeys((chosen or names).values())
    return ToolCallPolicy(tuple(left), mode == "required", parallel is not False)


# ── nested, as Chat Completions has them ──


class Function(Struct):
    name: Name
    parameters: dict[str, Any] | None = None


class FunctionTool(Struct):
    type: Literal["function"]
    function: Function


class Offered(Struct):
    tools: list[FunctionTool]


class ChosenName(Struct):
    name: str


class ChosenFunction(Struct, tag_field="type", tag="function"):
    function: ChosenName


class AllowedFunctions(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedFunctions


ChatToolChoice: TypeAlias = Mode | ChosenFunction | AllowedChoice


def chat_calls(
    tools: Tools | None, choice: ChatToolChoice | None, parallel: bool | None
) -> ToolCallPolicy | None:
    """None: nothing may be called. InvalidInput for tools that are none, and a choice among
    them that cannot be made."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidInput.at("tool_choice", "goes with tools only")
        return None
    offered = convert({"tools": tools}, Offered).tools
    names = {f"tools[{n}].function.name": each.function.name for n, each in enumerate(offered)}
    mode: Mode = "required"
    if isinstance(choice, ChosenFunction):
        chosen = {"tool_choice.function.name": choice.function.name}
    elif isinstance(choice, AllowedChoice):
        mode, allowed = choice.allowed_tools.mode, choice.allowed_tools.tools
        path = "tool_choice.allowed_tools.tools[{}].function.name"
        chosen = {path.format(n): each.function.name for n, each in enumerate(allowed)}
    else:
        mode, chosen = choice or "auto", {}
    return _calls(names, mode, chosen, parallel)


# ── flat, as the Responses API has them ──


class Tool(Struct):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> Document:
        """As chat templates read it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "type"}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": self.type, "function": function}


class ChosenTool(Struct, tag_field="type", tag="function"):
    name: str


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MOST_TOOLS)]


ToolChoice: TypeAlias = Mode | ChosenTool | AllowedTools


def flat_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None
) -> ToolCallPolicy | None:
    """As `chat_calls`; without tools there is nothing to call."""
    names = {f"tools[{n}].name": tool.name for n, tool in enumerate(tools)}
    for n, tool in enumerate(tools):
        check_depth(tool.parameters, f"tools[{n}].parameters")
    if choice == "required" and not tools:
        raise InvalidInput.at("tool_choice", "required goes with tools only")
    mode: Mode = "required"
    if isinstance(choice, ChosenTool):
        chosen = {"tool_choice.name": choice.name}
    elif isinstance(choice, AllowedTools):
        mode = choice.mode
        chosen = {f"tool_choice.tools[{n}].name": each.name for n, each in enumerate(choice.tools)}
    else:
        mode, chosen = choice or "auto", {}
    return _calls(names, mode, chosen, parallel)
