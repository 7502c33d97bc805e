"""A prompt with media: processed in a pool thread, encoded on the worker's thread unless cached,
and reduced to its numbers once it has been prefilled. The choices of a request share it.

Positions, bidirectional attention and the contents by which cached blocks are found are read from
the model's own forward as it calls its decoder, without the encoder's inputs.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batching.block_pool import Content
from batching.sequence import TokenIds
from worker.model.decoder_hook import DecoderHook, DecoderRows, attends_to_next
from worker.model.multimodal_batch import EncodedInputs
from worker.vision.encoder import EncoderCache, VisionEncoder
from worker.vision.processor import MultimodalItem, ProcessorOutput

Recompute = Callable[[], Future[ProcessorOutput]]
NEVER: Recompute = Future  # does not complete: for prompts that are encoded once


@dataclass(eq=False, slots=True)
class MultimodalPrompt(EncodedInputs):
    """`recompute` processes the request again, encoder inputs included, in another thread: for
    prompts that were preempted after their prefill, or whose cached features have been evicted.
    `processor_output` is dropped once all media are encoded. `encoded`: rows by the digest of
    their tile."""

    recompute: Recompute = field(kw_only=True)
    processor_output: ProcessorOutput | None = field(kw_only=True)
    ids: TokenIds = field(kw_only=True)
    digests: Sequence[bytes] = field(kw_only=True)
    audio_tokens: int = 0
    encoded: dict[bytes, DecoderRows] = field(default_factory=dict)
    recomputing: Future[ProcessorOutput] | None = None

    @classmethod
    def from_output(
        cls, output: ProcessorOutput, recompute: Recompute = NEVER
    ) -> "MultimodalPrompt":
        spans = [(item.start, item.stop) for item in output.items]
        digests = [item.digest for item in output.items]
        ids = TokenIds(output.ids)
        return cls(
            spans=spans, end=spans[-1][1], contents=ids, recompute=recompute, ids=ids,
            digests=digests, processor_output=output, audio_tokens=output.placeholders("audio"),
        )  # fmt: skip

    def missing(self, cache: EncoderCache, limit: int) -> list[MultimodalItem]:
        """Return the first `limit` tiles that are not encoded; none while they are recomputed."""
        if not (numbers := self.find_unencoded(cache)):
            return []
        output = self.processor_output
        if output is None or not all(output.items[number].is_complete for number in numbers):
            self.recomputing = self.recomputing or self.recompute()
            if not self.recomputing.done():
                return []
            recomputed, self.recomputing = self.recomputing, None
            self.processor_output = output = recomputed.result()
        return [output.items[number] for number in numbers[:limit]]

    def find_unencoded(self, cache: EncoderCache) -> list[int]:
        """Take what the cache has, and return the numbers of the other tiles."""
        for digest in self.digests:
            if digest not in self.encoded and (rows := cache.rows.get(digest)) is not None:
                self.encoded[digest] = rows
        return [*{d: n for n, d in enumerate(self.digests) if d not in self.encoded}.values()]

    def compute_positions(self, hook: DecoderHook) -> None:
        """Set `positions`, `shift`, `bidirectional_spans`, `end` and `contents`. Raises CannotRun
        if they cannot be read from the decoder's inputs."""
        output, device = self.processed(), hook.model.device
        media = output.media_inputs(with_encoder_inputs=False)
        mask = torch.ones(1, len(self.ids), dtype=torch.long)  # without it some count no positions
        given = {**output.inputs, **media, "attention_mask": mask}
        inputs = select_tensors(given, hook.argument_names)
        decoder_inputs = hook.capture(
            input_ids=torch.tensor([[*self.ids]], device=device),
            **{name: tensor.to(device) for name, tensor in inputs.items()},
        )
        count = len(self.ids)
        self.positions = _positions(decoder_inputs.get("position_ids"), count)
        self.shift = int(self.positions.max()) + 1 - count
        self.bidirectional_spans = _runs(attends_to_next(decoder_inputs))
        self.end = max(stop for _, stop in (*self.spans, *self.bidirectional_spans))
        text = torch.arange(self.end, count) + self.shift
        if not bool((self.positions[:, self.end :] == text).all()):
            self.end = count
        self.contents = self._contents()

    def _contents(self) -> tuple[Content, ...]:
        """Return token ids, in media the digest of the tile instead. Tokens of a
        bidirectional span depend on all of it: there the digest of the span."""
        contents: list[Content] = [*self.ids]
        for (start, stop), digest in zip(self.spans, self.digests, strict=True):
            contents[start:stop] = [digest] * (stop - start)
        for start, stop in self.bidirectional_spans:
            whole = hashlib.blake2b(repr(contents[start:stop]).encode(), digest_size=16).digest()
            contents[start:stop] = [whole] * (stop - start)
        return (*contents,)

    def mark_ready(self, encoder: VisionEncoder) -> None:
        """Let the scheduler admit the prompt: all its media are encoded. Raises CannotRun as
        `compute_positions` does."""
        if self.positions is None:
            self.compute_positions(encoder.hook)
        for features in self.processor_output.media if self.processor_output else ():
            stored = features.without_encoder_inputs()
            encoder.cache.features.put(stored.digest, stored, stored.nbytes)
        self.rows, used = [], Counter[bytes]()
        for (start, stop), digest in zip(self.spans, self.digests, strict=True):
            rows = self.encoded[digest]  # those of a tile may be in several spans
            first = used[digest] % len(next(iter(rows.values())))
            used[digest] += stop - start
            part = slice(first, first + stop - start)
            self.rows.append({name: values[part] for name, values in rows.items()})
        self.processor_output, self.encoded, self.ready = None, {}, True

    def release(self) -> None:
        """Drop the rows: the prompt has been prefilled or cancelled."""
        self.rows, self.ready = (), False

    def processed(self) -> ProcessorOutput:
        """Return the processor's output, which is there until all media are encoded."""
        assert self.processor_output
        return self.processor_output


def select_tensors(inputs: Mapping[str, object], names: Container[str]) -> dict[str, Tensor]:
    """Return the tensors whose names are arguments of the model's forward."""
    return {
        name: value for name, value in inputs.items() if isinstance(value, Tensor) and name in names
    }


def _positions(position_ids: Tensor | None, width: int) -> Tensor:
    """Return positions [A, T] on the CPU, whatever other axes the model's own have."""
    positions = torch.arange(width) if position_ids is None else position_ids.cpu()
    return positions.reshape(-1, width)


def _runs(attends_to_next: Tensor) -> list[tuple[int, int]]:
    """Return the [start, stop) of runs of tokens that each attend to the next one."""
    none = torch.zeros(1, dtype=torch.int)
    edges = torch.diff(attends_to_next.cpu().int(), prepend=none, append=none)
    starts, ends = ((edges == step).nonzero().flatten().tolist() for step in (1, -1))
    return [(start, end + 1) for start, end in zip(starts, ends, strict=True)]
