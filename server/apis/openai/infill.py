"""`POST /infill`: the text between a prefix and a suffix, as llama.cpp's server has it.

body → InfillRequest → GenerationInput with a suffix → deltas → InfillBuilder → content
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from server.apis.openai.endpoint import ParsedRequest, ResponseBuilder
from server.apis.openai.models import NamedModel
from server.apis.openai.request_fields import GenerationRequest
from server.core.delta_stream import UsageCounts
from server.http.operation import Operation
from server.http.sse import data_frame
from worker.messages.deltas import Delta
from worker.messages.generation import GenerationInput

# Fields of completions that have no place here.
NOT_HERE: dict[str, tuple[Any, ...]] = {
    "logprob_token_ids": ([],), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "stream_options": ({},),
    "truncate_prompt_tokens": (),
}  # fmt: skip
STOP_TYPES = {"length": "limit", "stop": "eos"}


class Extra(Struct):
    """A file beside the edited one."""

    text: str
    filename: str | None = None


class InfillRequest(GenerationRequest, kw_only=True):
    without_effect: ClassVar = GenerationRequest.without_effect | {"samplers"}
    unimplemented: ClassVar = {
        name: neutral
        for name, neutral in (GenerationRequest.unimplemented | NOT_HERE).items()
        if name not in ("n_predict", "samplers")
    }

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[Extra], Meta(max_length=256)] | None = None
    prompt: str | None = None  # follows the prefix
    n_predict: Annotated[int, Meta(ge=-1)] | None = None  # -1: as many as there is room for

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.n_predict is None:
            return super().token_limit
        return "n_predict", None if self.n_predict < 0 else max(1, self.n_predict)

    def generation_inputs(self, max_choices: int) -> list[GenerationInput]:
        extras = (f"{extra.filename or ''}\n{extra.text}\n" for extra in self.input_extra or ())
        before = "".join((*extras, self.input_prefix or "", self.prompt or ""))
        after: Any = {"suffix": self.input_suffix or "", "param": "input_prefix"}
        return [self._input(before, None, **after)]


class InfillEnd(Struct):
    """The text, or the last piece of it. Other pieces have `content` and `stop: false`."""

    content: str
    stop: bool
    model: str | None
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: str  # eos, limit or word
    stopping_word: str


INFILL = Operation(
    "POST /infill",
    "The text between a prefix and a suffix",
    InfillEnd,
    InfillRequest,
    stream="With stream: true. Each event is a chunk, the last has `stop`.",
)


class InfillBuilder(ResponseBuilder[Delta]):
    def __init__(self, request: ParsedRequest, usage: UsageCounts, model: NamedModel) -> None:
        self.streams, self._model = bool(request.body.stream), request.body.model
        self._usage = usage

    def add(self, delta: Delta) -> Iterator[bytes]:
        if delta.finish_reason is not None:
            yield data_frame(self._last(delta))
        elif delta.text:
            yield data_frame({"content": delta.text, "stop": False})

    def end(self) -> bytes:
        return b""

    def build(self, deltas: Sequence[Delta]) -> InfillEnd:
        return self._last(deltas[0])

    def _last(self, delta: Delta) -> InfillEnd:
        word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        kind = "word" if word else STOP_TYPES[delta.finish_reason or "stop"]
        usage = self._usage
        counts = usage.completion, usage.prompt, usage.cached
        return InfillEnd(delta.text, True, self._model, *counts, kind, word)
