"""A transformers pipeline, cut into its stages: preprocess → forward → postprocess.

    prepare (pool thread) → forward (worker thread, a batch) → finish (pool thread)

Pool threads work on replicas of the pipeline that share only the model, because a fast tokenizer's
truncation and padding settings are mutable state. A batch runs packed (packed_attention.py), padded
or one by one, as loading.py decided at load. Pipelines without separate stages are called whole.
Which items share a batch is decided by batching/batcher.py from the keys that `prepare` sets.
"""

import asyncio
import copy
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
import torch
from transformers import ZeroShotClassificationPipeline
from transformers.pipelines.base import ChunkPipeline, PipelineException, pad_collate_fn

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from batching.step_times import EFFICIENT_TOKENS, StepTimes
from worker.engines.pipeline import limits
from worker.engines.pipeline.engine import run_alone
from worker.engines.pipeline.inputs import InputReader, text_length, warm_up_input
from worker.engines.pipeline.packed_attention import Packing, scatter_logits
from worker.engines.pipeline.yield_points import StepCancelled, YieldPoints
from worker.media.decode_limiter import DecodeLimiter
from worker.media.inputs import FREE_VALUES_PER_PIXEL, to_json
from worker.messages.protocol import (
    ALONE,
    CUT,
    Cut,
    IsWanted,
    ModelInfo,
    OtherModels,
    PipelineInput,
)
from worker.model.loading import Pipe
from worker.tasks import TASKS, truncates
from worker.text.long_text import LONG_CHARS, tokenizing

ModelInputs = dict[str, Any]  # the output of `preprocess` for an input or a part of it: one row

DEFAULT_NEW_TOKENS = 256  # the text-generation pipeline's own default
# Outputs per layer, which no pipeline's postprocessing reads.
UNUSED_OUTPUTS = {"cache", "past_key_values", "hidden_states", "attentions"}


class NoTokens(InvalidInput):
    """The tokenizer makes nothing of a text."""


@dataclass(slots=True)
class PreparedInput:
    """A preprocessed input: its rows, and the parameters of the later stages."""

    chunks: list[Any]  # rows, as in transformers' ChunkPipeline
    forward: dict[str, Any]
    postprocess: dict[str, Any]
    tokens: int = 1  # of the longest chunk
    sequences: int = 1  # rows that generation makes of each chunk
    masks: list[list[int]] | None = None  # per chunk, the only positions that the head needs
    pixels: int = 0  # of the image, where the response is as large as it
    seed: int | None = None  # of speech
    future: "asyncio.Future[object] | None" = None  # the work item's; done if it is cancelled
    outputs: list[Any] = field(default_factory=list)  # of the first chunks, which have run

    def take_outputs(self) -> list[Any] | Cut:
        """Remove and return the outputs of all chunks; CUT if some have not run."""
        if len(self.outputs) < len(self.chunks):
            return CUT
        outputs, self.outputs = self.outputs, []
        return outputs


PipelineItem = WorkItem[PipelineInput, PreparedInput]


