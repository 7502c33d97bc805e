"""`POST /v1/chat/completions`: the next message of a conversation, whole or in chunks.

body → ChatRequest → GenerationInput → deltas → ChatBuilder → message, or chunks
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta
from starlette.types import Scope

from batching.errors import InvalidInput
from server.apis.openai.choices import ChoicesBuilder
from server.apis.openai.custom_tools import CustomInputReader
from server.apis.openai.endpoint import CHUNKS, GenerationEndpoint, ParsedRequest
from server.apis.openai.logprobs import prompt_fields, scored_token_with_top
from server.apis.openai.messages import Messages, conversation
from server.apis.openai.models import NamedModel
from server.apis.openai.request_fields import (
    ONE,
    CacheOptions,
    Count,
    Documents,
    Effort,
    GenerationRequest,
    RequestId,
    Template,
    TopLogprobs,
)
from server.apis.openai.response_schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionTokensDetails,
    CustomCallText,
    FunctionCallText,
    MessageToolCall,
    ResponseMessage,
    Usage,
)
from server.apis.openai.tools import ChatToolChoice, Tools, chat_tools
from server.core.delta_stream import UsageCounts
from server.http.json import Document
from server.http.operation import Operation
from server.http.sse import data_frame
from worker.messages.deltas import Delta, DeltaPart, TokenLogprob
from worker.messages.generation import Chat, GenerationInput


class ChatRequest(GenerationRequest, kw_only=True):
    without_effect: ClassVar = GenerationRequest.without_effect | {
        "prediction",
        "store",
        "verbosity",
    }
    unimplemented: ClassVar = {
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": ONE,
        "function_call": ("none", "auto"),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
        "web_search_options": (),
    } | GenerationRequest.unimplemented

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    documents: Documents | None = None
    echo: bool | None = None  # of the last message, if it is the assistant's
    request_id: RequestId | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit
        return "max_completion_tokens", self.max_completion_tokens

    def check(self, document: Document) -> None:
        super().check(document)
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidInput.at(name, "must be at least 1, not 0")
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput.at("top_logprobs", "requires logprobs: true")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidInput.at(
                "continue_final_message", "cannot be combined with add_generation_prompt"
            )

    def generation_inputs(self, max_choices: int) -> list[GenerationInput]:
        tools: list[Document] = []
        policy = None
        if self.tools or self.tool_choice:
            tools, policy = chat_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        prompt = conversation(
            self, self.messages, tools, self.reasoning_effort, self.documents, self.chat_template
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        budget = self.thinking_token_budget
        return [self._input(prompt, logprobs, tool_policy=policy, thinking_tokens=budget)]


CHAT = Operation(
    "POST /v1/chat/completions",
    "The next message of a conversation",
    ChatCompletion,
    ChatRequest,
    stream=CHUNKS,
)


class ChatEndpoint(GenerationEndpoint[ParsedRequest]):
    def parse(self, body: bytes, scope: Scope) -> ParsedRequest:
        try:
            return super().parse(body, scope)
        except InvalidInput as error:
            if error.param == "messages" and b'"input"' in body:
                hint = "is required; a request with `input` goes to /v1/responses"
                raise InvalidInput.at("messages", hint) from None
            raise


class ChatBuilder(ChoicesBuilder[ChatChoice, ChatChunkChoice]):
    id_prefix, chunk_object = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, request: ParsedRequest, usage: UsageCounts, model: NamedModel) -> None:
        super().__init__(request, usage, model)
        [generation_input] = request.inputs
        assert isinstance(generation_input.prompt, Chat)
        self._choices = generation_input.n
        self._call_id = model.call_id
        policy = generation_input.tool_policy
        self._earlier_calls = generation_input.prompt.num_tool_calls if policy else 0
        self._calls: Counter[int] = Counter()  # by choice
        last, echoes = generation_input.prompt.messages[-1], getattr(request.body, "echo", None)
        content = last.get("content") if echoes and last["role"] == "assistant" else None
        self._echoed = content if isinstance(content, str) else ""
        self._custom_tools = policy.inputs if policy else {}
        # in the first delta: null, as its clients keep it, where calls are all there is
        self._first_delta = {"role": "assistant"}
        if not (policy and policy.required):
            self._first_delta["content"] = ""
        self._inputs: dict[int, CustomInputReader | None] = {}  # of the open call, by choice

    # ── whole ──

    def choice(self, delta: Delta) -> ChatChoice:
        logprobs = chat_logprobs(delta.logprobs, self.names_ids) if self.scored else None
        return ChatChoice(
            delta.choice, self._message(delta), logprobs, delta.finish_reason, delta.stop_reason
        )

    def response(self, choices: list[ChatChoice], usage: Usage, delta: Delta) -> ChatCompletion:
        return ChatCompletion(
            **self.head,
            object="chat.completion",
            choices=choices,
            usage=usage,
            **prompt_fields(delta),
        )

    def _message(self, delta: Delta) -> ResponseMessage:
        message = ResponseMessage("assistant", self._echoed + delta.text, None)
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
            message.content = self._echoed + delta.text or None
            message.tool_calls = calls
        return message

    # ── in chunks ──

    def start(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        usage = self._chunk_usage()
        if isinstance(usage, Usage):  # before the first token
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
            usage.completion_tokens_details = CompletionTokensDetails(0)
        for index in range(self._choices):
            chunk = self.chunk([ChatChunkChoice(index, self._first_delta)], usage)
            if deltas and self.returns_ids and index == 0:
                chunk.prompt_token_ids = deltas[0].prompt_ids or UNSET
            yield data_frame(chunk)
            if self._echoed:
                yield data_frame(
                    self.chunk([ChatChunkChoice(index, {"content": self._echoed})], usage)
                )

    def chunk_choices(self, delta: Delta) -> Iterator[ChatChunkChoice]:
        for part in delta.parts:
            if part.kind == "call":
                for call in self._call_deltas(delta.choice, part):
                    yield ChatChunkChoice(delta.choice, {"tool_calls": [call]})
            elif part.kind == "reasoning":
                message = {"reasoning": part.text, "reasoning_content": part.text}
                yield ChatChunkChoice(delta.choice, message)
            else:
                yield self._scored_choice(delta, {"content": part.text})
        if delta.finish_reason is not None:
            for call in self._end_input(delta.choice):
                yield ChatChunkChoice(delta.choice, {"tool_calls": [call]})
            last = self._scored_choice(delta, {})
            last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
            yield last

    def _scored_choice(self, delta: Delta, message: Document) -> ChatChunkChoice:
        """Return a choice with the delta's log-probabilities, which the delta loses."""
        logprobs, delta.logprobs = delta.logprobs, []
        scores = chat_logprobs(logprobs, self.names_ids) if logprobs else None
        return ChatChunkChoice(delta.choice, message, scores)

    def _call_deltas(self, choice: int, part: DeltaPart) -> Iterator[Document]:
        """Yield a call's id and name first, then its arguments or its input."""
        if part.name is not None:
            yield from self._end_input(choice)
            id, is_custom = self._new_call(choice, part.name), part.name in self._custom_tools
            self._inputs[choice] = CustomInputReader() if is_custom else None
            kind, text_field = ("custom", "input") if is_custom else ("function", "arguments")
            function = {"name": part.name, text_field: ""}
            yield {"index": self._calls[choice] - 1, "id": id, "type": kind, kind: function}
        if reader := self._inputs.get(choice):
            if text := reader.push(part.text):
                yield {"index": self._calls[choice] - 1, "custom": {"input": text}}
        elif part.text:
            yield {"index": self._calls[choice] - 1, "function": {"arguments": part.text}}

    def _end_input(self, choice: int) -> Iterator[Document]:
        """Yield the rest of a custom tool's input."""
        if (reader := self._inputs.pop(choice, None)) and (text := reader.finish()):
            yield {"index": self._calls[choice] - 1, "custom": {"input": text}}

    def _new_call(self, choice: int, name: str) -> str:
        """Count a call; return its id."""
        id = self._call_id(name, self._earlier_calls + self._calls[choice])
        self._calls[choice] += 1
        return id


def chat_logprobs(logprobs: Sequence[TokenLogprob], names_ids: bool) -> ChatLogprobs:
    return ChatLogprobs([scored_token_with_top(token, names_ids) for token in logprobs])
