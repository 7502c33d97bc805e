"""`POST /v1/chat/completions`: a conversation in, the next message out, whole or in chunks."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from batching.errors import InvalidInput
from server.http.json import Document, parse_json
from server.http.sse import data_frame
from server.openai.choices import ChoicesResponseBuilder
from server.openai.endpoint import GenerationEndpoint
from server.openai.logprobs import logprob_document
from server.openai.messages import Messages, conversation
from server.openai.request_fields import (
    CacheOptions,
    Count,
    Effort,
    GenerationRequest,
    TopLogprobs,
    decode,
)
from server.openai.tools import ChatToolChoice, Tools, chat_calls
from worker.messages.deltas import Delta, DeltaPart, TokenLogprob
from worker.messages.generation import Chat, GenerationInput

# What `transformers chat` says of an answer, in transformers' words → ours.
OF_CONFIG = {"min_new_tokens": "min_tokens"} | {
    name: name
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}

CallId = Callable[[str, int], str]  # for a call of this function, its conversation's n-th


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
    tools: Annotated[Tools, Meta(min_length=1)] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    generation_config: str | None = None  # JSON, for fields of ours that are missing
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None  # of it

    @property
    def default_tokens(self) -> int | None:
        return self.max_new_tokens

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    def check(self, document: Document) -> None:
        super().check(document)
        self.refuse_unimplemented(document)
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidInput.at(name, "must be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput.at("top_logprobs", "goes with logprobs: true only")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidInput.at("continue_final_message", "excludes add_generation_prompt")

    def generation_input(self) -> GenerationInput:
        """InvalidInput for tools, messages and a format that cannot be served."""
        calls = None
        if self.tools is not None or self.tool_choice is not None:
            calls = chat_calls(self.tools, self.tool_choice, self.parallel_tool_calls)
        offered = self.tools if calls else None  # not what may not be called
        prompt = conversation(self, self.messages, offered, self.reasoning_effort)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._input(
            prompt, logprobs, tool_calls=calls, thinking_tokens=self.thinking_token_budget
        )


class ChatResponseBuilder(ChoicesResponseBuilder):
    id_prefix = "chatcmpl-"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, request: ChatRequest, call_id: CallId) -> None:
        payload = request.generation_input()
        super().__init__(request, [payload])
        assert isinstance(payload.prompt, Chat)
        self.called: Counter[int] = Counter()  # calls so far, by choice
        self._called_before = payload.prompt.num_tool_calls if payload.tool_calls else 0
        self._call_id = call_id

    def begin(self, first: Sequence[Delta]) -> Iterator[bytes]:
        for index in range(self.payloads[0].n):
            prompt = self.of_prompt(first[0]) if first and index == 0 else {}
            yield data_frame(self.chunk(_choice(index, {"role": "assistant"})) | prompt)

    def choices(self, delta: Delta) -> Iterator[Document]:
        index, logprobs = delta.choice, delta.logprobs
        for part in delta.parts:
            if part.kind == "call":
                for call in self._call(index, part):
                    yield _choice(index, {"tool_calls": [call]})
            elif part.kind == "reasoning":
                yield _choice(index, _thoughts(part.text))
            else:
                yield _choice(index, {"content": part.text}, logprobs)
                logprobs = []
        if delta.finish_reason is not None:
            yield _choice(index, {}, logprobs, delta.finish_reason)
        elif logprobs:
            self.held[index] = Delta(index, logprobs=logprobs)

    def whole(self, deltas: Sequence[Delta]) -> Document:
        return super().whole(deltas) | self.of_prompt(deltas[0])

    def _call(self, choice: int, part: DeltaPart) -> Iterator[Document]:
        """A call's name comes whole and first, what follows are its arguments."""
        if part.name is not None:
            call = self._new_call(choice, part.name, "")
            yield {"index": self.called[choice] - 1} | call
        if part.text:
            function = {"arguments": part.text}
            yield {"index": self.called[choice] - 1, "function": function}

    def choice(self, delta: Delta) -> Document:
        return {
            "index": delta.choice,
            "message": self._message(delta),
            "logprobs": _logprobs(delta.logprobs) if self.scored else None,
            "finish_reason": delta.finish_reason,
        }

    def _message(self, delta: Delta) -> Document:
        reasoning = "".join(part.text for part in delta.parts if part.kind == "reasoning")
        calls: list[Document] = []
        for part in delta.parts:
            if part.kind == "call" and part.name is not None:
                calls.append(self._new_call(delta.choice, part.name, part.text))
            elif part.kind == "call":
                calls[-1]["function"]["arguments"] += part.text
        message: Document = {"role": "assistant", "content": delta.text, "refusal": None}
        if reasoning:
            message |= _thoughts(reasoning)
        if calls:
            message["content"] = delta.text or None
            message["tool_calls"] = calls
        return message

    def _new_call(self, choice: int, name: str, arguments: str) -> Document:
        id = self._call_id(name, self._called_before + self.called[choice])
        self.called[choice] += 1
        function = {"name": name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


class ChatCompletions(GenerationEndpoint[ChatResponseBuilder]):
    def parse(self, body: bytes) -> ChatResponseBuilder:
        most = self.worker_client.generator.max_model_len
        try:
            document = with_config(parse_json(body))
            request = decode(document, ChatRequest, self.models.called, most)
        except InvalidInput as error:
            if error.param == "messages" and b'"input"' in body:
                meant = "is required; a request with `input` goes to /v1/responses"
                raise InvalidInput.at("messages", meant) from None
            raise
        return ChatResponseBuilder(request, self.worker_client.generator.call_id)


def with_config(document: Document) -> Document:
    """A body with what only its `generation_config` says."""
    if not isinstance(given := document.get("generation_config"), str):
        return document
    try:
        config = parse_json(given.encode())
    except InvalidInput:
        raise InvalidInput.at("generation_config", "must be a JSON object, as text") from None
    if config.get("do_sample") is False:
        config["temperature"] = 0
    told = {ours: config.get(theirs) for theirs, ours in OF_CONFIG.items()}
    return told | {name: value for name, value in document.items() if value is not None}


def _thoughts(text: str) -> Document:
    """By both of the names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _choice(
    index: int,
    delta: Document,
    logprobs: Sequence[TokenLogprob] = (),
    finish_reason: str | None = None,
) -> Document:
    return {
        "index": index,
        "delta": delta,
        "logprobs": _logprobs(logprobs) if logprobs else None,
        "finish_reason": finish_reason,
    }


def _logprobs(logprobs: Sequence[TokenLogprob]) -> Document:
    return {"content": list(map(logprob_document, logprobs)), "refusal": None}
