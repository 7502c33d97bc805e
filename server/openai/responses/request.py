"""The body of `POST /v1/responses`, checked, as a GenerationInput."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.messages import Message, read_messages
from server.openai.request_fields import (
    FILLED,
    CacheOptions,
    Count,
    Effort,
    Filled,
    GenerationRequest,
    TopLogprobs,
)
from server.openai.response_format import Format
from server.openai.responses.items import FULL_ITEM, Item, messages
from server.openai.tools import MOST_TOOLS, Tool, ToolChoice, flat_calls
from worker.messages.generation import Chat, GenerationInput

LOGPROBS = "message.output_text.logprobs"
# What an answer may include; the second is an empty promise, since nothing is encrypted here.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

# As OpenAI bounds it: it is stored, and sent in most events.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Summary = Literal["auto", "concise", "detailed"]


class TextOptions(Struct):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseRequest(GenerationRequest, kw_only=True):
    unimplemented: ClassVar = {
        "access_programs": (),
        "background_options": ({"completion_window": "soonest"},),
        "context_management": (),
        "conversation": (),
        "image": ({"context_compression": "auto"},),
        "max_tokens": (),
        "max_tool_calls": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "response_format": (),
        "return_token_ids": (False,),
        "truncation": ("disabled",),
        "reasoning.context": ("auto",),
        "reasoning.mode": ("standard",),
    } | GenerationRequest.unimplemented

    input: Filled | Annotated[list[Annotated[Item, FULL_ITEM]], FILLED]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Count | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    @property
    def logprobs(self) -> int | None:
        """Of how many likely tokens; None: not even of the chosen one."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def format(self) -> tuple[str, Format | None]:
        return "text.format", self.text.format if self.text else None

    def check(self, document: Document) -> None:
        self.refuse_unimplemented(document)
        super().check(document)
        if self.top_logprobs and self.logprobs is None:
            raise InvalidInput.at("top_logprobs", f"goes with {LOGPROBS} in include only")
        if self.background and self.store is False:
            raise InvalidInput.at("background", "excludes store: false")
        if self.background and self.stream:
            raise InvalidInput.at("stream", "is not implemented with background: true")

    def generation_input(
        self, before: Sequence[Document], items: Sequence[Document]
    ) -> GenerationInput:
        """Of a checked request, what came before in its conversation, and its items."""
        conversation = messages(before, items)
        if self.instructions is not None:
            conversation.insert(0, ("instructions", Message("system", self.instructions)))
        tools = self.tools or ()
        calls = flat_calls(tools, self.tool_choice, self.parallel_tool_calls)
        rendered, pictures = read_messages(conversation)
        prompt = Chat(
            rendered,
            tuple(tool.nested() for tool in tools if calls),
            self.chat_template_kwargs or {},
            effort=self.reasoning.effort if self.reasoning else None,
            images=pictures,
        )
        return self._input(
            prompt,
            self.logprobs,
            tool_calls=calls,
            thinking_tokens=self.thinking_token_budget,
            param="input",
            background=bool(self.background),
        )
