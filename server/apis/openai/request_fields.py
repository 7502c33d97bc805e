"""The fields that generation requests share: types, ranges, defaults, and their decoding.

    JSON → `decode` → a struct → Sampling, Stopping and Constraint

Field names are OpenAI's, and vLLM's beyond those. null counts as absent. A struct's fields are
obeyed. Beside them it names those that have no effect, whatever their value, and those that are
refused unless their value changes nothing; ignored_fields.py names the rest to the client. Token
ids and lengths are checked by the model's `prepare`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from threading import Lock
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect
from starlette.types import Scope

from batching.errors import InvalidInput
from server.apis.openai.media import MediaDecoding, MediaLimits, with_options
from server.apis.openai.response_format import (
    RequestedFormat,
    ResponseFormat,
    StructuredOutputs,
    output_constraint,
)
from server.http.ignored_fields import ignore_fields
from server.http.json import EMPTY, Document, parse_json
from worker.messages.generation import Chat, Constraint, GenerationInput, Sampling, Stopping

MAX_STOPS = 16
MAX_IDS = 1024  # token ids in logit_bias, stop_token_ids or allowed_token_ids
MAX_CONFIG_CHARS = 1 << 15
_PATH = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0)]
# Tuples: garbage collection visits each element of a list, as long as the request waits.
TextsOrIds = tuple[str | TokenId | tuple[TokenId, ...], ...]
Count = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_FLOAT_INT = 1 << 53  # below it a float is the number that was written
NON_EMPTY = Meta(min_length=1)
NonEmpty = Annotated[str, NON_EMPTY]
Stops = Annotated[list[NonEmpty], Meta(max_length=MAX_STOPS)]
Biases = Annotated[
    dict[str, Bias],
    Meta(max_length=MAX_IDS, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
NgramSize = Annotated[int, Meta(ge=0, le=128)]
Template = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=1024)]
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CacheOptions(Struct):
    """Hints without effect: every prompt is cached, as long as there is memory."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class ExtraArgs(Struct):
    """vLLM's place for the parameters of plugins."""

    no_repeat_ngram_size: NgramSize | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# Names of one value in the APIs of other servers → fields of `structured_outputs`.
CONSTRAINT_FIELDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "json_schema": "json", "regex": "regex", "ebnf": "grammar",
    "grammar": "grammar",
}  # fmt: skip
ZERO, ONE = (0, 0.0), (1, 1.0)


def config_fields() -> frozenset[str]:
    """Return the fields of a `generation_config`; the worker checks those with an effect."""
    from worker.model.generation_config import FIELDS  # has been imported with the model

    return FIELDS