@dataclass(eq=False)
class PipelineRunner:
    """Implements worker.messages.protocol.Runner for one pipeline."""

    pipe: Pipe
    info: ModelInfo
    packing: Packing | None
    decode_limiter: DecodeLimiter
    max_rows: int

    others: OtherModels = ALONE
    text_model: ClassVar[None] = None

    def __post_init__(self) -> None:
        pipe, info = self.pipe, self.info
        self.task = TASKS[info.task]
        self.reader = InputReader(info.task, pipe)
        self.limit, self.vocabulary = self.reader.limit, limits.vocabulary_size(pipe)
        self.generates = info.task == "text-generation"
        # also other tasks whose forward pass is many of the model
        self.calls_generate = "max_new_tokens" in self.task.parameters and pipe.model.can_generate()
        self.fills_masks = info.task == "fill-mask"
        self.reads_tokens = self.task.kind == "text" and self.task.stages
        self._times = StepTimes()
        self._yield_points = YieldPoints(pipe.model)
        self._template = copy_pipeline(pipe)  # never run, so it can be copied at any time
        self._idle: list[Pipe] = []  # replicas, as many as threads have ever worked at once
        self._copying = threading.Lock()

    @contextmanager
    def _replica(self) -> Iterator[Pipe]:
        try:
            pipe = self._idle.pop()
        except IndexError:
            with self._copying:  # takes half a second for a tokenizer of 150,000 tokens
                pipe = copy_pipeline(self._template)
        try:
            yield pipe
        finally:
            self._idle.append(pipe)

    def warm_up(self) -> None:
        """Run the smallest valid input through all three stages; raise if the model is broken."""
        inputs, parameters = warm_up_input(self.info.task, self.pipe)
        run_alone(self, PipelineInput(inputs, parameters))

    # ── pool threads: preprocess ──

    def prepare(self, item: PipelineItem) -> None:
        """Preprocess an item's input and set its `prepared`, `rows`, `tokens`, `width` and `key`.
        Raises InvalidInput for what the task or the model does not accept."""
        with self._replica() as pipe:
            prepared = self._preprocess(pipe, item.payload, lambda: item.open)
        item.prepared = prepared
        prepared.future = getattr(item, "future", None)  # a warm-up has none
        item.rows = len(prepared.chunks) * prepared.sequences
        if self.reads_tokens:
            tokens = sum(chunk["input_ids"].shape[-1] for chunk in prepared.chunks)
            item.tokens = tokens * prepared.sequences
            item.width = prepared.tokens
        item.key = self._batch_key(prepared) or id(item)

    def _preprocess(self, pipe: Pipe, payload: PipelineInput, is_wanted: IsWanted) -> PreparedInput:
        if self._is_plain_text(pipe, payload):
            return self._make_chunks(pipe, payload.inputs, payload.parameters)
        with self.decode_limiter.lease(payload.limiter, is_wanted) as lease:
            inputs = self.reader.read(payload, pipe, lease)
            with tokenizing(text_length(inputs)):
                prepared = self._make_chunks(pipe, inputs, payload.parameters)
            prepared.pixels = lease.taken if self.reader.values_per_pixel > 1 else 0
        return prepared

    def _is_plain_text(self, pipe: Pipe, payload: PipelineInput) -> bool:
        """Return whether the input is a short text without parameters, which passes every check."""
        text = payload.inputs
        if not self.reads_tokens or payload.parameters or not isinstance(text, str):
            return False
        required = pipe.tokenizer.mask_token if self.fills_masks else ""
        is_short = 0 < len(text) <= min(self.limit, LONG_CHARS)
        return is_short and not text.isspace() and required in text

    def _make_chunks(self, pipe: Pipe, inputs: Any, parameters: Mapping[str, Any]) -> PreparedInput:
        truncation = parameters.get("truncation")
        if not self.task.stages:
            return PreparedInput([inputs], {}, {})
        # merged per stage as the pipeline's own __call__ does
        defaults = (pipe._preprocess_params, pipe._forward_params, pipe._postprocess_params)
        own = {name: value for name, value in parameters.items() if name != "truncation"}
        overrides = pipe._sanitize_parameters(**own)
        preprocess, forward, postprocess = (
            {**default, **override} for default, override in zip(defaults, overrides, strict=True)
        )
        max_tokens = self.limit
        if self.generates and truncates(parameters):
            max_tokens = max(1, max_tokens - reserved_tokens(pipe, forward, max_tokens))
        tokenizer, chunks = pipe.tokenizer, list[Any]()
        if truncation is not None:
            pipe.tokenizer = TruncatingTokenizer(tokenizer, truncation, max_tokens)
        try:
            output: Any
            if isinstance(pipe, ZeroShotClassificationPipeline):
                output = tokenize_pairs(pipe, inputs, **preprocess)
            else:
                output = pipe.preprocess(inputs, **preprocess)
            if isinstance(pipe, ChunkPipeline):
                chunks += share_equal_tensors(output) if self.task.kind == "json" else output
            else:
                chunks.append(output)
        except PipelineException as error:
            if not (self.fills_masks and truncates(parameters)):
                raise
            message = f"the first {max_tokens} tokens have no {tokenizer.mask_token}"
            raise InvalidInput(f"{message}: the rest is truncated", "inputs") from error
        finally:
            pipe.tokenizer = tokenizer
        prepared = PreparedInput(chunks, forward, postprocess)
        hint = limits.TRUNCATION_HINT if self.task.kind == "text" else ""
        prepared.tokens = check_tokens(chunks, self.limit, self.vocabulary, hint)
        if self.generates:
            prepared.sequences = plan_generation(pipe, forward, prepared.tokens, self.limit)
            if "tokenizer" in forward:  # set with stop strings; a replica's must stay in the pool
                forward["tokenizer"] = self.pipe.tokenizer
        if self.fills_masks:
            is_mask = output["input_ids"][0] == pipe.tokenizer.mask_token_id
            masks = is_mask.nonzero().squeeze(1).tolist()
            if len(masks) > 1 or postprocess:
                words = min(self.vocabulary, len(pipe.tokenizer))
                chars = 0 if truncates(parameters) else len(inputs)
                limits.check_masks(len(masks), prepared.tokens, chars, postprocess, words)
            prepared.masks = [masks] if self.packing else None
        return prepared

    def _batch_key(self, prepared: PreparedInput) -> Hashable | None:
        """Return a key that items of one batch must share; None if the item must run alone."""
        if self.info.batching == "single":
            return None
        parameters = orjson.dumps(prepared.forward, option=orjson.OPT_SORT_KEYS)
        first = prepared.chunks[0]
        if self.task.kind != "text":
            return parameters, tensor_shapes(first)
        return parameters, frozenset(first)

    # ── worker thread: forward ──

    def forward(self, prepared: list[PreparedInput]) -> list[Any]:
        """Return the raw outputs of each input, a list with one per row.

        The batch is cut to the rows that run in a turn. Other models run steps at its yield points
        (yield_points.py), where it stops if all items are cancelled: each input then gets None."""

        def is_wanted() -> bool:
            return not all(item.future and item.future.done() for item in prepared)

        try:
            with self._yield_points.active(self.others, is_wanted):
                return self._forward(prepared)
        except StepCancelled:
            return [None] * len(prepared)

    def _forward(self, prepared: list[PreparedInput]) -> list[Any]:
        if not self.task.stages:
            return [self.pipe(*item.chunks, **item.forward) for item in prepared]
        waiting = [
            (item, n) for item in prepared for n in range(len(item.outputs), len(item.chunks))
        ]
        sizes = [count_tokens(item.chunks[n]) * item.sequences for item, n in waiting]
        # in generation, where a step is as fast with many rows, other models run between layers
        layers = self._yield_points.depth if self.calls_generate else 1
        waiting = waiting[: self._times.fitting(sizes, self.others.max_turn_s, layers)]
        rows = [item.chunks[n] for item, n in waiting]
        masks = [item.masks[n] for item, n in waiting if item.masks] or None
        started_at = time.monotonic() - self.others.total_s
        for part in self._sub_batches(rows):
            outputs = self._forward_rows(rows[part], prepared[0].forward, masks and masks[part])
            for (item, _), output in zip(waiting[part], outputs, strict=True):
                item.outputs.append(output)
        seconds = time.monotonic() - self.others.total_s - started_at
        if self.calls_generate:
            seconds = self._yield_points.first_forward_s
        if rows:
            self._times.learn(sum(sizes[: len(rows)]), 0, seconds)
        return [item.take_outputs() for item in prepared]

    def _sub_batches(self, rows: list[ModelInputs]) -> Iterator[slice]:
        """Yield slices of rows that run together: at most `max_rows`, and media of equal shape."""
        any_shape = self.task.kind == "text"
        max_rows = 1 if self.info.batching == "single" else self.max_rows
        start = 0
        for end in range(1, len(rows) + 1):
            is_full = end - start == max_rows or end == len(rows)
            if is_full or not (any_shape or tensor_shapes(rows[start]) == tensor_shapes(rows[end])):
                yield slice(start, end)
                start = end

    def _forward_rows(
        self, rows: list[ModelInputs], parameters: dict[str, Any], masks: list[list[int]] | None
    ) -> list[Any]:
        """Run the rows as one batch and return one output per row."""
        if len(rows) == 1 and self.packing is None:
            return [self.pipe.forward(rows[0], **parameters)]
        if self.task.kind != "text":
            return split_output(self.pipe.forward(stack(rows), **parameters), len(rows), None)
        collate: Any = pad_collate_fn
        batch = rows[0] if len(rows) == 1 else collate(self.pipe.tokenizer, None)(rows)
        counts = [row["input_ids"].shape[-1] for row in rows]
        if self.packing is None:
            return split_output(self.pipe.forward(batch, **parameters), len(rows), counts)
        attention_mask = batch.get("attention_mask")
        attended = counts if attention_mask is None else attention_mask.sum(1).tolist()
        with self.packing.batch(attended, batch["input_ids"].shape[1], masks):
            output = self.pipe.forward(batch, **parameters)
        return split_output(output, len(rows), counts)

    # ── pool threads: postprocess ──

    def finish(self, item: PipelineItem, raw: Any) -> bytes:
        """Return the response to an item as JSON, from its raw output."""
        prepared = item.prepared
        if not self.task.stages:
            return to_json(raw)
        if not prepared.pixels:
            return self._postprocess(prepared, raw)
        with self.decode_limiter.lease() as lease:
            lease.take(prepared.pixels * self.reader.values_per_pixel // FREE_VALUES_PER_PIXEL)
            return self._postprocess(prepared, raw)

    def _postprocess(self, prepared: PreparedInput, raw: Any) -> bytes:
        if prepared.masks is not None:
            pairs = zip(raw, prepared.masks, strict=True)
            raw = [scatter_logits(output, positions) for output, positions in pairs]
        with self._replica() as pipe:
            outputs = raw if isinstance(pipe, ChunkPipeline) else raw[0]
            return to_json(pipe.postprocess(outputs, **prepared.postprocess))


def copy_pipeline(pipe: Pipe) -> Pipe:
    """Copy a pipeline, all but its model, vocoder and codec, which the copy shares."""
    codec = getattr(pipe.processor, "audio_tokenizer", None)
    shared = pipe.model, getattr(pipe, "vocoder", None), codec
    return copy.deepcopy(pipe, {id(module): module for module in shared})


# ── `parameters.truncation`, also where a pipeline sets none ──


class TruncatingTokenizer:
    """A tokenizer with a fixed truncation. Raises InvalidInput for a strategy that does not suit
    the texts, such as `only_second` for a single one."""

    def __init__(self, tokenizer: Any, truncation: bool | str, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {"truncation": truncation}
        if truncation not in (False, "do_not_truncate"):
            self._options["max_length"] = max_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._tokenizer, *args, **{**kwargs, **self._options})

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._tokenizer.apply_chat_template, *args, **{**kwargs, **self._options})

    def _run(self, tokenize: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return tokenize(*args, **kwargs)
        except Exception as error:  # tokenizers raise no other class
            if "truncat" not in str(error).lower():
                raise
            reason = f"is {self._options['truncation']}; with it the text cannot be cut to fit"
            raise InvalidInput.at("parameters.truncation", f"{reason} ({error})") from error


# ── rows and their outputs ──


def check_tokens(chunks: Sequence[ModelInputs], limit: int, vocabulary: int, hint: str) -> int:
    """Return the longest chunk's token count. Raises InvalidInput for too many chunks, for a chunk
    of no or more than `limit` tokens (with a hint), and for ids outside the vocabulary."""
    if len(chunks) > limits.MAX_CHUNKS:
        raise InvalidInput(
            f"the input makes {len(chunks)} chunks; at most {limits.MAX_CHUNKS} are accepted",
            "inputs",
        )
    ids = [chunk["input_ids"] for chunk in chunks if "input_ids" in chunk]
    counts: list[int] = [tensor.shape[-1] for tensor in ids] or [1]
    if max(counts) > limit:
        message = f"the text has {max(counts)} tokens; the model takes {limit}{hint}"
        raise InvalidInput(message, "inputs")
    if not min(counts):
        raise NoTokens("the text has no tokens", "inputs")
    if any(int(tensor.max()) >= vocabulary for tensor in ids):
        raise InvalidInput("the text has a token outside the model's vocabulary", "inputs")
    return max(counts)


def count_tokens(row: ModelInputs) -> int:
    """Return the tokens of a row of text; other rows count as an efficient batch."""
    return row["input_ids"].shape[-1] if "input_ids" in row else EFFICIENT_TOKENS


def tensor_shapes(row: ModelInputs) -> Hashable:
    """Return a key that is equal for rows that can be stacked: names, and shapes without B."""
    return tuple((k, getattr(v, "shape", (1,))[1:]) for k, v in sorted(row.items()))


def stack(rows: Sequence[ModelInputs]) -> ModelInputs:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: torch.cat(v) if isinstance(v[0], torch.Tensor) else v for k, v in columns.items()}


