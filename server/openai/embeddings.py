"""`POST /v1/embeddings`, and `/embed` as text-embeddings-inference has it.

    body → checked inputs → pieces of a few, a work item each → their JSON, end to end

Texts or token ids; `inputs` in the place of `input` asks for the bare list of vectors that
text-embeddings-inference and Hugging Face's client know. What needs the model (prompts, sizes,
lengths) is checked in a pool (worker/embedding).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import orjson
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.engine import Engine
from server.http.json import Parsing
from server.http.request import read_json_request, send_parts
from server.openai.models import ModelNames
from server.openai.params import Salt, TokenId, decode
from server.openai.request import rooted
from server.settings import Settings
from server.submission import Submission
from worker.scoring import PIECE, Embedded, EmbeddingInput, PieceSize, Truncation, pieces

PATHS = ("/v1/embeddings", "/embed")
MOST_INPUTS = 2048
T = TypeVar("T")
Inputs = Annotated[
    list[str | TokenId | list[TokenId]],
    Meta(extra_json_schema={"minItems": 1, "maxItems": MOST_INPUTS}),
]


class EmbeddingRequest(Struct, kw_only=True):
    input: str | Inputs | None = None
    inputs: str | Inputs | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    cache_salt: Salt | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it is text-embeddings-inference's."""
        return self.inputs is not None

    def pieces(self, most: PieceSize) -> list[EmbeddingInput]:
        """What is asked for, in pieces."""
        if (self.input is None) == (self.inputs is None):
            required = "is required" if self.input is None else "takes either this or inputs"
            raise InvalidInput.at("input", required)
        param = "inputs" if self.is_bare else "input"
        given = self.inputs if self.input is None else self.input
        inputs, is_list = as_list(given, param)
        form = "bare" if self.is_bare else self.encoding_format or "float"
        options: dict[str, Any] = {
            "prompt": self.prompt_name,
            "role": self.input_type,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "truncation": self._truncation(),
            "form": form,
            "param": param,
        }
        parts = pieces(inputs, [len(each) for each in inputs], most)
        return [
            EmbeddingInput(part, first if is_list else None, **options) for first, part in parts
        ]

    def _truncation(self) -> Truncation:
        tokens = self.truncate_prompt_tokens
        if tokens == 0:
            raise InvalidInput.at("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
        cuts = bool(self.truncate) or (tokens is not None and self.truncate is not False)
        kept = tokens if tokens and tokens > 0 else None
        return Truncation(cuts, kept, (self.truncation_direction or "").lower() == "left")


def as_list(given: Any, param: str) -> tuple[list[Any], bool]:
    """Texts or lists of token ids, and whether there was a list of them; a list of ids is one."""
    if isinstance(given, str):
        return [given], False
    if not given:
        raise InvalidInput.at(param, "must not be empty")
    kind = type(given[0])
    for n, each in enumerate(given):
        if type(each) is not kind:
            mixed = "must be a text or token ids like those before it"
            raise InvalidInput.at(f"{param}[{n}]", mixed)
        if isinstance(each, (str, list)) and not each:
            raise InvalidInput.at(f"{param}[{n}]", "must not be empty")
    if kind is int:
        return [given], False
    if len(given) > MOST_INPUTS:
        many = f"takes at most {MOST_INPUTS} inputs, not {len(given)}"
        raise InvalidInput.at(param, many)
    return given, True


@dataclass(eq=False)
class Embeddings:
    """A bare ASGI app."""

    settings: Settings
    engine: Engine
    models: ModelNames
    parsing: Parsing = field(init=False, default_factory=Parsing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, deadlines = await read_json_request(scope, receive, "embedding")
        request, payloads = await self.parsing.run(self.parse, body, deadlines.first)
        payloads = rooted(payloads, scope, self.models.id, request.cache_salt)
        with Submission(self.engine, "embedding", payloads, deadlines, receive) as work:
            answers: list[Embedded] = await work.answers()
        parts = [part for each in answers for part in (b",", each.content)][1:]
        if request.is_bare:
            parts = [b"[", *parts, b"]"]
        else:
            tokens = sum(each.tokens for each in answers)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            tail = b'],"model":%b,"usage":%b}' % (orjson.dumps(request.model), orjson.dumps(usage))
            parts = [b'{"object":"list","data":[', *parts, tail]
        await send_parts(send, parts, work.timing_headers())

    def parse(self, body: bytes) -> tuple[EmbeddingRequest, list[EmbeddingInput]]:
        request = decode(body, EmbeddingRequest, self.models.names.of)
        return request, in_pieces(request.pieces, self.settings)


def in_pieces(make: Callable[[PieceSize], list[T]], settings: Settings) -> list[T]:
    """Of a size that a batch has room for; InvalidInput for more than the queue could ever take."""
    made = make(PieceSize(min(PIECE, settings.max_batch_size), settings.max_batch_tokens))
    if len(made) > settings.max_queue_size:
        places = f"{len(made)} places; the queue has {settings.max_queue_size}"
        raise InvalidInput(f"these inputs are too many or too long together: they need {places}")
    return made
