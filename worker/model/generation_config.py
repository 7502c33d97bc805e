"""The checkpoint's generation_config: its checks at load, and the fields that are not served.

SAMPLING_DEFAULTS fills what it leaves out. Sampling parameters and limits are read in
engines/generation/input_processor.py, logits processors are built in logits_processors.py.
"""

import copy
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from transformers import GenerationConfig
from transformers.generation.configuration_utils import BaseWatermarkingConfig, WatermarkingConfig
from transformers.utils.hub import cached_file

from batching.errors import InvalidInput
from worker.error_classification import first_line
from worker.model.loading import LoadingFailed

log = logging.getLogger("onequeue.generation_config")

FILE = "generation_config.json"
FIELDS = frozenset(vars(GenerationConfig()))
MAX_TOKEN_ID = 1 << 62  # of any vocabulary
MAX_FLOAT = sys.float_info.max  # without infinity
Number = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Positive = Annotated[float, Meta(gt=0, le=MAX_FLOAT)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]


def field_types(vocab_size: int) -> dict[str, Any]:
    """Return the type of each field. null is accepted in all of them."""
    token = Annotated[int, Meta(ge=0, lt=vocab_size)]
    tokens = Annotated[list[token], Meta(min_length=1)]
    return {
        "do_sample": bool,
        "temperature": Annotated[float, Meta(ge=0, le=MAX_FLOAT)],
        "top_p": Share,
        "top_k": Annotated[int, Meta(ge=-1)],
        "min_p": Share,
        "top_h": PositiveShare,
        "typical_p": PositiveShare,
        "epsilon_cutoff": Share,
        "eta_cutoff": Share,
        "repetition_penalty": Positive,
        "encoder_repetition_penalty": Positive,
        "no_repeat_ngram_size": Count,
        "encoder_no_repeat_ngram_size": Count,
        "max_length": PositiveCount,
        "max_new_tokens": PositiveCount,
        "min_length": Count,
        "min_new_tokens": Count,
        "forced_bos_token_id": token,
        "forced_eos_token_id": token | tokens,
        # ids beyond the vocabulary have no effect in these, as in `generate`
        "eos_token_id": int | list[int],
        "suppress_tokens": list[int],
        "begin_suppress_tokens": list[int],
        "bad_words_ids": list[tokens],
        "sequence_bias": list[tuple[tokens, Number]],
        "exponential_decay_length_penalty": tuple[int, Positive],
        "remove_invalid_values": bool,
        "renormalize_logits": bool,
        "stop_strings": Text | list[Text],
        "watermarking_config": BaseWatermarkingConfig,
        "num_beams": PositiveCount,
        "num_return_sequences": PositiveCount,
        "pad_token_id": int,
    }


def request_types(vocab_size: int) -> dict[str, Any]:
    """Return the types of a request's fields: numbers and lists that a step has time for, and
    penalties with which no score overflows."""
    token = Annotated[int, Meta(ge=0, lt=vocab_size)]
    tokens = Annotated[list[token], Meta(min_length=1, max_length=MAX_SEQUENCE)]
    types = field_types(vocab_size)
    types |= dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), Penalty)
    types["no_repeat_ngram_size"] = Ngram
    types["encoder_no_repeat_ngram_size"] = Annotated[int, Meta(ge=0, le=8)]  # each is stored
    types["exponential_decay_length_penalty"] = tuple[Start, Factor]
    types["bad_words_ids"] = Annotated[list[tokens], Meta(max_length=64)]
    types["sequence_bias"] = Annotated[list[tuple[tokens, Bias]], Meta(max_length=64)]
    return types | {"stop_strings": Text | Annotated[list[Text], Meta(max_length=16)]}


def to_watermark(kind: type, value: Any) -> Any:
    """Convert a watermarking_config, for msgspec. Raise ValueError or TypeError."""
    if isinstance(value, kind):  # transformers has parsed it
        return value
    config = WatermarkingConfig(**value)
    config.validate()
    if not 0 < config.greenlist_ratio < 1:
        raise ValueError("greenlist_ratio is not between 0 and 1")
    msgspec.convert(config.bias, Number)
    return config


