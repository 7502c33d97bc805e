"""`POST /v1/chat/completions`: a conversation in, the next message out, whole or in chunks."""

from collections import Counter
from collections.abc import Iterator

from server.openai.chat_request import ChatRequest
from server.openai.generation import GenerationEndpoint
from server.openai.params import decode
from server.openai.reply import CallId, Document, Reply, finite
from worker.deltas import Delta, Part, TokenLogprob
from worker.protocol import Chat, GenerationInput


class ChatCompletions(GenerationEndpoint):
    def parse(self, body: bytes) -> Reply:
        request = decode(body, ChatRequest, self.engine.generator.max_model_len)
        model = self.models.require(request.model)
        return ChatReply(request, request.generation_input(), model, self.engine.call_id)


class ChatReply(Reply):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, payload: GenerationInput, model: str, call_id: CallId
    ) -> None:
        super().__init__(request, [payload], model)
        assert isinstance(payload.prompt, Chat)
        self.called: Counter[int] = Counter()  # calls so far, by choice
        self._called_before = payload.prompt.calls
        self._call_id = call_id

    def opening(self) -> Iterator[Document]:
        for index in range(self.payloads[0].n):
            yield _chunk_choice(index, {"role": "assistant"}, None, None)

    def choices(self, delta: Delta, logprobs: list[TokenLogprob]) -> Iterator[Document]:
        index = delta.choice
        for part in delta.parts:
            if part.kind == "call":
                for call in self._call(index, part):
                    yield _chunk_choice(index, {"tool_calls": [call]}, None, None)
            elif part.kind == "reasoning":
                yield _chunk_choice(index, {"reasoning_content": part.text}, None, None)
            else:
                yield _chunk_choice(index, {"content": part.text}, _logprobs(logprobs), None)
                logprobs = []
        if delta.finish_reason is not None:
            yield _chunk_choice(index, {}, _logprobs(logprobs), delta.finish_reason)
        elif logprobs:
            self.unsent.setdefault(index, []).extend(logprobs)

    def _call(self, choice: int, part: Part) -> Iterator[Document]:
        """A call's name comes whole and first, what follows are its arguments."""
        if part.name is not None:
            call = self._new_call(choice, part.name, "")
            yield {"index": self.called[choice] - 1} | call
        if part.text:
            function = {"arguments": part.text}
            yield {"index": self.called[choice] - 1, "function": function}

    def choice(self, delta: Delta) -> Document:
        wanted = self.payloads[0].sampling.logprobs is not None
        return {
            "index": delta.choice,
            "message": self._message(delta),
            "logprobs": {"content": _tokens(delta.logprobs), "refusal": None} if wanted else None,
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
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = delta.text or None
            message["tool_calls"] = calls
        return message

    def _new_call(self, choice: int, name: str, arguments: str) -> Document:
        id = self._call_id(name, self._called_before + self.called[choice])
        self.called[choice] += 1
        function = {"name": name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


def _chunk_choice(
    index: int, delta: Document, logprobs: Document | None, finish_reason: str | None
) -> Document:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(logprobs: list[TokenLogprob]) -> Document | None:
    return {"content": _tokens(logprobs), "refusal": None} if logprobs else None


def _tokens(logprobs: list[TokenLogprob]) -> list[Document]:
    return [_token(each) | {"top_logprobs": [_token(t) for t in each.top]} for each in logprobs]


def _token(each: TokenLogprob) -> Document:
    return {"token": each.text, "logprob": finite(each.logprob), "bytes": list(each.raw)}