class GenerationRequest(Struct, kw_only=True):
    # Fields of the APIs that change nothing here, whatever their value.
    without_effect: ClassVar[frozenset[str]] = frozenset({
        "cache_prompt", "id_slot", "metadata", "n_cache_reuse", "n_keep", "prompt_cache_key",
        "safety_identifier", "service_tier", "spaces_between_special_tokens", "user",
    })  # fmt: skip
    # What to use instead of a field that is refused.
    replacements: ClassVar[dict[str, str]] = {
        "guided_json_object": "structured_outputs.json_object",
        "n_predict": "max_tokens",
        "n_probs": "top_logprobs in chats and responses, or logprobs in completions",
        "structural_tag": "response_format",
        "custom_logit_processor": "logit_bias",
        "logits_processors": "logit_bias",
    }
    # Fields of the APIs that are refused, and the values that change nothing.
    unimplemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        "structured_outputs.whitespace_pattern": (),
        "structured_outputs.structural_tag": (),
        "custom_logit_processor": (),
        "custom_params": (),
        "dry_multiplier": ZERO,
        "dynatemp_range": ZERO,
        "eta_cutoff": ZERO,
        "epsilon_cutoff": ZERO,
        "guided_json_object": (False,),
        "length_penalty": ONE,
        "logits_processors": (),
        "mirostat": ZERO,
        "n_predict": (),
        "n_probs": ZERO,
        "num_beams": ONE,
        "samplers": (),
        "stop_regex": (),
        "structural_tag": (),
        "tfs_z": ONE,
        "typical_p": ONE,
        "use_beam_search": (False,),
        "xtc_probability": ZERO,
    }

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: no limit, as in llama.cpp
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None  # llama.cpp's name of it
    logit_bias: Biases | None = None
    seed: Seed | None = None
    bad_words: Annotated[list[Word], Meta(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_IDS)] | None = (
        None
    )
    no_repeat_ngram_size: NgramSize | None = None
    vllm_xargs: ExtraArgs | None = None
    generation_config: str | None = None  # JSON; its fields stand in for absent ones
    stop: str | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    mm_processor_kwargs: MediaLimits | None = None
    media_io_kwargs: MediaDecoding | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None

    @property
    def default_tokens(self) -> int | None:
        """The limit of output tokens where the request has none; None: the rest of the context."""
        return None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the output tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def output_format(self) -> tuple[str, RequestedFormat | None]:
        """The field with the format of the output, and its value."""
        return "response_format", self.response_format

    def check(self, document: Document) -> None:
        """Raise InvalidInput for errors beyond the fields' types; `document` is the body."""
        if self.stream_options is not None and not self.stream:
            raise InvalidInput.at("stream_options", "requires stream: true")
        if self.prompt_logprobs is not None and (self.stream or (self.n or 1) > 1):
            raise InvalidInput.at("prompt_logprobs", "requires n: 1 and stream: false")
        if self.truncate_prompt_tokens == 0:
            raise InvalidInput.at("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
        name, max_tokens = self.token_limit
        if max_tokens is None:
            max_tokens = self.default_tokens
        if self.min_tokens and max_tokens not in (None, -1) and self.min_tokens > max_tokens:
            raise InvalidInput.at("min_tokens", f"{self.min_tokens} exceeds {name}, {max_tokens}")

    def generation_inputs(self, max_choices: int) -> list[GenerationInput]:
        """Return an input for each prompt. InvalidInput for unusable fields, and for a list that
        makes too many choices."""
        raise NotImplementedError

    def config(self) -> Document:
        """Return the fields of the `generation_config`. Raises InvalidInput."""
        if self.generation_config is None:
            return {}
        if len(self.generation_config) > MAX_CONFIG_CHARS:
            reason = f"takes at most {MAX_CONFIG_CHARS} characters"
            raise InvalidInput.at("generation_config", reason)
        try:
            return parse_json(self.generation_config.encode())
        except InvalidInput:
            raise InvalidInput.at("generation_config", "must be a JSON object, as text") from None

    def _constraint(self) -> Constraint | None:
        """Return the constraint on the output, None for free text."""
        (path, output_format), structured = self.output_format, self.structured_outputs
        fields = ((name, getattr(self, name)) for name in CONSTRAINT_FIELDS)
        given = {name: value for name, value in fields if value not in (None, "", [])}
        if given:
            [(name, value), *others] = given.items()
            alone = StructuredOutputs(**{CONSTRAINT_FIELDS[name]: value})
            if others or structured not in (None, alone):  # guidance sends a grammar twice
                other = others[0][0] if others else "structured_outputs"
                raise InvalidInput.at(name, f"cannot be combined with {other}")
            return output_constraint(path, output_format, alone, name)
        if not (output_format or structured):
            return None
        return output_constraint(path, output_format, structured)

    def _input(
        self, prompt: Chat | str | tuple[int, ...], logprobs: int | None, **fields: Any
    ) -> GenerationInput:
        """Return the model's input; `fields` are those that this class does not set."""
        if self.logprob_token_ids and logprobs is None:
            raise InvalidInput.at("logprob_token_ids", "requires log-probabilities")
        config = {name: value for name, value in self.config().items() if name in config_fields()}
        size = self.no_repeat_ngram_size
        if size is None and self.vllm_xargs:
            size = self.vllm_xargs.no_repeat_ngram_size
        if size is not None:
            config["no_repeat_ngram_size"] = size
        limits = config.get("max_new_tokens"), config.get("max_length")
        if isinstance(prompt, Chat) and prompt.media:
            options = self.mm_processor_kwargs, self.media_io_kwargs
            prompt = with_options(prompt, *options)
        sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repeat_penalty
            if self.repetition_penalty is None
            else self.repetition_penalty,
            logit_bias=_biases(self.logit_bias),
            seed=self.seed,
            logprobs=logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
        )
        param, max_tokens = self.token_limit
        stopping = Stopping(
            max_tokens=None if max_tokens == -1 else max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(
                filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ())
            ),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            includes_stop=bool(self.include_stop_str_in_output),
            default_tokens=self.default_tokens if limits == (None, None) else None,
            param=param,
        )
        return GenerationInput(
            prompt,
            sampling,
            stopping,
            self.n or 1,
            constraint=self._constraint(),
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
            truncate=self.truncate_prompt_tokens,
            config=config,
            skips_special=self.skip_special_tokens is not False,
            **fields,
        )


def _biases(biases: dict[str, float] | None) -> dict[int, float]:
    for key in biases or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidInput.at("logit_bias", f"{key[:50]!r} is not a token id")
    return {int(key): bias for key, bias in (biases or {}).items()}


