"""`POST /v1/chat/completions`: the next message of a conversation, whole or in chunks.

    body → ChatRequest → GenerationInput → deltas → ChatFormat → message, or chunks

endpoint.py submits the input and sends the response; choices.py has what completions share.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

from msgspec import UNSET, UnsetType
from starlette.types import Scope

from batching.errors import InvalidInput
from server.core.delta_stream import UsageCounts
from server.http.json import Document, parse_json
from server.http.operation import Operation
from server.openai.choices import ChoicesResponseBuilder, ChunkUsage, Head
from server.openai.custom_tools import CustomInputReader
from server.openai.endpoint import CHUNKS, GenerationEndpoint, ParsedRequest
from server.openai.logprobs import prompt_fields, scored_token_with_top
from server.openai.messages import Messages, conversation
from server.openai.request_fields import (
    CacheOptions,
    Count,
    Effort,
    GenerationRequest,
    PositiveInt,
    TopLogprobs,
    decode,
)
from server.openai.response_schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    CustomCallDelta,
    CustomCallText,
    FunctionCallDelta,
    FunctionCallText,
    MessageDelta,
    MessageToolCall,
    ResponseMessage,
    ToolCallDelta,
    Usage,
)
from server.openai.tools import ChatToolChoice, Tools, chat_tools
from worker.messages.deltas import Delta, DeltaPart, TokenLogprob
from worker.messages.generation import Chat, GenerationInput

# Fields of a `generation_config` → fields of a request.
CONFIG_FIELDS = {"min_new_tokens": "min_tokens"} | {
    name: name
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}

# Return the id of a tool call, from its function's name and its number in the conversation.
CallIdFactory: TypeAlias = Callable[[str, int], str]


class ChatRequest(GenerationRequest, kw_only=True):
    unimplemented: ClassVar = {
        "audio": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "store": (False,),
        "web_search_options": (),
    } | GenerationRequest.unimplemented

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    generation_config: str | None = None  # JSON; its fields stand in for absent ones
    max_new_tokens: PositiveInt | None = None  # a field of generation_config

    @property
    def default_tokens(self) -> int | None:
        return self.max_new_tokens

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit
        return "max_completion_tokens", self.max_completion_tokens

    def check(self, document: Document) -> None:
        super().check(document)
        self.refuse_unimplemented(document)
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidInput.at(name, "must be at least 1, not 0")
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput.at("top_logprobs", "requires logprobs: true")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidInput.at(
                "continue_final_message", "cannot be combined with add_generation_prompt"
            )

    def generation_input(self) -> GenerationInput:
        """Return the model's input; InvalidInput for unusable tools, messages or formats."""
        tools: list[Document] = []
        policy = None
        if self.tools or self.tool_choice:
            tools, policy = chat_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        prompt = conversation(self, self.messages, tools, self.reasoning_effort)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._input(
            prompt, logprobs, tool_policy=policy, thinking_tokens=self.thinking_token_budget
        )


@Operation(
    "POST /v1/chat/completions",
    "The next message of a conversation",
    ChatCompletion,
    ChatRequest,
    stream=CHUNKS,
)
class ChatCompletions(GenerationEndpoint[ParsedRequest]):
    def parse(self, body: bytes, scope: Scope) -> ParsedRequest:
        max_entries = self.models.max_entries
        try:
            document = with_generation_config(parse_json(body))
            request = decode(document, ChatRequest, self.models.id_for, max_entries)
        except InvalidInput as error:
            if error.param == "messages" and b'"input"' in body:
                hint = "is required; a request with `input` goes to /v1/responses"
                raise InvalidInput.at("messages", hint) from None
            raise
        return ParsedRequest(request, [request.generation_input()])

    def builder(
        self, request: ParsedRequest, usage: UsageCounts
    ) -> ChoicesResponseBuilder[ChatChoice, ChatChunkChoice]:
        chat_format = ChatFormat(request.inputs[0], self.model_of(request).call_id)
        return ChoicesResponseBuilder(request, usage, chat_format)


def with_generation_config(document: Document) -> Document:
    """Return a body with defaults from its `generation_config`, which `transformers chat` sends."""
    if not isinstance(text := document.get("generation_config"), str):
        return document
    try:
        config = parse_json(text.encode())
    except InvalidInput:
        raise InvalidInput.at("generation_config", "must be a JSON object, as text") from None
    if config.get("do_sample") is False:
        config["temperature"] = 0
    defaults = {field: config.get(name) for name, field in CONFIG_FIELDS.items()}
    return defaults | {name: value for name, value in document.items() if value is not None}


