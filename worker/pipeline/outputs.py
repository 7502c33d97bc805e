"""What is special about some outputs: rows of generated text, and what JSON has no form for."""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
import torch
from PIL import Image


def split_generated(output: Any, rows: Sequence[Any], eos: int | list[int] | None) -> list[Any]:
    """Undo the padding of a batch of text generation: on the left the prompts', on the right
    what follows each row's longest finished sequence. `generated_sequence` is [B, n, T]."""
    ends = torch.tensor([] if eos is None else eos, dtype=torch.long)
    width = output["input_ids"].shape[1]
    split = []
    for row, chunk in enumerate(rows):
        prompt = chunk["input_ids"].shape[-1]
        sequences = output["generated_sequence"][row, :, width - prompt :]  # [n, prompt + new]
        is_end = torch.isin(sequences[:, prompt:], ends)
        finished = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, is_end.shape[1])
        split.append(
            {
                "generated_sequence": sequences[None, :, : prompt + int(finished.max())],
                "input_ids": output["input_ids"][row : row + 1, width - prompt :],
                "prompt_text": output["prompt_text"][row],
            }
        )
    return split


def _plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    if hasattr(value, "tolist"):  # tensors, arrays that are not contiguous, exotic scalars
        return value.tolist()
    if hasattr(value, "items"):  # ModelOutput and other mappings
        return dict(value.items())
    raise TypeError(f"no JSON form for {type(value).__name__}")


# Tensors and arrays become nested lists, images base64 PNG, NaN and infinities null.
to_json: Callable[[Any], bytes] = partial(
    orjson.dumps, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
)
