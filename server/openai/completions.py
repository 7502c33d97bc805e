"""`POST /v1/completions`: text or token ids in, what follows them out, whole or in chunks."""

from collections.abc import Iterator

from server.openai.completion_request import CompletionRequest
from server.openai.generation import GenerationEndpoint
from server.openai.params import decode
from server.openai.reply import Document, Reply, finite
from worker.deltas import Delta, TokenLogprob
from worker.protocol import GenerationInput


class Completions(GenerationEndpoint):
    def parse(self, body: bytes) -> Reply:
        places = self.settings.max_queue_size
        most = max(places, self.engine.generator.max_model_len)  # prompts, or tokens of one
        request = decode(body, CompletionRequest, most)
        model = self.models.require(request.model)
        payloads = request.generation_inputs(places)
        return CompletionReply(request, payloads, model)


class CompletionReply(Reply):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, payloads: list[GenerationInput], model: str
    ) -> None:
        super().__init__(request, payloads, model)
        self._offsets: dict[int, int] = {}  # characters a choice has so far

    def opening(self) -> Iterator[Document]:
        return iter(())

    def choices(self, delta: Delta, logprobs: list[TokenLogprob]) -> Iterator[Document]:
        offset = self._offsets.get(delta.choice, 0)
        self._offsets[delta.choice] = offset + len(delta.text)
        yield self._choice(delta, logprobs, offset)

    def choice(self, delta: Delta) -> Document:
        return self._choice(delta, delta.logprobs, 0)

    def _choice(self, delta: Delta, logprobs: list[TokenLogprob], offset: int) -> Document:
        wanted = self.payloads[0].sampling.logprobs is not None
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": _logprobs(logprobs, offset) if wanted else None,
            "finish_reason": delta.finish_reason,
        }


def _logprobs(logprobs: list[TokenLogprob], offset: int) -> Document:
    """OpenAI's older form; offsets count characters of the choice's text."""
    offsets = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in logprobs],
        "token_logprobs": [finite(each.logprob) for each in logprobs],
        "top_logprobs": [_top(each) for each in logprobs],
        "text_offset": offsets,
    }


def _top(chosen: TokenLogprob) -> Document | None:
    """The likeliest tokens and the chosen one. Of two with the same text the likelier stays."""
    if chosen.logprob is None:
        return None
    top: Document = {}
    for each in (*chosen.top, chosen):
        text = chosen.text if each.token_id == chosen.token_id else each.text
        top.setdefault(text, finite(each.logprob))
    return top
