"""The multimodal part of a paged step: positions of its tokens and inputs of its placeholders.

The encoder has run before (worker/vision); paged_runner.py passes both to the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batching.sequence import Batch, MultimodalInputs
from worker.model.decoder_hook import DecoderRows


@dataclass(eq=False, slots=True)
class EncodedInputs(MultimodalInputs):
    """A prompt's multimodal inputs as its decoder takes them.

    `spans`: token ranges [start, stop) of the media in the prompt. `positions`: int64 [A, T], the
    whole prompt's position ids on each of the model's A axes (3 for Qwen-VL), None until computed.
    `rows`: one DecoderRows per span, kept from encoding until the prompt has run.
    """

    spans: Sequence[tuple[int, int]] = ()
    positions: Tensor | None = None
    rows: Sequence[DecoderRows] = ()


def multimodal_position_ids(batch: Batch) -> Tensor:
    """Return the position ids of the batch's T tokens: int64 [A, 1, T], or [1, T] if A is 1."""
    parts: list[Tensor] = []
    for number, (_, start, width) in enumerate(batch.spans):
        multimodal = batch.chunks[number].sequence.multimodal
        positions = torch.arange(start, start + width)[None]
        if isinstance(multimodal, EncodedInputs):
            assert multimodal.positions is not None
            positions = positions + multimodal.shift
            prompt = multimodal.positions[:, start : start + width]
            output = positions[:, prompt.shape[1] :].expand(len(prompt), -1)
            positions = torch.cat([prompt, output], 1)
        parts.append(positions)
    axes = max(map(len, parts))
    positions = torch.cat([part.expand(axes, -1) for part in parts], 1)
    return positions if axes == 1 else positions[:, None]


def injected_rows(batch: Batch) -> tuple[Tensor, DecoderRows]:
    """Return the indices [N] of the batch's placeholders, and the decoder's inputs for them."""
    indices: list[Tensor] = []
    parts: list[DecoderRows] = []
    for number in batch.multimodal_spans:
        multimodal = batch.chunks[number].sequence.multimodal
        _, start, width = batch.spans[number]
        assert isinstance(multimodal, EncodedInputs)
        shift = batch.offsets[number] - start
        for (first, stop), rows in zip(multimodal.spans, multimodal.rows, strict=True):
            begin, end = max(first, start), min(stop, start + width)
            if begin < end:
                indices.append(torch.arange(begin + shift, end + shift))
                in_span = slice(begin - first, end - first)
                parts.append({name: values[in_span] for name, values in rows.items()})
    if not parts:
        return torch.empty(0, dtype=torch.long), {}
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(indices), rows