def share_equal_tensors(chunks: Iterable[ModelInputs]) -> Iterator[ModelInputs]:
    """Replace tensors that equal the first chunk's by that one: zero-shot-object-detection makes
    the same image again for each label."""
    first: ModelInputs = {}
    for chunk in chunks:
        first = first or chunk
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and torch.equal(value, chunk[key]):
                chunk[key] = value
        yield chunk


def tokenize_pairs(
    pipe: Pipe,
    text: str,
    candidate_labels: Sequence[str],
    hypothesis_template: str = "This example is {}.",
) -> Iterable[ModelInputs]:
    """Return what zero-shot classification makes of a text and its labels, with one call of the
    tokenizer: the pipeline's own call for each label holds the interpreter three times as long."""
    pairs, [sequence] = pipe._args_parser(text, candidate_labels, hypothesis_template)
    try:
        tokens = pipe.tokenizer(pairs, truncation="only_first")
    except Exception:  # a label longer than the model's limit; the pipeline does not truncate it
        chunks: Iterable[ModelInputs] = pipe.preprocess(text, candidate_labels, hypothesis_template)
        return chunks
    return [
        {
            "candidate_label": label,
            "sequence": sequence,
            "is_last": n == len(pairs) - 1,
            **{name: torch.tensor([rows[n]]) for name, rows in tokens.items()},
        }
        for n, label in enumerate(candidate_labels)
    ]