# ── decoding ──


_prepared: set[type] = set()  # types that msgspec has inspected
_preparing = Lock()


T = TypeVar("T")


def decode(
    document: Document,
    kind: type[T],
    id_for: Callable[[str | None], str],
    scope: Scope,
    max_entries: int | None = None,
) -> T:
    """Return a checked request, with the id of its model by `id_for`.

    InvalidInput names the first field that is wrong. Lists of more than `max_entries`, and lists
    within them, are refused before their entries are converted."""
    limit_lists(document, kind, max_entries)
    request = convert_body(document, kind, scope)
    body: Any = request  # with a model, in each kind
    id = id_for(body.model)
    body.model = (body.model if getattr(kind, "keeps_model_name", False) else None) or id
    if isinstance(request, GenerationRequest):
        request.check(document)
        template = getattr(request, "chat_template", None)
        if template and not scope["app"].settings.trust_request_chat_template:
            reason = "is refused: its text is code, and TRUST_REQUEST_CHAT_TEMPLATE is off"
            raise InvalidInput.at("chat_template", reason)
        unknown = (name for name in request.config() if name not in config_fields())
        ignore_fields((f"generation_config.{name}" for name in unknown), scope)
    return request


def refuse_unimplemented(document: Document, kind: Any) -> None:
    """Raise InvalidInput for a parameter that is not implemented, unless it is empty."""
    replacements: Document = getattr(kind, "replacements", {})
    for path, accepted in getattr(kind, "unimplemented", {}).items():
        value: Any = document
        for key in path.split("."):
            value = None if value is None else value.get(key)
        if value in EMPTY:
            continue
        # Types are compared as well: False == 0.
        if (type(value), value) not in [(type(x), x) for x in accepted]:
            use = f"use {replacements[path]}" if path in replacements else "leave it out"
            raise InvalidInput.at(path, f"is not implemented, {use}")


def limit_lists(document: Document, kind: Any, max_entries: int | None) -> None:
    """Raise InvalidInput if a list of a request, or one within it, has more entries."""
    if max_entries is not None:
        for path, length in _list_lengths(document, kind.__struct_fields__):
            if length > max_entries:
                raise InvalidInput.at(path, f"takes at most {max_entries} entries, not {length}")


def convert_body(document: Document, kind: type[T], scope: Scope, strict: bool = True) -> T:
    """Return a struct. Fields with a value, and no part in it, are ignored or refused."""
    request = convert(document | _whole_numbers(document), kind, strict)
    refuse_unimplemented(document, kind)
    known = known_fields(kind)  # type: ignore[arg-type]  # a class has a hash
    ignore_fields((n for n, v in document.items() if v is not None and n not in known), scope)
    for name, parts in _known_parts(kind).items():  # type: ignore[arg-type]
        if isinstance(part := document.get(name), dict):
            unknown = (n for n, v in part.items() if v is not None and n not in parts)
            ignore_fields((f"{name}.{part}" for part in unknown), scope)
    return request


@cache
def _known_parts(kind: Any) -> dict[str, set[str]]:
    """Return the names that are known within each field that is an object."""
    found: dict[str, set[str]] = {}
    for field in type_info(kind).fields:  # type: ignore[attr-defined]
        types = getattr(field.type, "types", (field.type,))
        types = [type_ for type_ in types if not isinstance(type_, inspect.NoneType)]
        if all(isinstance(type_, inspect.StructType) for type_ in types):
            parts = {part.encode_name for type_ in types for part in type_.fields}
            found[field.encode_name] = parts | {type_.tag_field for type_ in types}
    for path in getattr(kind, "unimplemented", ()):
        name, dot, part = path.partition(".")
        if dot:
            found[name].add(part)
    return found


@cache
def known_fields(kind: Any) -> frozenset[str]:
    """Return the names of fields that are obeyed, have no effect, or are refused."""
    names: set[str] = {field.encode_name for field in msgspec.structs.fields(kind)}
    for part in ("without_effect", "unimplemented"):
        names |= {path for path in getattr(kind, part, ()) if "." not in path}
    return frozenset(names)


def _whole_numbers(document: Document) -> dict[str, int]:
    """Return the fields that are written as 5.0 for 5, as some JSON libraries do, such as Gson."""
    return {
        name: int(value)
        for name, value in document.items()
        if isinstance(value, float) and abs(value) < MAX_FLOAT_INT and value.is_integer()
    }


