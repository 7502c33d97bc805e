"""The tools of a request and which of them may be called.

    tools, tool_choice → CallableTool by name, a mode, the chosen names → ToolCallPolicy

Chat Completions nests the fields of a function, as chat templates read them. The tools of the
Responses API are in response_tools.py.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

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
ToolKind = Literal["function", "custom", "local_shell"]


class CallableTool(NamedTuple):
    """A tool that the model may call as a function. `name`, `namespace`: those of the Responses
    API, where they differ from the function's."""

    document: Document  # the chat template's
    path: str  # for errors
    kind: ToolKind = "function"
    constraint: Constraint | None = None  # of a custom tool's input
    name: str = ""
    namespace: str | None = None


# ── nested, as in Chat Completions ──


class Function(Struct):
    name: Name
    parameters: dict[str, Any] | None = None


class CustomFunction(Struct):
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class ChatTool(Struct):
    type: Literal["function", "custom"] = "function"  # as in vLLM
    function: Function | None = None
    custom: CustomFunction | None = None

    def callable(self, document: Document, path: str) -> CallableTool:
        """Return the tool, whose document chat templates read unless it is a custom one."""
        path = f"{path}.{self.type}"
        if self.type == "function":
            function: Function = required(self.function, path)
            check_depth(function.parameters, f"{path}.parameters")
            return CallableTool({"type": "function", **document}, path)
        custom: CustomFunction = required(self.custom, path)
        constraint = custom.format.constraint(f"{path}.format") if custom.format else None
        document = custom_function(custom.name, custom.description, constraint)
        return CallableTool(document, path, "custom", constraint)


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
    type: Literal["function", "custom"] | None = "function"
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
    entries = enumerate(zip(tools, convert({"tools": tools}, ToolList).tools, strict=True))
    found = by_name(tool.callable(document, f"tools[{n}]") for n, (document, tool) in entries)
    mode: Mode = "required"
    chosen: dict[str, str] = {}
    if isinstance(choice, ChosenFunction):
        chosen = {"tool_choice.function.name": choice.function.name}
    elif isinstance(choice, ChosenCustom):
        chosen = {"tool_choice.custom.name": choice.custom.name}
    elif isinstance(choice, AllowedChoice):
        mode = choice.allowed_tools.mode
        for n, allowed in enumerate(choice.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{n}].{allowed.type or 'function'}"
            entry = allowed.custom if allowed.type == "custom" else allowed.function
            chosen[f"{path}.name"] = required(entry, path).name
    else:
        mode = choice or "auto"
    if isinstance(choice, (ChosenFunction, ChosenCustom)):
        parallel = False  # exactly one call
    policy = tool_policy(found, mode, chosen, parallel)
    # tools that may not be called are not shown
    return [tool.document for tool in found.values()] if policy else [], policy


def by_name(tools: Iterable[CallableTool]) -> dict[str, CallableTool]:
    """Return tools by their names for the model. Raises InvalidInput for a name that is there
    twice."""
    found: dict[str, CallableTool] = {}
    for tool in tools:
        if (name := tool.document["function"]["name"]) in found:
            reason = f"a tool before it is named {name!r}, too"
            raise InvalidInput.at(f"{tool.path}.name", reason)
        found[name] = tool
    return found


def tool_policy(
    tools: Mapping[str, CallableTool], mode: Mode, chosen: Mapping[str, str], parallel: bool | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, None if none may. `chosen`: names, by path."""
    for path, name in chosen.items():
        if name not in tools:
            raise InvalidInput.at(path, f"there is no tool {name[:50]!r}")
    if mode == "none" or not tools:
        return None
    names = tuple(dict.fromkeys(chosen.values() or tools))
    inputs = {name: tool.constraint for name, tool in tools.items() if tool.kind == "custom"}
    return ToolCallPolicy(names, mode == "required", parallel is not False, inputs)