def split_output(output: Any, size: int, counts: Sequence[int] | None) -> list[Any]:
    """Split a batch's output into one of the same type for each of `size` rows, equal to the
    output of the row alone.

    `counts` are the rows' tokens, if they have any. Values per token are trimmed to them: integers
    [B, L] and anything [B, L, …], but not scores [B, labels], which may be as wide as the batch."""
    width = max(counts) if counts else None

    def pick(value: Any, row: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == size:
            element = value[row]  # tensors of unequal sizes stay in a list, which is their batch
            return [element] if isinstance(element, torch.Tensor) else element
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != size:
            return value
        value = value[row : row + 1]
        per_token = value.ndim > 2 or (value.ndim == 2 and not value.is_floating_point())
        if counts and per_token and value.shape[1] == width:
            value = value[:, : counts[row]]
        return value

    if isinstance(output, torch.Tensor):
        return [pick(output, row) for row in range(size)]
    used = [(key, value) for key, value in output.items() if key not in UNUSED_OUTPUTS]
    return [type(output)({key: pick(value, row) for key, value in used}) for row in range(size)]


# ── text generation ──


def plan_generation(pipe: Pipe, forward: dict[str, Any], prompt_tokens: int, limit: int) -> int:
    """Set `max_new_tokens` in `forward`; return the number of rows that the prompt becomes.

    A requested number that exceeds the context raises InvalidInput; a default is reduced.
    """
    config = pipe.model.generation_config
    settings = {**config.to_diff_dict(), **forward}
    settings.pop("tokenizer", None)
    settings = pipe._prepare_generate_kwargs(settings)
    try:
        effective = type(config)(**settings)
        effective.validate()
    except ValueError as error:
        raise InvalidInput(str(error), "parameters") from error
    room = limit - prompt_tokens
    max_new_tokens = forward.get("max_new_tokens")
    if room < max(1, max_new_tokens or 1):
        raise InvalidInput(
            f"the text has {prompt_tokens} tokens and max_new_tokens is {max_new_tokens or 1}; "
            f"the model's context is {limit}",
            "parameters.max_new_tokens",
        )
    if max_new_tokens is None:
        default = config.max_new_tokens or DEFAULT_NEW_TOKENS
        if config.max_length and not config.max_new_tokens:  # max_length includes the prompt
            default = max(1, config.max_length - prompt_tokens)
        max_new_tokens = forward["max_new_tokens"] = min(room, default)
    if (min_new_tokens := forward.get("min_new_tokens") or 0) > max_new_tokens:
        raise InvalidInput(
            f"min_new_tokens is {min_new_tokens}; "
            f"it must be at most max_new_tokens, which is {max_new_tokens}",
            "parameters.min_new_tokens",
        )
    return max(effective.num_beams or 1, effective.num_return_sequences or 1)


def reserved_tokens(pipe: Pipe, forward: Mapping[str, Any], limit: int) -> int:
    """Return the room for new tokens that truncation leaves behind a prompt: `max_new_tokens`, or
    the default's, but of the default at most half of the context."""
    if requested := forward.get("max_new_tokens"):
        return int(requested)
    default = pipe.model.generation_config.max_new_tokens or DEFAULT_NEW_TOKENS
    return min(default, limit // 2)
