"""The checkpoint's generation_config: its checks at load, and the fields that are not served.

SAMPLING_DEFAULTS fills what it leaves out. Sampling parameters and limits are read in
generation/input_processor.py, logits processors are built in logits_processors.py.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.generation.configuration_utils import (
    BaseWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.utils.hub import cached_file

from worker.model.loading import LoadingFailed

log = logging.getLogger("onequeue.generation_config")

FILE = "generation_config.json"


class Expected(NamedTuple):
    """The accepted values of a field. null is accepted in all of them."""

    accepts: Callable[[Any, float], bool]  # a value, and the number of tokens in the vocabulary
    text: str


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_token(value: Any, vocab_size: float) -> bool:
    return is_integer(value) and 0 <= value < vocab_size


def is_token_list(value: Any, vocab_size: float) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(is_token(id_, vocab_size) for id_ in value)
    )


def is_sequence_bias(value: Any, vocab_size: float) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, list)
        and len(entry) == 2
        and is_token_list(entry[0], vocab_size)
        and is_number(entry[1])
        for entry in value
    )


def is_watermark(value: Any, _: float) -> bool:
    if isinstance(value, BaseWatermarkingConfig):  # transformers has parsed it
        return True
    try:
        config: Any = WatermarkingConfig(**value)  # its methods are not annotated
        config.validate()
    except (TypeError, ValueError):
        return False
    return 0 < config.greenlist_ratio < 1 and is_number(config.bias)


def integer(minimum: int) -> Expected:
    return Expected(
        lambda value, _: is_integer(value) and value >= minimum, f"an integer of at least {minimum}"
    )


def number(minimum: float, maximum: float = math.inf, above: bool = False) -> Expected:
    """Expect a number of at least `minimum`, or `above` it, and at most `maximum`."""

    def accepts(value: Any, _: float) -> bool:
        return is_number(value) and minimum <= value <= maximum and not (above and value == minimum)

    lower = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    upper = f" and at most {maximum:g}" if maximum < math.inf else ""
    return Expected(accepts, f"a number {lower}{upper}")


BOOLEAN = Expected(lambda value, _: isinstance(value, bool), "true or false")
TOKEN = Expected(is_token, "a token id of this model")
TOKENS = Expected(
    lambda value, vocab_size: is_token(value, vocab_size) or is_token_list(value, vocab_size),
    "a token id of this model or a list of them",
)
# Ids beyond the vocabulary have no effect in these, as in `generate`.
INTEGERS = Expected(
    lambda value, _: isinstance(value, list) and all(map(is_integer, value)), "a list of token ids"
)
FIELDS = {
    "do_sample": BOOLEAN,
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "top_h": number(0, 1, above=True),
    "typical_p": number(0, 1, above=True),
    "epsilon_cutoff": number(0, 1),
    "eta_cutoff": number(0, 1),
    "repetition_penalty": number(0, above=True),
    "encoder_repetition_penalty": number(0, above=True),
    "no_repeat_ngram_size": integer(0),
    "encoder_no_repeat_ngram_size": integer(0),
    "max_length": integer(1),
    "max_new_tokens": integer(1),
    "min_length": integer(0),
    "min_new_tokens": integer(0),
    "eos_token_id": Expected(
        lambda value, _: is_integer(value) or INTEGERS.accepts(value, 0),
        "a token id or a list of them",
    ),
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": TOKENS,
    "suppress_tokens": INTEGERS,
    "begin_suppress_tokens": INTEGERS,
    "bad_words_ids": Expected(
        lambda value, vocab_size: (
            isinstance(value, list) and all(is_token_list(ids, vocab_size) for ids in value)
        ),
        "a list of non-empty lists of token ids of this model",
    ),
    "sequence_bias": Expected(is_sequence_bias, "a list of [list of token ids, number]"),
    "exponential_decay_length_penalty": Expected(
        lambda value, _: (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and is_integer(value[0])
            and is_number(value[1])
            and value[1] > 0
        ),
        "a list of an integer and a number above 0",
    ),
    "remove_invalid_values": BOOLEAN,
    "renormalize_logits": BOOLEAN,
    "stop_strings": Expected(
        lambda value, _: all(
            isinstance(text, str) and text
            for text in (value if isinstance(value, list) else [value])
        ),
        "a non-empty text or a list of them",
    ),
    "watermarking_config": Expected(is_watermark, "the fields of a WatermarkingConfig"),
    "num_beams": integer(1),
    "num_return_sequences": integer(1),
    "pad_token_id": Expected(lambda value, _: is_integer(value), "a token id"),
}
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


def check_generation_config(fields: Mapping[str, Any], vocab_size: float = math.inf) -> None:
    """Raise LoadingFailed, in one sentence, at the first malformed field. Without `vocab_size` any
    token id is accepted."""
    for name, expected in FIELDS.items():
        value = fields.get(name)
        if value is not None and not expected.accepts(value, vocab_size):
            text = repr(value)
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            raise LoadingFailed(f"its generation_config has {name}: {shown}, not {expected.text}")


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
