"""`POST /v1/completions`: text or token ids in, what follows them out, whole or in chunks."""

from collections import Counter
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import Meta

from batching.errors import InvalidInput
from server.http.json import Document, parse_json
from server.openai.choices import ChoicesResponseBuilder
from server.openai.endpoint import GenerationEndpoint
from server.openai.logprobs import finite
from server.openai.request_fields import (
    Filled,
    GenerationRequest,
    TokenId,
    TopLogprobs,
    decode,
    read_inputs,
)
from worker.messages.deltas import Delta, TokenLogprob
from worker.messages.generation import GenerationInput

IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
OF_ONE_KIND = Meta(
    extra_json_schema={
        "minItems": 1,
        "anyOf": [IDS, {"items": IDS}, {"items": {"type": "string", "minLength": 1}}],
    }
)
ONE_ALONE = Meta(
    extra_json_schema={"description": "Not implemented: leave it out", "enum": [None, 1]}
)


class CompletionRequest(GenerationRequest, kw_only=True):
    unimplemented: ClassVar = {"suffix": ()} | GenerationRequest.unimplemented

    prompt: Filled | Annotated[list[str | TokenId | list[TokenId]], OF_ONE_KIND]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int | None, ONE_ALONE] = None

    @property
    def default_tokens(self) -> int:
        return 16

    def check(self, document: Document) -> None:
        super().check(document)
        # As many candidates as answers leaves nothing to choose from.
        if self.best_of not in (None, 1, self.n or 1):
            raise InvalidInput.at("best_of", "is not implemented here, leave it out")
        self.refuse_unimplemented(document)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidInput.at("max_tokens", "must be at least 1, or 0 with echo")
        scored = self.logprobs if self.echo else None
        if scored is not None and self.prompt_logprobs not in (None, scored):
            raise InvalidInput.at("prompt_logprobs", "must be as many as logprobs with echo")

    def generation_inputs(self, most: int) -> list[GenerationInput]:
        """One a prompt. A list makes at most `most` choices in all."""
        prompts, n = read_inputs(self.prompt, "prompt"), self.n or 1
        if len(prompts) > 1 and len(prompts) * n > most:
            many = f"{len(prompts)} times n={n} is more than {most} choices"
            raise InvalidInput.at("prompt", many)
        asked = self._input("", self.logprobs, echo=bool(self.echo))
        if self.max_tokens == 0:
            asked = replace(asked, constraint=None)  # no text is generated
        given = [each if isinstance(each, str) else tuple(each) for each in prompts.values()]
        return [
            replace(asked, prompt=each, first_choice=number * n, param=path)
            for number, (path, each) in enumerate(zip(prompts, given, strict=True))
        ]


class CompletionResponseBuilder(ChoicesResponseBuilder):
    id_prefix = "cmpl-"
    objects = ("text_completion", "text_completion")

    def __init__(self, request: CompletionRequest, most: int) -> None:
        super().__init__(request, request.generation_inputs(most))
        self._offsets: Counter[int] = Counter()  # characters a choice has so far

    def choice(self, delta: Delta) -> Document:
        offset, text = self._offsets[delta.choice], delta.text
        self._offsets[delta.choice] += len(text)
        return self.of_prompt(delta) | {
            "index": delta.choice,
            "text": text,
            "logprobs": _logprobs(delta.logprobs, offset) if self.scored else None,
            "finish_reason": delta.finish_reason,
        }


class Completions(GenerationEndpoint[CompletionResponseBuilder]):
    def parse(self, body: bytes) -> CompletionResponseBuilder:
        places = self.settings.max_queue_size
        most = max(places, self.worker_client.generator.max_model_len)  # prompts, or tokens of one
        request = decode(parse_json(body), CompletionRequest, self.models.called, most)
        return CompletionResponseBuilder(request, places)


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
