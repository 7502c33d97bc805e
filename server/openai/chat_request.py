"""The body of `POST /v1/chat/completions`, checked, as a GenerationInput."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from batching.errors import InvalidInput
from server.openai.messages import FILLED, Message, Messages
from server.openai.params import (
    Count,
    GenerationRequest,
    TopLogprobs,
    refuse_unimplemented,
)
from server.openai.tools import TOOL_CHOICE, Tools, calls_of
from worker.protocol import Chat, GenerationInput

# Parameters of the API that nothing is done with, and the values that ask for nothing.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "store": (False,),
    "web_search_options": (),
}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[Tools, FILLED] | None = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    store: Any = None
    web_search_options: Any = None

    @property
    def most_tokens(self) -> int | None:
        both = self.max_completion_tokens, self.max_tokens
        return next((limit for limit in both if limit is not None), None)

    @property
    def most_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self) -> None:
        super().check()
        refuse_unimplemented(self, UNIMPLEMENTED)
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidInput(f"{name}: must be at least 1", name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs: goes with logprobs: true only", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            both = "continue_final_message: excludes add_generation_prompt"
            raise InvalidInput(both, "continue_final_message")

    def generation_input(self) -> GenerationInput:
        """Checks, then one input."""
        self.check()
        calls = calls_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return GenerationInput(
            prompt=chat(
                self.messages,
                self.tools if calls else None,  # what may not be called is not offered
                self.chat_template_kwargs,
                self.add_generation_prompt,
                bool(self.continue_final_message),
                self.reasoning_effort,
            ),
            sampling=self.sampling(logprobs),
            stopping=self.stopping(),
            n=self.n or 1,
            constraint=self.constraint(),
            calls=calls,
            thinking_tokens=self.thinking_token_budget,
        )


def chat(
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    effort: str | None = None,
) -> Chat:
    if not messages:
        raise InvalidInput("messages: must not be empty", "messages")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return Chat(
        tuple(each.rendered(f"messages[{n}]") for n, each in enumerate(messages)),
        tuple(tools or ()),
        template_kwargs or {},
        add_generation_prompt,
        continue_final_message,
        effort,
    )