def convert(document: Document, kind: type[T], strict: bool = True) -> T:
    """Return a struct. Unless `strict`, values are converted from text, as those of a form."""
    if kind not in _prepared:
        _prepare(kind)
    try:
        return msgspec.convert(document, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), kind, document)
        exact = "`key` in" not in str(error) and "[...]" not in str(error)
        value = _value_at(document, param) if exact else None
        if message == "expected int, got float" and isinstance(value, float):
            if abs(value) >= 1 << 63:  # as the parser reads it
                message = f"the integer {value:g} has more than 64 bits"
        elif message.startswith("expected") and ", got" not in message:
            if "length" in message and isinstance(value, (str, list, dict)):
                message += f", not {len(value)}"
            elif "length" not in message and not isinstance(value, (list, dict, NoneType)):
                message += f", not {repr(value)[:50]}"
        raise InvalidInput.at(param, message) from None


def _prepare(kind: type) -> None:
    """Have msgspec inspect a type once: two threads that do so at once can crash (0.22)."""
    with _preparing:
        with suppress(msgspec.ValidationError):
            msgspec.convert(None, kind)
        _prepared.add(kind)


def required(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidInput.at(path, "is required")
    return value


def read_inputs(inputs: Any, param: str) -> dict[str, str | tuple[int, ...]]:
    """Return texts or token ids by path; `param` itself for a single one.

    Raises InvalidInput if one is empty, or if a list mixes texts and token ids."""
    if not inputs:
        raise InvalidInput.at(param, "must not be empty")
    kind = str if isinstance(inputs, str) else type(inputs[0])
    for n, entry in enumerate(inputs if isinstance(inputs, tuple) else ()):
        if type(entry) is not kind:
            raise InvalidInput.at(f"{param}[{n}]", "a list has either texts or token ids")
        if isinstance(entry, (str, tuple)) and not entry:
            raise InvalidInput.at(f"{param}[{n}]", "must not be empty")
    if isinstance(inputs, str) or kind is int:
        return {param: inputs}
    return {f"{param}[{n}]": entry for n, entry in enumerate(inputs)}


def _list_lengths(document: Document, fields: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield path and length of the lists in the fields, and of the lists in their entries."""
    for name in fields:
        if not isinstance(entries := document.get(name), list):
            continue
        yield name, len(entries)
        for n, entry in enumerate(entries):
            if isinstance(entry, list):
                yield f"{name}[{n}]", len(entry)
            elif isinstance(entry, dict):
                for key, value in entry.items():
                    if isinstance(value, list):
                        yield f"{name}[{n}].{key}", len(value)


def _explain(error: str, kind: Any, document: Document) -> tuple[str, str]:
    """Return the reason and the path of a msgspec error: ("expected int, got str", "stop[1]")."""
    match = _PATH.fullmatch(error)
    assert match is not None
    reason, path = match[1], (match[2] or "").removeprefix(".").removesuffix("[...]")
    if missing := _MISSING.fullmatch(reason):
        return "is required", f"{path}.{missing[1]}" if path else missing[1]
    if reason.endswith("of length >= 1"):
        return "must not be empty", path
    if (value := _UNKNOWN.fullmatch(reason)) and (
        accepted := _literals(type_info(kind), document, re.findall(r"\w+", path))
    ):
        return f"must be {' or '.join(accepted)}, not {value[1][:50]!r}", path
    reason = reason.replace(" | null", "").replace("`", "")
    return reason[:1].lower() + reason[1:], path


def _value_at(document: Document, path: str) -> Any:
    """Return the value at a path; None if the path is not exact."""
    node: Any = document
    try:
        for step in re.findall(r"[^.\[\]]+", path):
            node = node[int(step)] if isinstance(node, list) else node[step]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return node


type_info = cache(inspect.type_info)


def _literals(node: Any, value: Any, steps: list[str]) -> list[str]:
    """Return the values of the Literal, or the tags of the union, at a path of a type. `value`: of
    the node, by whose tags the members of unions are chosen."""
    match node:
        case inspect.LiteralType() if not steps:
            return list(map(str, node.values))
        case inspect.Metadata():
            return _literals(node.type, value, steps)
        case inspect.UnionType():
            return [found for member in node.types for found in _literals(member, value, steps)]
        case inspect.ListType() if steps and steps[0].isdigit():
            return _literals(node.item_type, value[int(steps[0])], steps[1:])
        case inspect.StructType() if steps == [node.tag_field]:
            return [str(node.tag)]
        case inspect.StructType() if steps and node.tag in (None, value.get(node.tag_field)):
            types = [field.type for field in node.fields if field.encode_name == steps[0]]
            inner = value.get(steps[0])
            return [found for type_ in types for found in _literals(type_, inner, steps[1:])]
    return []
