"""The requests of `POST /v1/messages` and `/v1/messages/count_tokens`.

    MessagesRequest --generation_input--> GenerationInput, as of a chat completion

blocks.py converts the messages. What the API has for its own operation (`metadata`, `service_tier`,
`cache_control`, `context_management`) is accepted without effect.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.anthropic.blocks import (
    AssistantMessage,
    InputMessages,
    System,
    to_template_messages,
)
from server.apis.openai.request_fields import Effort, GenerationRequest, PositiveInt, Stops
from server.apis.openai.response_format import RequestedFormat, check_depth
from server.apis.openai.tools import MAX_TOOLS, CallableTool, Mode, Name, by_name, tool_policy
from server.http.errors import THREAD
from server.http.json import Document
from worker.messages.generation import Chat, GenerationInput, ToolCallPolicy

OPENAI_FIELDS: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "stop": (),
    "stream_options": (),
}
ThinkingType = Literal["enabled", "disabled", "adaptive", "between_tools"]


class ThinkingOptions(Struct):
    type: ThinkingType
    budget_tokens: PositiveInt | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]

    def find_schema(self) -> tuple[str, Document]:
        return ".schema", self.schema


class OutputConfig(Struct):
    effort: Effort | None = None
    format: JsonOutputFormat | None = None


class ClientTool(Struct):
    """A tool that the client runs."""

    name: Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"enum": ["custom", None]})] = None

    def callable(self, path: str) -> CallableTool:
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
        return CallableTool({"type": "function", "function": function}, path)


ClientTools = Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)]


class CallChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def call_policy(
    tools: Mapping[str, CallableTool], choice: CallChoice | None
) -> ToolCallPolicy | None:
    """Return which tools may be called, None if none may. InvalidInput for an impossible choice."""
    choice = choice or CallChoice("auto")
    if choice.type in ("any", "tool") and not tools:
        raise InvalidInput.at("tool_choice", f"{choice.type!r} requires tools")
    modes: dict[str, Mode] = {"any": "required", "tool": "required", "auto": "auto"}
    chosen: dict[str, str] = {}
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidInput.at("tool_choice.name", "is required")
        chosen = {"tool_choice.name": choice.name}
    parallel = choice.type != "tool" and not choice.disable_parallel_tool_use
    return tool_policy(tools, modes.get(choice.type, "none"), chosen, parallel)


class CountTokensRequest(GenerationRequest, kw_only=True):
    without_effect: ClassVar = GenerationRequest.without_effect | {"cache_control"}
    replacements: ClassVar = GenerationRequest.replacements | {
        "max_completion_tokens": "max_tokens",
        "output_format": "output_config.format",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "structural_tag": "output_config.format",
    }
    unimplemented: ClassVar = (
        {
            "chat_template": (),
            "container": (),
            "mcp_servers": ([],),
            "output_format": (),
            THREAD: (),
        }
        | OPENAI_FIELDS
        | GenerationRequest.unimplemented
    )

    messages: InputMessages
    system: System | None = None
    tools: ClientTools | None = None
    tool_choice: CallChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Stops | None = None

    @property
    def default_tokens(self) -> int | None:
        """`max_tokens` is an upper limit: a shorter context ends the output before."""
        return self.max_tokens

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", None

    @property
    def output_format(self) -> tuple[str, RequestedFormat | None]:
        return "output_config.format", self.output_config.format if self.output_config else None

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def check(self, document: Document) -> None:
        super().check(document)
        thinking = self.thinking
        if thinking and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise InvalidInput.at("thinking.budget_tokens", "is required")

    def generation_inputs(self, max_choices: int) -> list[GenerationInput]:
        tools = by_name(tool.callable(f"tools[{n}]") for n, tool in enumerate(self.tools or ()))
        policy = call_policy(tools, self.tool_choice)
        messages, images = to_template_messages(self.system, self.messages)
        thinking, effort = self._reasoning()
        is_prefilled = isinstance(self.messages[-1], AssistantMessage)
        path, last = f"messages[{len(self.messages) - 1}].content", messages[-1]
        if is_prefilled and last.get("tool_calls"):
            raise InvalidInput.at(path, "tool_use must be followed by a message with its result")
        if is_prefilled and last.get("reasoning_content") and not last["content"]:
            raise InvalidInput.at(path, "thinking must be followed by text, or by a message")
        prompt = Chat(
            messages,
            tuple(tool.document for tool in tools.values()) if policy else (),
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
            effort=effort,
            media=images,
        )
        self.stop = self.stop_sequences
        options: Any = {"thinking_tokens": thinking, "thinking_is_optional": True}
        return [self._input(prompt, None, tool_policy=policy, **options)]

    def _reasoning(self) -> tuple[int | None, str]:
        """Return the limit of the reasoning, and its effort."""
        if self.thinking is None or self.thinking.type == "disabled":
            return None, "none"
        effort = self.output_config.effort if self.output_config else None
        return self.thinking.budget_tokens, effort or "medium"


class MessagesRequest(CountTokensRequest, kw_only=True):
    # Claude Code sends thinking back to a model of the same name only.
    keeps_model_name: ClassVar = True

    max_tokens: PositiveInt
