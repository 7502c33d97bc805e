"""The request of `POST /v1/responses`, and its conversion to the model's input.

ResponseRequest, previous items --generation_input--> GenerationInput
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.apis.openai.endpoint import ParsedRequest
from server.apis.openai.messages import Message, to_template_messages
from server.apis.openai.request_fields import (
    NON_EMPTY,
    CacheOptions,
    Count,
    Documents,
    Effort,
    GenerationRequest,
    NonEmpty,
    PositiveInt,
    Template,
    TopLogprobs,
    convert,
)
from server.apis.openai.response_format import TextFormat
from server.apis.openai.response_tools import (
    TOOL_FIELDS,
    Tool,
    ToolChoice,
    ToolDocuments,
    dropped_types,
    flatten_tools,
    response_policy,
)
from server.apis.openai.responses.items import ITEM_FIELDS, Item, to_messages
from server.apis.openai.tools import MAX_TOOLS, CallableTool, TypedMode
from server.http.json import Document
from worker.messages.generation import Chat, GenerationInput

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# The others are of tools that are not run here, or are always included.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
]

# With OpenAI's limits: metadata is stored, and sent in most events.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Summary = Literal["auto", "concise", "detailed"]


class TextOptions(Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ConversationReference(Struct):
    id: Annotated[str, Meta(min_length=1)]


class ResponseRequest(GenerationRequest, kw_only=True):
    without_effect: ClassVar = GenerationRequest.without_effect - {"metadata"}
    replacements: ClassVar = GenerationRequest.replacements | {
        "max_tokens": "max_output_tokens",
        "n_predict": "max_output_tokens",
        "response_format": "text.format",
        "structural_tag": "text.format",
    }
    unimplemented: ClassVar = {
        "access_programs": (),
        "background_options": ({"completion_window": "soonest"},),
        "context_management": (),
        "image": ({"context_compression": "auto"},),
        "max_tokens": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
        "response_format": (),
        "return_token_ids": (False,),
        "reasoning.context": ("auto", "current_turn", "all_turns"),
        "reasoning.mode": ("standard",),
    } | GenerationRequest.unimplemented

    input: NonEmpty | Annotated[list[Annotated[Item, ITEM_FIELDS]], NON_EMPTY]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: NonEmpty | ConversationReference | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: PositiveInt | None = None
    max_tool_calls: PositiveInt | None = None  # of tools that the server runs: there are none
    tools: Annotated[list[Annotated[Tool, TOOL_FIELDS]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | TypedMode | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    thinking_token_budget: Count | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: str | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    @property
    def logprobs(self) -> int | None:
        """The number of likeliest tokens with log-probabilities; None: no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def conversation_id(self) -> str | None:
        reference = self.conversation
        return reference.id if isinstance(reference, ConversationReference) else reference

    @property
    def choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        return choice.mode if isinstance(choice, TypedMode) else choice

    @property
    def output_format(self) -> tuple[str, TextFormat | None]:
        return "text.format", self.text.format if self.text else None

    def check(self, document: Document) -> None:
        super().check(document)
        if self.top_logprobs and self.logprobs is None:
            raise InvalidInput.at("top_logprobs", f"requires {LOGPROBS} in include")
        if self.conversation and self.previous_response_id:
            reason = "cannot be combined with previous_response_id"
            raise InvalidInput.at("conversation", reason)
        if self.background and self.store is False:
            raise InvalidInput.at("background", "cannot be combined with store: false")

    def callable_tools(self, items: Sequence[Document]) -> "ToolSet":
        """Return the tools of the request and of items; later ones replace those of their names."""
        tools = self.tools or []
        found, dropped = flatten_tools("tools", tools), dropped_types(tools)
        for item in items:
            if item["type"] == "additional_tools":
                more = convert({"tools": item["tools"]}, ToolDocuments).tools
                found |= flatten_tools("input.tools", more)
                dropped += dropped_types(more)
        if len(found) > MAX_TOOLS:
            raise InvalidInput.at("tools", f"takes at most {MAX_TOOLS} tools, not {len(found)}")
        return ToolSet(found, list(dict.fromkeys(dropped)))

    def generation_input(
        self, previous: Sequence[Document], items: Sequence[Document], tools: "ToolSet"
    ) -> GenerationInput:
        """Return the model's input, from the conversation's previous items and the request's."""
        source = "conversation" if self.conversation else "previous_response_id"
        conversation = to_messages(previous, items, source)
        if not conversation:
            raise InvalidInput.at("input", "must have more than tools")
        if self.instructions is not None:
            conversation.insert(0, ("instructions", Message("system", self.instructions)))
        policy = response_policy(tools.callable, self.choice, self.parallel_tool_calls)
        messages, images = to_template_messages(conversation)
        prompt = Chat(
            messages,
            tuple(tool.document for tool in tools.callable.values()) if policy else (),
            self.chat_template_kwargs or {},
            effort=self.reasoning.effort if self.reasoning else None,
            media=images,
            documents=tuple(self.documents or ()),
            template=self.chat_template,
        )
        return self._input(
            prompt,
            self.logprobs,
            tool_policy=policy,
            thinking_tokens=self.thinking_token_budget,
            drops_oldest=self.truncation == "auto",
            param="input",
        )


class ToolSet(NamedTuple):
    """`callable`: by the names that the model sees. `dropped`: types of tools that are not."""

    callable: Mapping[str, CallableTool]
    dropped: Sequence[str]


@dataclass(frozen=True)
class ParsedResponseRequest(ParsedRequest):
    """`items` are the request's own, as they are stored, without those of earlier responses."""

    body: ResponseRequest
    items: list[Document]
    tools: ToolSet
