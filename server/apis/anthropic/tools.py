"""The tools of `/v1/messages`, and which of them may be called."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.response_format import check_depth
from server.apis.openai.tools import MAX_TOOLS, Mode, Name, tool_policy
from server.http.json import Document
from worker.messages.generation import ToolCallPolicy


class ClientTool(Struct):
    """A tool that the client runs."""

    name: Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"enum": ["custom", None]})] = None

    def to_template(self, path: str) -> Document:
        """Return the tool as chat templates read it."""
        if self.type not in (None, "custom"):
            reason = "must be custom: tools that Anthropic defines or runs are not implemented"
            raise InvalidInput.at(f"{path}.type", f"{reason}, such as {self.type[:50]!r}")
        if self.input_schema is None:
            raise InvalidInput.at(f"{path}.input_schema", "is required")
        check_depth(self.input_schema, f"{path}.input_schema")
        function: Document = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


ClientTools = Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)]


class CallChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def call_policy(tools: Sequence[ClientTool], choice: CallChoice | None) -> ToolCallPolicy | None:
    """Return which tools may be called, None if none may. InvalidInput for a choice that the tools
    do not allow."""
    choice = choice or CallChoice("auto")
    names = {f"tools[{n}].name": tool.name for n, tool in enumerate(tools)}
    if choice.type in ("any", "tool") and not tools:
        raise InvalidInput.at("tool_choice", f"{choice.type!r} requires tools")
    modes: dict[str, Mode] = {"any": "required", "tool": "required", "auto": "auto"}
    chosen: dict[str, str] = {}
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidInput.at("tool_choice.name", "is required")
        chosen = {"tool_choice.name": choice.name}
    parallel = choice.type != "tool" and not choice.disable_parallel_tool_use
    return tool_policy(names, modes.get(choice.type, "none"), chosen, parallel)
