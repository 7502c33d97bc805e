"""From a batch's raw output to one output per row, and from an answer to JSON.

A row's output is what the pipeline's `postprocess` would have got without the batch: first
dimension 1, no padding. That a model's outputs allow this is checked at load (batch_check.py).
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import orjson
import torch
from PIL import Image

# Per-layer extras that no pipeline's postprocessing reads.
SKIPPED = {"past_key_values", "hidden_states", "attentions"}


def split_rows(output: Any, size: int, counts: Sequence[int] | None) -> list[Any]:
    """One output of the same type for each of `size` rows; `counts` are their token counts, if
    they have any. What goes by token is trimmed: whole numbers [B, L] and anything [B, L, …], but
    no scores [B, labels], which may happen to be as wide as the batch."""
    width = max(counts) if counts else None

    def pick(value: Any, row: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == size:
            one = value[row]  # tensors of unequal sizes stay in a list: it is their batch
            return [one] if isinstance(one, torch.Tensor) else one
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != size:
            return value
        value = value[row : row + 1]
        per_token = value.ndim > 2 or (value.ndim == 2 and not value.is_floating_point())
        if counts and per_token and value.shape[1] == width:
            value = value[:, : counts[row]]
        return value

    if isinstance(output, torch.Tensor):
        return [pick(output, row) for row in range(size)]
    kept = [(key, value) for key, value in output.items() if key not in SKIPPED]
    return [type(output)({key: pick(value, row) for key, value in kept}) for row in range(size)]


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


def spread_masks(output: Any, masks: Sequence[int]) -> Any:
    """Logits [1, M, V] back to [1, L, V], as the pipeline expects them; only the M are set."""
    rows = output["logits"]
    spread = rows.new_empty(1, output["input_ids"].shape[1], rows.shape[2])
    spread[0, list(masks)] = rows[0, : len(masks)]
    return {"logits": spread, "input_ids": output["input_ids"]}


def to_json(answer: Any) -> bytes:
    """Tensors and arrays become nested lists, images base64 PNG, NaN and infinities null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(answer, default=_plain, option=options)


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
