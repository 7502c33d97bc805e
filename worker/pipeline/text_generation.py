"""What text generation in batches needs beyond other tasks: how many tokens are made, whether the
padding would be seen by what makes them, and the padding taken out again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batching.errors import InvalidInput
from worker.model.loading import Pipe

DEFAULT_NEW_TOKENS = 256  # the pipeline's own default


def plan(pipe: Pipe, forward: dict[str, Any], prompt_tokens: int, limit: int) -> int:
    """Settle how many tokens are generated, in `forward`; returns the rows a prompt becomes.

    A number that was asked for is refused where it does not fit; a default is cut.
    """
    config = settings_of(pipe)
    settings = {**config.to_diff_dict(), **forward}
    settings.pop("tokenizer", None)
    if add_defaults := getattr(pipe, "_prepare_generate_kwargs", None):
        settings = add_defaults(settings)
    try:
        effective = type(config)(**settings)
        effective.validate()
    except ValueError as error:
        raise InvalidInput(str(error), "parameters") from error
    left = limit - prompt_tokens
    asked = forward.get("max_new_tokens")
    if left < max(1, asked or 1):
        prompt = f"the text has {prompt_tokens} tokens and max_new_tokens is {asked or 1}"
        many = f"{prompt}; the model's context is {limit}"
        raise InvalidInput(many, "parameters.max_new_tokens")
    if asked is None:
        default = config.max_new_tokens or DEFAULT_NEW_TOKENS
        if config.max_length and not config.max_new_tokens:  # counts the prompt
            default = max(1, config.max_length - prompt_tokens)
        asked = forward["max_new_tokens"] = min(left, default)
    if (forward.get("min_new_tokens") or 0) > asked:
        above = f"min_new_tokens is above max_new_tokens, which is {asked}"
        raise InvalidInput(above, "parameters.min_new_tokens")
    return max(effective.num_beams or 1, effective.num_return_sequences or 1)


def settings_of(pipe: Pipe) -> Any:
    """The GenerationConfig before a request's parameters: the model's, or, in transformers 5.17,
    the pipeline's, which has the pipeline's defaults merged in."""
    return getattr(pipe, "generation_config", None) or pipe.model.generation_config


def reads_prompt(pipe: Pipe, forward: Mapping[str, Any]) -> bool:
    """Whether generation looks back at the prompt's tokens, so that padding would be seen."""
    settings = {**settings_of(pipe).to_diff_dict(), **forward}
    return bool(
        (settings.get("repetition_penalty") or 1.0) != 1.0
        or settings.get("no_repeat_ngram_size")
        or settings.get("min_length")
    )


def split(output: Any, rows: Sequence[Any], pipe: Pipe) -> list[Any]:
    """Undo the padding of a batch of text generation: on the left the prompts', on the right
    what follows each row's longest finished sequence. `generated_sequence` is [B, n, T]."""
    eos: int | list[int] | None = settings_of(pipe).eos_token_id
    ends = torch.tensor([] if eos is None else eos, dtype=torch.long)
    width = output["input_ids"].shape[1]
    outputs = []
    for row, chunk in enumerate(rows):
        prompt = chunk["input_ids"].shape[-1]
        sequences = output["generated_sequence"][row, :, width - prompt :]  # [n, prompt + new]
        is_end = torch.isin(sequences[:, prompt:], ends)
        finished = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, is_end.shape[1])
        outputs.append(
            {
                "generated_sequence": sequences[None, :, : prompt + int(finished.max())],
                "input_ids": output["input_ids"][row : row + 1, width - prompt :],
                "prompt_text": output["prompt_text"][row],
            }
        )
    return outputs
