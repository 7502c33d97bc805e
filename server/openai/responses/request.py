"""The body of `POST /v1/responses`, checked, as a GenerationInput."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from batching.errors import InvalidInput
from server.openai.chat_request import Effort
from server.openai.messages import FILLED, Message
from server.openai.params import (
    Count,
    Filled,
    GenerationRequest,
    TopLogprobs,
    refuse_unimplemented,
)
from server.openai.responses.items import FULL_ITEM, Item, messages
from server.openai.responses.store import Document
from server.openai.responses.tools import Tool, ToolChoice, calls, check_depth, check_tools
from server.openai.structured import ANY_OBJECT, FORMATS, json_constraint
from server.openai.tools import MOST_TOOLS
from worker.protocol import Chat, Constraint, GenerationInput

LOGPROBS = "message.output_text.logprobs"
# What an answer may include; the second is an empty promise, since nothing is encrypted here.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")

# Parameters of the API that nothing is done with, and the values that ask for nothing.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "response_format": (),
    "truncation": ("disabled",),
}
UNIMPLEMENTED_REASONING: dict[str, tuple[Any, ...]] = {
    "context": ("auto",),
    "mode": ("standard",),
}

# As OpenAI bounds it: it is kept, and told in each event.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Summary = Literal["auto", "concise", "detailed"]


class Format(Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": FORMATS})]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def constraint(self) -> Constraint | None:
        if self.type not in FORMATS:
            known = f"must be one of {', '.join(FORMATS)}, not {self.type[:50]!r}"
            raise InvalidInput(f"text.format.type: {known}", "text.format.type")
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_constraint(ANY_OBJECT, "text.format")
        if self.name is None:
            raise InvalidInput("text.format.name: is required", "text.format.name")
        check_depth(self.schema, "text.format.schema")
        return json_constraint(self.schema, "text.format.schema")

    def document(self) -> Document:
        if self.type != "json_schema":
            return {"type": self.type}
        described: Document = msgspec.to_builtins(self)
        return described


class TextOptions(Struct):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Any = None
    mode: Any = None


class ResponseRequest(GenerationRequest, kw_only=True):
    input: Filled | Annotated[list[Annotated[Item, FULL_ITEM]], FILLED]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Annotated[str, Meta(extra_json_schema={"enum": INCLUDABLE})]] | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Count | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    access_programs: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    truncation: Any = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def most_tokens_param(self) -> str:
        return "max_output_tokens"

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """Of how many likely tokens; None: not even of the chosen one."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def format(self) -> Format:
        return (self.text and self.text.format) or Format("text")

    def constraint(self) -> Constraint | None:
        wanted, structured = self.format.constraint(), super().constraint()
        if wanted and structured:
            both = "structured_outputs: excludes text.format"
            raise InvalidInput(both, "structured_outputs")
        return wanted or structured

    def check(self) -> None:
        refuse_unimplemented(self, UNIMPLEMENTED)
        super().check()
        for name, harmless in UNIMPLEMENTED_REASONING.items():
            if getattr(self.reasoning, name, None) not in (None, *harmless):
                param = f"reasoning.{name}"
                raise InvalidInput(f"{param}: is not implemented here, leave it out", param)
        for n, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                known = f"must be one of {', '.join(INCLUDABLE)}, not {name[:50]!r}"
                raise InvalidInput(f"include[{n}]: {known}", f"include[{n}]")
        if self.top_logprobs and self.logprobs is None:
            alone = f"top_logprobs: goes with {LOGPROBS} in include only"
            raise InvalidInput(alone, "top_logprobs")
        if self.background:
            if not self.stored:
                raise InvalidInput("background: excludes store: false", "background")
            if self.stream:
                raise InvalidInput("stream: is not implemented with background: true", "stream")
        check_tools(self.tools or ())

    def generation_input(
        self, before: Sequence[Document], items: Sequence[Document]
    ) -> GenerationInput:
        """Of a checked request, what came before in its conversation, and its own items."""
        conversation = messages(before, items)
        if self.instructions is not None:
            conversation.insert(0, Message("system", self.instructions))
        tools = self.tools or ()
        offered = calls(tools, self.tool_choice, self.parallel_tool_calls)
        return GenerationInput(
            prompt=Chat(
                tuple(message.rendered("input") for message in conversation),
                tuple(tool.nested() for tool in tools if offered),
                self.chat_template_kwargs or {},
                effort=self.reasoning.effort if self.reasoning else None,
                effort_param="reasoning.effort",
            ),
            sampling=self.sampling(self.logprobs),
            stopping=self.stopping(),
            constraint=self.constraint(),
            calls=offered,
            thinking_tokens=self.thinking_token_budget,
            param="input",
            background=bool(self.background),
        )