# Fields that `generate` obeys and a batch of requests cannot, with the values that have no effect.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "max_time": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "use_mtp": (False,),
}
# Beyond those, what a request may not set: a step would take as long as several.
NOT_IN_REQUESTS: dict[str, tuple[Any, ...]] = {"typical_p": (1,), "watermarking_config": ()}
Penalty = Annotated[float, Meta(ge=0.01, le=100)]
Bias = Annotated[float, Meta(ge=-1e4, le=1e4)]
Start = Annotated[int, Meta(ge=0, le=1 << 20)]
Factor = Annotated[float, Meta(gt=0, le=2)]
MAX_SEQUENCE = 16  # tokens of a request's banned or biased sequences: a step compares each
Ngram = Annotated[int, Meta(ge=0, le=128)]  # a step compares that many tokens with each of the text


def fill_sampling_defaults(config: GenerationConfig, defaults: str) -> None:
    """Set the sampling parameters of SAMPLING_DEFAULTS, JSON, that a checkpoint leaves out. A
    temperature of 0 is `do_sample: false`."""
    fields: Any = config  # not annotated
    for name, value in json.loads(defaults).items():
        if getattr(fields, name) is not None or value is None:
            continue
        if name == "temperature" and value == 0:
            fields.do_sample = False
        else:
            setattr(fields, name, max(0, value))  # a top_k of -1, as vLLM takes it, is off


def read_generation_config(path: str) -> Mapping[str, Any]:
    """Return the fields of a checkpoint's file, none if it has no such file. Raise LoadingFailed
    if the file has no JSON object: transformers would ignore it."""
    file = cached_file(
        path,
        FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return {}
    try:
        with open(file, encoding="utf-8") as opened:
            fields = json.load(opened)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise LoadingFailed(f"its {FILE} is not a JSON object")
    return fields


def check_generation_config(fields: Mapping[str, Any], vocab_size: int = MAX_TOKEN_ID) -> None:
    """Raise LoadingFailed, in one sentence, at the first malformed field. Without `vocab_size` any
    token id is accepted."""
    for name, why in malformed_fields(fields, field_types(vocab_size)):
        text = repr(fields[name])
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise LoadingFailed(f"its generation_config has {name}: {shown}: {why}")


def malformed_fields(
    fields: Mapping[str, Any], types: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each malformed field, and why."""
    for name, kind in types.items():
        if (value := fields.get(name)) is not None:
            try:
                msgspec.convert(value, kind, dec_hook=to_watermark)
            except msgspec.ValidationError as error:
                yield name, first_line(error)


def with_request_fields(
    config: GenerationConfig, fields: Mapping[str, Any], vocab_size: int
) -> GenerationConfig:
    """Return a checkpoint's configuration with the fields of a request. Raises InvalidInput."""
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, neutral in (NOT_SERVED | NOT_IN_REQUESTS).items():
        if name in fields and fields[name] not in neutral:
            raise InvalidInput.at(f"generation_config.{name}", "is not implemented, leave it out")
    for name, why in malformed_fields(fields, request_types(vocab_size)):
        raise InvalidInput.at(f"generation_config.{name}", why[:1].lower() + why[1:])
    merged: Any = copy.copy(config)
    if "temperature" in fields:
        merged.do_sample = fields["temperature"] > 0
    for name, other in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if name in fields:  # the other one, of the checkpoint, would win
            setattr(merged, other, None)
    vars(merged).update(fields)
    return merged  # type: ignore[no-any-return]


def not_served(fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that have an effect in `generate` and none here, with their values."""
    return [
        f"{name}={fields[name]!r}"
        for name, neutral in NOT_SERVED.items()
        if fields.get(name) is not None and fields[name] not in neutral
    ]


def log_not_served(fields: Mapping[str, Any]) -> None:
    if names := not_served(fields):
        log.warning("generation_config: not served: %s", ", ".join(names))
