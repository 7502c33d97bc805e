"""What requests for generated text have in common: typed fields, their ranges, their defaults.

    JSON → `decode` → a struct → Sampling, Stopping and Constraint

Field names are OpenAI's, and vLLM's beyond those. null counts as absent; unknown fields are
ignored; a parameter of the API that is not implemented is refused by name unless it has its
documented default. What needs the model (token ids, lengths) is checked in `Generator.prepare`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from batching.errors import InvalidInput
from server.http.json import Document
from server.openai.response_format import Format, ResponseFormat, StructuredOutputs, constraint_of
from worker.messages.generation import Chat, GenerationInput, Sampling, Stopping

MOST_STOPS = 16
MOST_IDS = 1024  # tokens of the vocabulary that are treated in a way of their own
_PATH = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Filled = Annotated[str, Meta(min_length=1)]
Stops = Annotated[list[Filled], Meta(max_length=MOST_STOPS)]
Biases = Annotated[
    dict[str, Bias],
    Meta(max_length=MOST_IDS, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
FILLED = Meta(min_length=1)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheOptions = dict[Literal["mode", "ttl"], Literal["implicit", "30m"]]  # the API's defaults


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    # Parameters of the API that nothing is done with, and the values that ask for nothing.
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        "structured_outputs.whitespace_pattern": (),
        "structured_outputs.structural_tag": (),
    }

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: Filled | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    cache_salt: Salt | None = None

    @property
    def default_tokens(self) -> int | None:
        """An answer's most if none is given and there is room; None: what the context holds."""
        return None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds the tokens of an answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def format(self) -> tuple[str, ResponseFormat | Format | None]:
        """The field that asks for a form of the answer, and its value."""
        return "response_format", self.response_format

    def check(self, document: Document) -> None:
        """Raise InvalidInput for what no field's type says; `document` is the body."""
        if self.stream_options is not None and not self.stream:
            raise InvalidInput.at("stream_options", "goes with stream: true only")
        if self.prompt_logprobs is not None and (self.stream or (self.n or 1) > 1):
            raise InvalidInput.at("prompt_logprobs", "goes with n: 1 and without stream only")
        most = self.default_tokens if self.limit[1] is None else self.limit[1]
        if self.min_tokens and most is not None and self.min_tokens > most:
            more = f"{self.min_tokens} is more than max_tokens, {most}"
            raise InvalidInput.at("min_tokens", more)

    def refuse_unimplemented(self, document: Document) -> None:
        for path, harmless in self.unimplemented.items():
            value: Any = document
            for key in path.split("."):
                value = None if value is None else value.get(key)
            # False is not 0
            if value is not None and (type(value), value) not in [(type(x), x) for x in harmless]:
                raise InvalidInput.at(path, "is not implemented here, leave it out")

    def _input(
        self, prompt: Chat | str | tuple[int, ...], logprobs: int | None, **fields: Any
    ) -> GenerationInput:
        """What a request asks the model for; `fields` are the input's others."""
        sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_biases(self.logit_bias),
            seed=self.seed,
            logprobs=logprobs,
        )
        param, max_tokens = self.limit
        stopping = Stopping(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            default_tokens=self.default_tokens,
            param=param,
        )
        path, format = self.format
        constraint = None
        if format is not None or self.structured_outputs is not None:
            constraint = constraint_of(path, format, self.structured_outputs)
        return GenerationInput(
            prompt,
            sampling,
            stopping,
            self.n or 1,
            constraint=constraint,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
            cache_salt=self.cache_salt or "",
            **fields,
        )


class Body(Protocol):
    """A struct of the fields of a request to the model of a name."""

    __struct_fields__: ClassVar[tuple[str, ...]]
    model: str | None


B = TypeVar("B", bound=Body)
T = TypeVar("T")


def decode(
    document: Document, kind: type[B], name: Callable[[str | None], str], most: int | None = None
) -> B:
    """A checked request; InvalidInput names the first field that does not fit. `name` says what its
    `model` is called here.

    `most` entries its lists may have, and the lists in those: what is to become tokens is not
    looked at one by one if it cannot fit into the context."""
    if most is not None:
        for path, length in _lengths(document, kind.__struct_fields__):
            if length > most:
                raise InvalidInput.at(path, f"takes at most {most} entries, not {length}")
    request = convert(document, kind)
    request.model = name(request.model)
    if isinstance(request, GenerationRequest):
        request.check(document)
    return request


def convert(document: Document, kind: type[T], strict: bool = True) -> T:
    """A struct; unless `strict`, of fields that are all text, as a form has them."""
    try:
        return msgspec.convert(document, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), kind)
        raise InvalidInput.at(param, message) from None


def required(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidInput.at(path, "is required")
    return value


def read_inputs(given: Any, param: str) -> dict[str, str | list[int]]:
    """Each input by what errors call it: `param` for a single one. A list of ids is one."""
    if not given:
        raise InvalidInput.at(param, "must not be empty")
    kind = str if isinstance(given, str) else type(given[0])
    for n, each in enumerate(given if isinstance(given, list) else ()):
        if type(each) is not kind:
            raise InvalidInput.at(f"{param}[{n}]", "a list is of one kind: texts or token ids")
        if isinstance(each, (str, list)) and not each:
            raise InvalidInput.at(f"{param}[{n}]", "must not be empty")
    if isinstance(given, str) or kind is int:
        return {param: given}
    return {f"{param}[{n}]": each for n, each in enumerate(given)}


def _lengths(document: Document, fields: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The lists among the fields, by their paths, each before those in its entries."""
    for name in fields:
        if not isinstance(found := document.get(name), list):
            continue
        yield name, len(found)
        for n, entry in enumerate(found):
            if isinstance(entry, list):
                yield f"{name}[{n}]", len(entry)
            elif isinstance(entry, dict):
                for key, value in entry.items():
                    if isinstance(value, list):
                        yield f"{name}[{n}].{key}", len(value)


def _explain(error: str, kind: Any) -> tuple[str, str]:
    """msgspec's words and path in ours: ("expected int, got str", "stop[1]")."""
    match = _PATH.fullmatch(error)
    assert match is not None
    reason, path = match[1], (match[2] or "").removeprefix(".").removesuffix("[...]")
    if missing := _MISSING.fullmatch(reason):
        return "is required", f"{path}.{missing[1]}" if path else missing[1]
    if reason.endswith("of length >= 1"):
        return "must not be empty", path
    if value := _UNKNOWN.fullmatch(reason):
        known = _values(type_info(kind), re.findall(r"\w+", path))
        return f"must be {' or '.join(known)}, not {value[1][:50]!r}", path
    reason = reason.replace(" | null", "").replace("`", "")
    return reason[:1].lower() + reason[1:], path


type_info = cache(inspect.type_info)


def _values(node: Any, steps: list[str]) -> list[str]:
    """What a field may be, as its Literals say: the path of a type leads there."""
    match node:
        case inspect.LiteralType() if not steps:
            return list(map(str, node.values))
        case inspect.Metadata():
            return _values(node.type, steps)
        case inspect.UnionType():
            return [found for each in node.types for found in _values(each, steps)]
        case inspect.ListType() if steps and steps[0].isdigit():
            return _values(node.item_type, steps[1:])
        case inspect.DictType() if steps:
            return _values(node.value_type, steps[1:])
        case inspect.StructType() if steps:
            of_name = [each.type for each in node.fields if each.encode_name == steps[0]]
            return [found for each in of_name for found in _values(each, steps[1:])]
    return []


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    for key in given or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidInput.at("logit_bias", f"{key[:50]!r} is not a token id")
    return {int(key): value for key, value in (given or {}).items()}
