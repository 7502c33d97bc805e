"""The tools of the Responses API, and which of them may be called.

    tools --flatten_tools--> functions of the chat template, by name --response_policy--> policy

Custom tools and the local shell are functions to the model, and the tools of a namespace are
functions with longer names. Tools that OpenAI runs are dropped where clients send them unasked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from batching.errors import InvalidInput
from server.apis.openai.custom_tools import InputFormat, custom_function
from server.apis.openai.messages import any_of
from server.apis.openai.request_fields import required
from server.apis.openai.response_format import check_depth
from server.apis.openai.tools import MAX_TOOLS, CallableTool, Mode, Name, by_name, tool_policy
from server.http.json import Document
from worker.messages.generation import ToolCallPolicy

LOCAL_SHELL: Literal["local_shell"] = "local_shell"
NAMESPACE_SEPARATOR = "__"
HostedType = Literal[
    "web_search",
    "web_search_preview",
    "image_generation",
    "file_search",
    "code_interpreter",
    "tool_search",
]
ToolType = Literal["function", "custom", "local_shell", "namespace"] | HostedType
CALLABLE = ("function", "custom", LOCAL_SHELL)
SHELL_FUNCTION: Document = {
    "name": LOCAL_SHELL,
    "description": "Run a command on the user's machine, and return its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout_ms": {"type": "integer"},
            "user": {"type": "string"},
            "working_directory": {"type": "string"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class Tool(Struct):
    type: ToolType
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: Annotated[list["Tool"], Meta(max_length=MAX_TOOLS)] | None = None

    def document(self) -> Document:
        """Return the tool with the fields of its type."""
        fields: Document = {"type": self.type}
        if self.type == "function":
            for name in ("name", "description", "parameters", "strict"):
                fields[name] = getattr(self, name)
        elif self.type == "custom":
            fields |= {"name": self.name, "description": self.description}
            if (format := self.format) is not None:
                fields["format"] = {"type": format.type}
                if format.type == "grammar":
                    fields["format"] |= {"syntax": format.syntax, "definition": format.definition}
        elif self.type == "namespace":
            tools = [tool.document() for tool in self.tools or ()]
            fields |= {"name": self.name, "description": self.description, "tools": tools}
        return fields

    def flatten(self, path: str) -> Iterator[CallableTool]:
        """Yield the tools that may be called; none for one that is dropped."""
        if self.type == "namespace":
            required(self.name, f"{path}.name")
            for n, tool in enumerate(required(self.tools, f"{path}.tools")):
                if tool.type not in ("function", "custom"):
                    reason = f"must be function or custom, not {tool.type!r}"
                    raise InvalidInput.at(f"{path}.tools[{n}].type", reason)
                yield tool.callable(f"{path}.tools[{n}]", self.name)
        elif self.type in CALLABLE:
            yield self.callable(path)

    def callable(self, path: str, namespace: str | None = None) -> CallableTool:
        if self.type == LOCAL_SHELL:
            document: Document = {"type": "function", "function": SHELL_FUNCTION}
            return CallableTool(document, path, LOCAL_SHELL, None, LOCAL_SHELL)
        name: str = required(self.name, f"{path}.name")
        flat = flat_name(name, namespace)
        if self.type == "custom":
            constraint = self.format.constraint(f"{path}.format") if self.format else None
            document = custom_function(flat, self.description, constraint)
            return CallableTool(document, path, "custom", constraint, name, namespace)
        check_depth(self.parameters, f"{path}.parameters")
        fields: Document = {"name": flat}
        for key in ("description", "parameters", "strict"):
            if (value := getattr(self, key)) is not None:
                fields[key] = value
        document = {"type": "function", "function": fields}
        return CallableTool(document, path, "function", None, name, namespace)


# Which fields a tool requires, for the OpenAPI document.
TOOL_FIELDS = any_of(
    ({"type": {"enum": ["function", "custom"]}}, ["type", "name"]),
    ({"type": {"const": "namespace"}}, ["type", "name", "tools"]),
    ({"type": {"enum": [LOCAL_SHELL, *get_args(HostedType)]}}, ["type"]),
)


class ToolDocuments(Struct):
    """Tools as they are stored with an item."""

    tools: list[Tool]


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function as the model sees it."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def flatten_tools(path: str, tools: Iterable[Tool]) -> dict[str, CallableTool]:
    """Return the tools that may be called, by their names for the model. `path`: the list's."""
    return by_name(entry for n, tool in enumerate(tools) for entry in tool.flatten(f"{path}[{n}]"))


def dropped_types(tools: Iterable[Tool]) -> list[str]:
    """Return the types of the tools that cannot be called here."""
    types = (tool.type for tool in tools if tool.type not in (*CALLABLE, "namespace"))
    return list(dict.fromkeys(types))


# ── choices ──


class ChosenTool(Struct, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class ChosenCustomTool(ChosenTool, tag="custom"): ...


class AllowedEntry(Struct):
    name: str
    type: Literal["function", "custom"] | None = "function"
    namespace: str | UnsetType | None = UNSET


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedEntry], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice: TypeAlias = Mode | ChosenTool | ChosenCustomTool | AllowedTools


def response_policy(
    tools: Mapping[str, CallableTool], choice: ToolChoice | None, parallel: bool | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, None if none may. InvalidInput for an impossible choice."""
    if choice == "required" and not tools:
        raise InvalidInput.at("tool_choice", "'required' requires tools")
    mode: Mode = "required"
    entries: Sequence[tuple[str, ChosenTool | AllowedEntry]] = ()
    if isinstance(choice, AllowedTools):
        mode = choice.mode
        entries = [(f"tool_choice.tools[{n}].name", tool) for n, tool in enumerate(choice.tools)]
    elif isinstance(choice, ChosenTool):
        parallel = False  # exactly one call
        entries = [("tool_choice.name", choice)]
    else:
        mode = choice or "auto"
    chosen = {path: flat_name(entry.name, entry.namespace or None) for path, entry in entries}
    return tool_policy(tools, mode, chosen, parallel)
