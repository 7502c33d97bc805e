"""`POST /v1/chat/completions`: a conversation in, the next message out, whole or in chunks."""

from collections.abc import Iterator

from server.chat_request import ChatRequest
from server.generation import GenerationEndpoint
from server.generation_request import decode
from server.reply import Document, Reply, finite
from worker.streams import Delta, TokenLogprob


class ChatCompletions(GenerationEndpoint):
    def parse(self, body: bytes) -> Reply:
        request = decode(body, ChatRequest)
        model = self.models.require(request.model)
        return ChatReply(request, [request.generation_input()], model)


class ChatReply(Reply):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[Document]:
        for index in range(self.payloads[0].n):
            yield _chunk_choice(index, {"role": "assistant"}, None, None)

    def choices(self, delta: Delta, logprobs: list[TokenLogprob]) -> Iterator[Document]:
        if delta.text:
            yield _chunk_choice(delta.choice, {"content": delta.text}, _logprobs(logprobs), None)
            logprobs = []
        if delta.finish_reason is not None:
            yield _chunk_choice(delta.choice, {}, _logprobs(logprobs), delta.finish_reason)

    def choice(self, delta: Delta) -> Document:
        wanted = self.payloads[0].sampling.logprobs is not None
        return {
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": {"content": _tokens(delta.logprobs), "refusal": None} if wanted else None,
            "finish_reason": delta.finish_reason,
        }


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
