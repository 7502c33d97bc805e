"""Numbered choices, in chunks or together: what answers of chat and text completions share."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import orjson

from server.http.errors import HttpError
from server.http.json import Document
from server.http.sse import data_frame
from server.openai.endpoint import GenerationResponseBuilder
from server.openai.logprobs import prompt_document
from server.openai.request_fields import GenerationRequest
from worker.messages.deltas import Delta, DeltaPart
from worker.messages.generation import GenerationInput

TEXT = secrets.token_hex()  # where a chunk's text goes, in a template; nothing else is like it


class ChoicesResponseBuilder(GenerationResponseBuilder):
    id_prefix: str
    objects: tuple[str, str]  # what the document is called, and a chunk

    def __init__(self, request: GenerationRequest, payloads: list[GenerationInput]) -> None:
        super().__init__(payloads, bool(request.stream))
        options = request.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.head: Document = {
            "id": self.id_prefix + secrets.token_hex(12),
            "object": self.objects[self.streams],
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": None,
        }
        self.scored = payloads[0].sampling.logprobs is not None
        self.tells_ids = payloads[0].token_ids
        self.held: dict[int, Delta] = {}  # by choice: what goes with text that is still to come
        # Whether chunks of text differ in nothing else; what is around the text, by choice.
        self._alike = not (self.scored or self.tells_ids or self.continuous_usage)
        self._around: dict[int, Sequence[bytes]] = {}

    @abstractmethod
    def choice(self, delta: Delta) -> Document:
        """A choice as a whole, or what a delta adds to it."""

    def choices(self, delta: Delta) -> Iterator[Document]:
        """Choices, one a chunk, that say what a delta adds."""
        yield self.choice(delta)

    def of_prompt(self, delta: Delta) -> Document:
        """What was asked for about a prompt's tokens, of the first delta; as vLLM has it."""
        fields: Document = {}
        if delta.prompt_ids:
            fields["prompt_token_ids"] = delta.prompt_ids
        if delta.prompt_logprobs:
            fields["prompt_logprobs"] = list(map(prompt_document, delta.prompt_logprobs))
        return fields

    def add(self, delta: Delta) -> Iterator[bytes]:
        """None as long as there is no text to show; what goes with it waits."""
        if (held := self.held.pop(delta.choice, None)) is not None:
            held.merge(delta)
            delta = held
        ends, parts = delta.finish_reason is not None, delta.parts
        if self._alike and len(parts) == 1 and parts[0].kind == "content" and not ends:
            before, after = self._around.get(delta.choice) or self._text_chunk(delta.choice)
            yield before + orjson.dumps(parts[0].text) + after
        elif parts or ends:
            ids = delta.token_ids
            for choice in self.choices(delta):
                if self.tells_ids:
                    choice["token_ids"], ids = ids, []
                yield data_frame(self.chunk(choice))
        else:
            self.held[delta.choice] = delta

    def _text_chunk(self, choice: int) -> Sequence[bytes]:
        """What is before and after the text in each of a choice's chunks."""
        [made] = self.choices(Delta(choice, [DeltaPart("content", TEXT)]))
        around = data_frame(self.chunk(made)).split(orjson.dumps(TEXT))
        self._around[choice] = around
        return around

    def finish(self) -> Iterator[bytes]:
        if self.includes_usage:
            yield data_frame(self.head | {"choices": [], "usage": self._usage()})

    def fail(self, error: HttpError) -> Iterator[bytes]:
        yield data_frame(error.document)

    def whole(self, deltas: Sequence[Delta]) -> Document:
        choices = [self.choice(delta) for delta in deltas]
        if self.tells_ids:
            for choice, delta in zip(choices, deltas, strict=True):
                choice["token_ids"] = delta.token_ids
        return self.head | {"choices": choices, "usage": self._usage()}

    def chunk(self, choice: Document) -> Document:
        chunk = self.head | {"choices": [choice]}
        if self.includes_usage:
            chunk["usage"] = self._usage() if self.continuous_usage else None
        return chunk

    def _usage(self) -> Document:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }
