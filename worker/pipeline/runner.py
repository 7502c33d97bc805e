"""Rows of images and sounds: which of them may run together, and as one batch. Texts, which need
padding or are packed, are left to runner.py.

What text generation in batches needs beyond other tasks: how many tokens are made, whether the
padding would be seen by what makes them, and the padding taken out again.

A transformers pipeline, cut at its own seams: preprocess → forward → postprocess.

    prepare (pool) → forward (worker thread, a batch) → finish (pool)

Pool threads work on replicas of the pipeline that share the model but nothing else, because a
fast tokenizer's truncation and padding settings are mutable state. A batch runs packed where the
model can (packed_attention.py), otherwise padded or one by one: load.py has found out which. Tasks
whose pipelines have no clean seams are called whole.
"""

import copy
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from transformers.pipelines.base import ChunkPipeline, pad_collate_fn

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.media.decode_limiter import DecodeLimiter
from worker.media.inputs import FREE_VALUES_PER_PIXEL, to_json
from worker.messages.protocol import ModelInfo, PipelineInput
from worker.model.loading import Pipe
from worker.pipeline import limits
from worker.pipeline.inputs import InputReader, warm_up_input
from worker.pipeline.packed_attention import Packing, spread
from worker.tasks import TASKS

Chunk = dict[str, Any]  # what `preprocess` makes of an input, or of a part of it: a row of a batch


def shape(chunk: Chunk) -> Hashable:
    """Equal for rows that can be stacked: the same keys, and tensors of the same shape."""
    return tuple((k, getattr(v, "shape", (1,))[1:]) for k, v in sorted(chunk.items()))


def stack(rows: Sequence[Chunk]) -> Chunk:
    """Rows of equal shapes as one batch."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: torch.cat(v) if isinstance(v[0], torch.Tensor) else v for k, v in columns.items()}


def share_equal(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks, with one tensor for all that equal the first's: zero-shot-object-detection makes
    the same image again for each label."""
    first: Chunk = {}
    for chunk in chunks:
        first = first or chunk
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and torch.equal(value, chunk[key]):
                chunk[key] = value
        yield chunk


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


# Per-layer extras that no pipeline's postprocessing reads.
SKIPPED = {"past_key_values", "hidden_states", "attentions"}


@dataclass(slots=True)
class PreparedInput:
    """An input ready for the worker: the rows it needs, and the parameters of later stages."""

    chunks: list[Any]
    forward: dict[str, Any]
    postprocess: dict[str, Any]
    tokens: int = 1  # of the longest chunk
    sequences: int = 1  # rows that generation makes of each chunk
    masks: list[list[int]] | None = None  # of each row, the only positions that the head sees
    pixels: int = 0  # of the image, where the answer is as large
    future: Any = None  # of its item: once it is done, nobody waits


class BatchCancelled(Exception):
    """For any input of the batch that runs."""


@dataclass(eq=False)
class PipelineRunner:
    """Implements worker.messages.protocol.Runner for one pipeline."""

    pipe: Pipe
    info: ModelInfo
    packing: Packing | None
    budget: DecodeLimiter
    max_rows: int

    def __post_init__(self) -> None:
        pipe, info = self.pipe, self.info
        self.task = TASKS[info.task]
        self.reader = InputReader(info.task, pipe)
        self.limit, self.vocabulary = self.reader.limit, limits.vocabulary(pipe)
        self.generates = info.task == "text-generation"
        self.fills_masks = info.task == "fill-mask"
        self.reads_tokens = self.task.kind == "text" and self.task.stages
        self._template = copy_pipeline(pipe)  # nobody uses it, so it can be copied at any time
        self._idle: list[Pipe] = []  # replicas, as many as threads have ever worked at once
        self._copying = threading.Lock()

    @contextmanager
    def _replica(self) -> Iterator[Pipe]:
        try:
            pipe = self._idle.pop()
        except IndexError:
            with self._copying:  # half a second, for a tokenizer of 150,000 tokens
                pipe = copy_pipeline(self._template)
        try:
            yield pipe
        finally:
            self._idle.append(pipe)

    # ── pool threads: preprocess ──

    def prepare(self, item: WorkItem) -> None:
        with self._replica() as pipe:
            prepared = self._preprocess(pipe, item.payload)
        item.prepared = prepared
        prepared.future = getattr(item, "future", None)  # a warm-up has none
        item.rows = len(prepared.chunks) * prepared.sequences
        if self.reads_tokens:
            tokens = sum(chunk["input_ids"].shape[-1] for chunk in prepared.chunks)
            item.tokens = tokens * prepared.sequences
            item.width = prepared.tokens
        item.key = self._key(prepared) or id(item)

    def _preprocess(self, pipe: Pipe, payload: PipelineInput) -> PreparedInput:
        if self._is_plain(pipe, payload):
            return self._chunks(pipe, payload.inputs, payload.parameters)
        with self.budget.lease(payload.budget) as lease:
            inputs = self.reader.read(payload, pipe, lease)
            prepared = self._chunks(pipe, inputs, payload.parameters)
            prepared.pixels = lease.taken if self.reader.values_per_pixel > 1 else 0
        return prepared

    def _is_plain(self, pipe: Pipe, payload: PipelineInput) -> bool:
        """A short text and no parameters, of which nothing needs to be read or refused."""
        text = payload.inputs
        if not self.reads_tokens or payload.parameters or not isinstance(text, str):
            return False
        needed = pipe.tokenizer.mask_token if self.fills_masks else ""
        return 0 < len(text) <= self.limit and not text.isspace() and needed in text

    def _chunks(self, pipe: Pipe, inputs: Any, parameters: Mapping[str, Any]) -> PreparedInput:
        if not self.task.stages:
            return PreparedInput([inputs], dict(parameters), {})
        # of the three stages, as the pipeline's own call would have them
        defaults = (pipe._preprocess_params, pipe._forward_params, pipe._postprocess_params)
        given = zip(defaults, pipe._sanitize_parameters(**parameters), strict=True)
        before, during, after = ({**default, **more} for default, more in given)
        made = pipe.preprocess(inputs, **before)
        if isinstance(pipe, ChunkPipeline):
            chunks = list(share_equal(made) if self.task.kind == "json" else made)
        else:
            chunks = [made]
        prepared = PreparedInput(chunks, during, after)
        prepared.tokens = check_tokens(chunks, self.limit, self.vocabulary)
        if self.generates:
            prepared.sequences = plan(pipe, during, prepared.tokens, self.limit)
            if "tokenizer" in during:  # there with stop strings; the replica's stays in the pool
                during["tokenizer"] = self.pipe.tokenizer
        if self.fills_masks:
            is_mask = made["input_ids"][0] == pipe.tokenizer.mask_token_id
            masks = is_mask.nonzero().squeeze(1).tolist()
            if len(masks) > 1 or after:
                words = min(self.vocabulary, len(pipe.tokenizer))
                limits.check_masks(len(masks), prepared.tokens, inputs, after, words)
            prepared.masks = [masks] if self.packing else None
        return prepared

    def _key(self, prepared: PreparedInput) -> Hashable | None:
        """What an item shares with those it may run with; None if it must run alone."""
        if self.info.batching == "single" or "stop_strings" in prepared.forward:
            return None
        shared = orjson.dumps(prepared.forward, option=orjson.OPT_SORT_KEYS)
        first = prepared.chunks[0]
        if self.task.kind != "text":
            return shared, shape(first)
        unpadded = self.generates and reads_prompt(self.pipe, prepared.forward)
        return shared, frozenset(first), prepared.tokens if unpadded else 0

    # ── the worker thread: forward ──

    def forward(self, prepared: list[PreparedInput]) -> list[Any]:
        """Raw outputs, a list of one per row for each input. Before each forward of the model, of
        which generation and many rows take several, somebody must wait still: else there is None
        for each."""

        def check(*_: Any) -> None:
            if all(each.future and each.future.done() for each in prepared):
                raise BatchCancelled

        hook = self.pipe.model.register_forward_pre_hook(check)
        try:
            return self._forward(prepared)
        except BatchCancelled:
            return [None] * len(prepared)
        finally:
            hook.remove()

    def _forward(self, prepared: list[PreparedInput]) -> list[Any]:
        if not self.task.stages:
            return [self.pipe(*each.chunks, **each.forward) for each in prepared]
        rows = [chunk for each in prepared for chunk in each.chunks]
        masks = [positions for each in prepared for positions in each.masks or ()] or None
        outputs: list[Any] = []
        for part in self._parts(rows):
            outputs += self._forward_rows(rows[part], prepared[0].forward, masks and masks[part])
        rest = iter(outputs)
        return [[next(rest) for _ in each.chunks] for each in prepared]

    def _parts(self, rows: list[Chunk]) -> Iterator[slice]:
        """Rows that run together: at most `max_rows`, and sounds of one length only."""
        alike = self.task.kind == "text"
        most = 1 if self.info.batching == "single" else self.max_rows
        start = 0
        for end in range(1, len(rows) + 1):
            full = end - start == most or end == len(rows)
            if full or not (alike or shape(rows[start]) == shape(rows[end])):
                yield slice(start, end)
                start = end

    def _forward_rows(
        self, rows: list[Chunk], parameters: dict[str, Any], masks: list[list[int]] | None
    ) -> list[Any]:
        if len(rows) == 1 and self.packing is None:
            return [self.pipe.forward(rows[0], **parameters)]
        if self.task.kind != "text":
            return split_rows(self.pipe.forward(stack(rows), **parameters), len(rows), None)
        collate: Any = pad_collate_fn
        batch = rows[0] if len(rows) == 1 else collate(self.pipe.tokenizer, None)(rows)
        if self.generates:
            output = self.pipe.forward(batch, **parameters)
            return split(output, rows, self.pipe)
        counts = [row["input_ids"].shape[-1] for row in rows]
        if self.packing is None:
            return split_rows(self.pipe.forward(batch, **parameters), len(rows), counts)
        seen = batch.get("attention_mask")
        real = counts if seen is None else seen.sum(1).tolist()
        with self.packing.batch(real, batch["input_ids"].shape[1], masks):
            output = self.pipe.forward(batch, **parameters)
        return split_rows(output, len(rows), counts)

    # ── pool threads: postprocess ──

    def finish(self, item: WorkItem, raw: Any) -> bytes:
        """The answer as JSON."""
        prepared: PreparedInput = item.prepared
        if not self.task.stages:
            return to_json(raw)
        if not prepared.pixels:
            return self._postprocess(item.payload, prepared, raw)
        with self.budget.lease() as lease:
            lease.take(prepared.pixels * self.reader.values_per_pixel // FREE_VALUES_PER_PIXEL)
            return self._postprocess(item.payload, prepared, raw)

    def _postprocess(self, payload: PipelineInput, prepared: PreparedInput, raw: Any) -> bytes:
        if prepared.masks is not None:
            raw = [spread(*each) for each in zip(raw, prepared.masks, strict=True)]
        with self._replica() as pipe:
            outputs = raw if isinstance(pipe, ChunkPipeline) else raw[0]
            answer = pipe.postprocess(outputs, **prepared.postprocess)
            if self.task.wraps_string and isinstance(payload.inputs, str):
                answer = answer if "top_k" in payload.parameters else [answer]
            return to_json(answer)

    # ── the worker thread: is it well? ──

    def warm_up(self) -> None:
        inputs, parameters = warm_up_input(self.info.task, self.pipe)
        item = WorkItem(PipelineInput(inputs, parameters), float("inf"), 0.0)
        self.prepare(item)
        (raw,) = self.forward([item.prepared])
        self.finish(item, raw)


def copy_pipeline(pipe: Pipe) -> Pipe:
    """A pipeline that shares the model and has everything else to itself."""
    return copy.deepcopy(pipe, {id(pipe.model): pipe.model})


def check_tokens(chunks: Sequence[Mapping[str, Any]], limit: int, known: int) -> int:
    """The longest chunk's token count, after checking all of them; `known`: the vocabulary."""
    if len(chunks) > (most := limits.MAX_CHUNKS):
        many = f"the input makes {len(chunks)} pieces; at most {most} are taken"
        raise InvalidInput(many, "inputs")
    ids = [chunk["input_ids"] for chunk in chunks if "input_ids" in chunk]
    counts: list[int] = [each.shape[-1] for each in ids] or [1]
    if max(counts) > limit:
        raise InvalidInput(f"the text has {max(counts)} tokens; the model takes {limit}", "inputs")
    if not min(counts):
        raise InvalidInput("the text has no tokens", "inputs")
    if any(int(each.max()) >= known for each in ids):
        raise InvalidInput("the text has a token that the model does not know", "inputs")
    return max(counts)


def split_rows(output: Any, size: int, counts: Sequence[int] | None) -> list[Any]:
    """One output of the same type for each of `size` rows, as `postprocess` would have got it
    without the batch; `counts` are their token counts, if they have any. What goes by token is
    trimmed: whole numbers [B, L] and anything [B, L, …], but no scores [B, labels], which may
    happen to be as wide as the batch."""
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
