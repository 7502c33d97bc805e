"""The tools of a request and which of them may be called.

    tools, tool_choice → names of tools, a mode, the chosen tools → ToolCallPolicy

Chat Completions nests the fields of a function, as chat templates read them; the Responses API has
them flat. Functions are the only tools: tools that the server would run are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.request_fields import convert
from server.openai.response_format import check_depth
from worker.messages.generation import ToolCallPolicy

MAX_TOOLS = 128
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]  # passed to the chat template
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,64}\Z")]
Mode = Literal["none", "auto", "required"]


# ── nested, as in Chat Completions ──


class Function(Struct):
    name: Name
    parameters: dict[str, Any] | None = None


class FunctionTool(Struct):
    type: Literal["function"]
    function: Function


class ToolList(Struct):
    tools: list[FunctionTool]


class FunctionName(Struct):
    name: str


class ChosenFunction(Struct, tag_field="type", tag="function"):
    function: FunctionName


class AllowedFunctions(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedFunctions


ChatToolChoice: TypeAlias = Mode | ChosenFunction | AllowedChoice


def chat_tool_policy(
    tools: Tools | None, choice: ChatToolChoice | None, parallel: bool | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, None if none may.

    InvalidInput for an invalid tool, and for a choice that the tools do not allow.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidInput.at("tool_choice", "requires tools")
        return None
    functions = [tool.function for tool in convert({"tools": tools}, ToolList).tools]
    names = {f"tools[{n}].function.name": function.name for n, function in enumerate(functions)}
    mode: Mode = "required"
    if isinstance(choice, ChosenFunction):
        parallel = False  # exactly one call
        chosen = {"tool_choice.function.name": choice.function.name}
    elif isinstance(choice, AllowedChoice):
        mode, allowed = choice.allowed_tools.mode, choice.allowed_tools.tools
        path = "tool_choice.allowed_tools.tools[{}].function.name"
        chosen = {path.format(n): tool.function.name for n, tool in enumerate(allowed)}
    else:
        mode, chosen = choice or "auto", {}
    return tool_policy(names, mode, chosen, parallel)


# ── flat, as in the Responses API ──


class Tool(Struct):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> Document:
        """Return the tool as chat templates read it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "type"}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": self.type, "function": function}


class ChosenTool(Struct, tag_field="type", tag="function"):
    name: str


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice: TypeAlias = Mode | ChosenTool | AllowedTools


def flat_tool_policy(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, as `chat_tool_policy` does."""
    names = {f"tools[{n}].name": tool.name for n, tool in enumerate(tools)}
    for n, tool in enumerate(tools):
        check_depth(tool.parameters, f"tools[{n}].parameters")
    if choice == "required" and not tools:
        raise InvalidInput.at("tool_choice", "'required' requires tools")
    mode: Mode = "required"
    if isinstance(choice, ChosenTool):
        parallel = False  # exactly one call
        chosen = {"tool_choice.name": choice.name}
    elif isinstance(choice, AllowedTools):
        mode = choice.mode
        chosen = {f"tool_choice.tools[{n}].name": tool.name for n, tool in enumerate(choice.tools)}
    else:
        mode, chosen = choice or "auto", {}
    return tool_policy(names, mode, chosen, parallel)


def tool_policy(
    names: Mapping[str, str], mode: Mode, chosen: Mapping[str, str], parallel: bool | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, from the names of all and of the chosen ones, by path."""
    known: set[str] = set()
    for path, name in names.items():
        if name in known:
            raise InvalidInput.at(path, f"a tool before it is named {name!r}, too")
        known.add(name)
    for path, name in chosen.items():
        if name not in known:
            raise InvalidInput.at(path, f"there is no tool {name[:50]!r}")
    if mode == "none" or not names:
        return None
    callable_names = dict.fromkeys((chosen or names).values())
    return ToolCallPolicy(tuple(callable_names), mode == "required", parallel is not False)
