"""`POST /v1/completions`: the continuation of texts or token ids, whole or in chunks.

body → CompletionRequest → a GenerationInput per prompt → deltas → CompletionBuilder → choices
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import Meta

from batching.errors import InvalidInput
from server.apis.openai.choices import ChoicesBuilder
from server.apis.openai.endpoint import CHUNKS, ParsedRequest
from server.apis.openai.logprobs import clamp, prompt_fields, token_name
from server.apis.openai.models import NamedModel
from server.apis.openai.request_fields import (
    GenerationRequest,
    NonEmpty,
    RequestId,
    TextsOrIds,
    TopLogprobs,
    read_inputs,
)
from server.apis.openai.response_schemas import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from server.core.delta_stream import UsageCounts
from server.http.json import Document
from server.http.operation import Operation
from worker.messages.deltas import Delta, TokenLogprob
from worker.messages.generation import GenerationInput

IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
OF_ONE_KIND = Meta(
    extra_json_schema={
        "minItems": 1,
        "anyOf": [IDS, {"items": IDS}, {"items": {"type": "string", "minLength": 1}}],
    }
)
ONLY_ONE = Meta(
    extra_json_schema={"description": "Not implemented: leave it out", "enum": [None, 1]}
)


class CompletionRequest(GenerationRequest, kw_only=True):
    unimplemented: ClassVar = {
        "add_special_tokens": (True,),
        "chat_template": (),
        "documents": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    } | GenerationRequest.unimplemented

    prompt: NonEmpty | Annotated[TextsOrIds, OF_ONE_KIND]
    logprobs: TopLogprobs | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    request_id: RequestId | None = None
    best_of: Annotated[int | None, ONLY_ONE] = None

    @property
    def default_tokens(self) -> int | None:
        return None if self.max_tokens == -1 else 16

    def check(self, document: Document) -> None:
        super().check(document)
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None  # true as in vLLM
        # With as many candidates as choices, there is nothing to select.
        if self.best_of not in (None, 1, self.n or 1):
            raise InvalidInput.at("best_of", "is not implemented, leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidInput.at("max_tokens", "must be at least 1, or 0 with echo: true")
        if self.suffix and self.echo:
            raise InvalidInput.at("suffix", "cannot be combined with echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise InvalidInput.at("suffix", "cannot be combined with truncate_prompt_tokens")
        if self.echo and self.logprob_token_ids:
            raise InvalidInput.at("logprob_token_ids", "cannot be combined with echo")
        if self.suffix and not isinstance(self.prompt, str):
            raise InvalidInput.at("suffix", "requires a prompt that is one text")
        echoed_logprobs = self.logprobs if self.echo else None
        if echoed_logprobs is not None and self.prompt_logprobs not in (None, echoed_logprobs):
            raise InvalidInput.at(
                "prompt_logprobs",
                f"must equal logprobs ({echoed_logprobs}) with echo, not {self.prompt_logprobs}",
            )

    def generation_inputs(self, max_choices: int) -> list[GenerationInput]:
        prompts, n = read_inputs(self.prompt, "prompt"), self.n or 1
        if len(prompts) > 1 and len(prompts) * n > max_choices:
            raise InvalidInput.at(
                "prompt", f"{len(prompts)} prompts with n={n} exceed {max_choices} choices"
            )
        common = self._input("", self.logprobs, echo=bool(self.echo), suffix=self.suffix or None)
        if self.max_tokens == 0:
            common = replace(common, constraint=None)  # no text is generated
        return [
            replace(common, prompt=prompt, first_choice=number * n, param=path)
            for number, (path, prompt) in enumerate(prompts.items())
        ]


COMPLETIONS = Operation(
    "POST /v1/completions",
    "The continuation of a text or token ids",
    Completion,
    CompletionRequest,
    stream=CHUNKS,
)


class CompletionBuilder(ChoicesBuilder[CompletionChoice, CompletionChoice]):
    id_prefix, chunk_object = "cmpl-", "text_completion"

    def __init__(self, request: ParsedRequest, usage: UsageCounts, model: NamedModel) -> None:
        super().__init__(request, usage, model)
        self._offsets: Counter[int] = Counter()  # characters of a choice so far

    def choice(self, delta: Delta) -> CompletionChoice:
        offset, text = self._offsets[delta.choice], delta.text
        self._offsets[delta.choice] += len(text)
        logprobs, delta.logprobs = delta.logprobs, []
        return CompletionChoice(
            **prompt_fields(delta),
            index=delta.choice,
            text=text,
            logprobs=completion_logprobs(logprobs, offset, self.names_ids) if self.scored else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def response(self, choices: list[CompletionChoice], usage: Usage, delta: Delta) -> Completion:
        return Completion(**self.head, object="text_completion", choices=choices, usage=usage)

    def chunk_choices(self, delta: Delta) -> Iterator[CompletionChoice]:
        yield self.choice(delta)


def completion_logprobs(
    logprobs: list[TokenLogprob], offset: int, names_ids: bool
) -> CompletionLogprobs:
    """Return OpenAI's older form; `offset` is the first token's, in characters of the text."""
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        [token_name(token, names_ids) for token in logprobs],
        [clamp(token.logprob) for token in logprobs],
        [top_logprobs(token, names_ids) for token in logprobs],
        offsets,
    )


def top_logprobs(chosen: TokenLogprob, names_ids: bool) -> dict[str, float | None] | None:
    """Return the likeliest tokens and the chosen one, by text; of equal texts the likelier."""
    if chosen.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for token in (*chosen.top, chosen):
        shown = chosen if token.token_id == chosen.token_id else token
        top.setdefault(token_name(shown, names_ids), clamp(token.logprob))
    return top