class ChatFormat:
    """The choices of a chat completion: messages, or deltas of messages."""

    id_prefix = "chatcmpl-"

    def __init__(self, generation_input: GenerationInput, call_id: CallIdFactory) -> None:
        assert isinstance(generation_input.prompt, Chat)
        self._choices = generation_input.n
        self._scored = generation_input.sampling.logprobs is not None
        self._call_id = call_id
        self._earlier_calls = (
            generation_input.prompt.num_tool_calls if generation_input.tool_policy else 0
        )
        self._calls: Counter[int] = Counter()  # by choice
        policy = generation_input.tool_policy
        self._custom_tools = policy.inputs if policy else {}
        # in the first delta: null, as its clients keep it, where calls are all there is
        self._first_content: str | UnsetType = UNSET if policy and policy.required else ""
        self._inputs: dict[int, CustomInputReader | None] = {}  # of the open call, by choice

    # ── whole ──

    def choice(self, delta: Delta) -> ChatChoice:
        logprobs = chat_logprobs(delta.logprobs) if self._scored else None
        return ChatChoice(
            delta.choice, self._message(delta), logprobs, delta.finish_reason, delta.stop_reason
        )

    def response(
        self, head: Head, choices: list[ChatChoice], usage: Usage, delta: Delta
    ) -> ChatCompletion:
        return ChatCompletion(
            **head,
            object="chat.completion",
            choices=choices,
            usage=usage,
            **prompt_fields(delta),
        )

    def _message(self, delta: Delta) -> ResponseMessage:
        message = ResponseMessage("assistant", delta.text, None)
        if reasoning := "".join(part.text for part in delta.parts if part.kind == "reasoning"):
            message.reasoning = message.reasoning_content = reasoning
        calls: list[MessageToolCall] = []
        for part in delta.parts:
            if part.kind == "call" and part.name is not None:
                id = self._new_call(delta.choice, part.name)
                call = MessageToolCall(id, "function", FunctionCallText(part.name, part.text))
                calls.append(call)
            elif part.kind == "call":
                assert calls[-1].function is not UNSET
                calls[-1].function.arguments += part.text
        for call in calls:
            function = call.function
            if function is not UNSET and function.name in self._custom_tools:
                text = CustomInputReader().read(function.arguments)
                call.type, call.function = "custom", UNSET
                call.custom = CustomCallText(function.name, text)
        if calls:
            message.content = delta.text or None
            message.tool_calls = calls
        return message

    # ── in chunks ──

    def first_chunks(
        self, head: Head, usage: ChunkUsage, delta: Delta | None
    ) -> Iterator[ChatCompletionChunk]:
        for index in range(self._choices):
            choice = ChatChunkChoice(
                index, MessageDelta(role="assistant", content=self._first_content)
            )
            yield ChatCompletionChunk(
                **head,
                object="chat.completion.chunk",
                choices=[choice],
                usage=usage,
                **(prompt_fields(delta) if delta and index == 0 else {}),
            )

    def chunk_choices(self, delta: Delta) -> Iterator[ChatChunkChoice]:
        for part in delta.parts:
            if part.kind == "call":
                for call in self._call_deltas(delta.choice, part):
                    yield ChatChunkChoice(delta.choice, MessageDelta(tool_calls=[call]))
            elif part.kind == "reasoning":
                message = MessageDelta(reasoning=part.text, reasoning_content=part.text)
                yield ChatChunkChoice(delta.choice, message)
            else:
                yield self._scored_choice(delta, MessageDelta(content=part.text))
        if delta.finish_reason is not None:
            for call in self._end_input(delta.choice):
                yield ChatChunkChoice(delta.choice, MessageDelta(tool_calls=[call]))
            last = self._scored_choice(delta, MessageDelta())
            last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
            yield last

    def chunk(self, head: Head, usage: ChunkUsage) -> ChatCompletionChunk:
        return ChatCompletionChunk(**head, object="chat.completion.chunk", choices=[], usage=usage)

    def _scored_choice(self, delta: Delta, message: MessageDelta) -> ChatChunkChoice:
        """Return a choice with the delta's log-probabilities, which the delta loses."""
        logprobs, delta.logprobs = delta.logprobs, []
        scores = chat_logprobs(logprobs) if logprobs else None
        return ChatChunkChoice(delta.choice, message, scores)

    def _call_deltas(self, choice: int, part: DeltaPart) -> Iterator[ToolCallDelta]:
        """Yield a call's id and name first, then its arguments or its input."""
        if part.name is not None:
            yield from self._end_input(choice)
            id, is_custom = self._new_call(choice, part.name), part.name in self._custom_tools
            self._inputs[choice] = CustomInputReader() if is_custom else None
            call = ToolCallDelta(self._calls[choice] - 1, id, "custom" if is_custom else "function")
            if is_custom:
                call.custom = CustomCallDelta(part.name, "")
            else:
                call.function = FunctionCallDelta(part.name, "")
            yield call
        if reader := self._inputs.get(choice):
            if text := reader.push(part.text):
                custom = CustomCallDelta(input=text)
                yield ToolCallDelta(self._calls[choice] - 1, custom=custom)
        elif part.text:
            function = FunctionCallDelta(arguments=part.text)
            yield ToolCallDelta(self._calls[choice] - 1, function=function)

    def _end_input(self, choice: int) -> Iterator[ToolCallDelta]:
        """Yield the rest of a custom tool's input."""
        if (reader := self._inputs.pop(choice, None)) and (text := reader.finish()):
            yield ToolCallDelta(self._calls[choice] - 1, custom=CustomCallDelta(input=text))

    def _new_call(self, choice: int, name: str) -> str:
        """Count a call; return its id."""
        id = self._call_id(name, self._earlier_calls + self._calls[choice])
        self._calls[choice] += 1
        return id


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(list(map(scored_token_with_top, logprobs)))
