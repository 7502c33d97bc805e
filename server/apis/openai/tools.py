"""The tools of a request and which of them may be called.

    tools, tool_choice → names of tools, a mode, the chosen tools → ToolCallPolicy

Chat Completions nests the fields of a function, as chat templates read them. The tools of the
Responses API are in response_tools.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.custom_tools import InputFormat, custom_function
from server.apis.openai.request_fields import convert, required
from server.apis.openai.response_format import check_depth
from server.http.json import Document
from worker.messages.generation import Constraint, ToolCallPolicy

MAX_TOOLS = 128
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]  # passed to the chat template
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}\Z")]
Mode = Literal["none", "auto", "required"]


# ── nested, as in Chat Completions ──


class Function(Struct):
    name: Name
    parameters: dict[str, Any] | None = None


class CustomFunction(Struct):
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class ChatTool(Struct):
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: CustomFunction | None = None


class ToolList(Struct):
    tools: list[ChatTool]


class FunctionName(Struct):
    name: str


class ChosenFunction(Struct, tag_field="type", tag="function"):
    function: FunctionName


class ChosenCustom(Struct, tag_field="type", tag="custom"):
    custom: FunctionName


class AutoMode(Struct, tag_field="type", tag="auto"):
    """A mode in the form of a chosen tool, as the next two."""

    mode: ClassVar[Mode] = "auto"


class NoneMode(Struct, tag_field="type", tag="none"):
    mode: ClassVar[Mode] = "none"


class RequiredMode(Struct, tag_field="type", tag="required"):
    mode: ClassVar[Mode] = "required"


TypedMode: TypeAlias = AutoMode | NoneMode | RequiredMode


class AllowedTool(Struct):
    type: Literal["function", "custom"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedFunctions(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedFunctions


ChatToolChoice: TypeAlias = Mode | TypedMode | ChosenFunction | ChosenCustom | AllowedChoice


def chat_tools(
    tools: Tools | None, choice: ChatToolChoice | None, parallel: bool | None
) -> tuple[list[Document], ToolCallPolicy | None]:
    """Return the tools as functions, and which of them may be called: None if none may.

    InvalidInput for an invalid tool, and for a choice that the tools do not allow."""
    if isinstance(choice, TypedMode):
        choice = choice.mode
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidInput.at("tool_choice", "requires tools")
        return [], None
    shown: list[Document] = []
    names: dict[str, str] = {}
    inputs: dict[str, Constraint | None] = {}
    for n, (document, tool) in enumerate(
        zip(tools, convert({"tools": tools}, ToolList).tools, strict=True)
    ):
        path = f"tools[{n}].{tool.type}"
        if tool.type == "function":
            function: Function = required(tool.function, path)
            check_depth(function.parameters, f"{path}.parameters")
            names[f"{path}.name"] = function.name
            shown.append(document)
            continue
        custom: CustomFunction = required(tool.custom, path)
        constraint = custom.format.constraint(f"{path}.format") if custom.format else None
        names[f"{path}.name"], inputs[custom.name] = custom.name, constraint
        shown.append(custom_function(custom.name, custom.description, constraint))
    mode: Mode = "required"
    chosen: dict[str, str] = {}
    if isinstance(choice, ChosenFunction):
        chosen = {"tool_choice.function.name": choice.function.name}
    elif isinstance(choice, ChosenCustom):
        chosen = {"tool_choice.custom.name": choice.custom.name}
    elif isinstance(choice, AllowedChoice):
        mode = choice.allowed_tools.mode
        for n, allowed in enumerate(choice.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{n}].{allowed.type}"
            entry = allowed.custom if allowed.type == "custom" else allowed.function
            chosen[f"{path}.name"] = required(entry, path).name
    else:
        mode = choice or "auto"
    if isinstance(choice, (ChosenFunction, ChosenCustom)):
        parallel = False  # exactly one call
    policy = tool_policy(names, mode, chosen, parallel, inputs)
    return shown if policy else [], policy  # tools that may not be called are not shown


def tool_policy(
    names: Mapping[str, str],
    mode: Mode,
    chosen: Mapping[str, str],
    parallel: bool | None,
    inputs: Mapping[str, Constraint | None] | None = None,
) -> ToolCallPolicy | None:
    """Return which tools may be called, from the names of all and of the chosen ones, by path.
    `inputs`: the constraints of custom tools."""
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
    callable_names = tuple(dict.fromkeys((chosen or names).values()))
    return ToolCallPolicy(callable_names, mode == "required", parallel is not False, inputs or {})
