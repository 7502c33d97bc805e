"""A transformers pipeline, cut at its own seams: preprocess → forward → postprocess.

Preprocessing and postprocessing run in pool threads on copies of the pipeline that share the
model but nothing else, because a fast tokenizer's truncation and padding settings are mutable
state. The forward of a batch runs on the worker thread: packed where the model can
(packed_attention.py), otherwise padded or one by one. Tasks whose pipelines have no clean seams are
called whole.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson
import torch
from transformers.pipelines.base import ChunkPipeline, pad_collate_fn

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from worker.architectures import advice, made_for
from worker.model import cpu_linear, memory, missing_weights
from worker.model.loading import LoadingFailed, LoadOptions, Pipe, load_pipeline
from worker.model.self_check import Differs, check_left_padding, check_packing, check_padding
from worker.pipeline.inputs import read_input
from worker.pipeline.limits import (
    check_decision,
    check_strides,
    check_strings,
    check_tokens,
    context_limit,
    output_planes,
    plan_generation,
    reads_prompt,
    vocabulary,
)
from worker.pipeline.media import PLANES
from worker.pipeline.outputs import split_generated, split_rows, spread_masks, to_json
from worker.pipeline.packed_attention import CannotPack, Packing
from worker.pipeline.replicas import Replicas, panics_as_errors, stage_parameters
from worker.pipeline.warm_up import warm_up_input
from worker.protocol import ModelInfo, PipelineInput
from worker.room import Room
from worker.tasks import TASKS, resolve_task

log = logging.getLogger("onequeue.pipelines")

Batching = Literal["packed", "padded", "same shape", "single"]
Chunk = dict[str, Any]


@dataclass(slots=True)
class Prepared:
    """An input ready for the worker: the rows it needs, and the parameters of later stages."""

    chunks: list[Any]
    forward: dict[str, Any]
    postprocess: dict[str, Any]
    tokens: int = 1  # of the longest chunk
    copies: int = 1  # rows that generation makes of each chunk
    masks: list[list[int]] | None = None  # fill-mask: mask positions of each row
    pixels: int = 0  # of the image, where the answer is as large


def load_runner(options: LoadOptions, max_rows: int, pool_threads: int) -> "PipelineRunner":
    pipe, lacking = load_pipeline(options)
    room = Room(int(options.max_image_mp * 1e6))
    task = resolve_task(options.task)
    if missing_weights.matter(pipe.model, lacking, partial(_warm_up_answer, pipe, task)):
        config = pipe.model.config.to_dict()
        advised = "" if task in made_for(config) else f"; {advice(config)}"
        raise LoadingFailed(
            f"the model {options.model!r} was not made for {task}: its checkpoint has no weights "
            f"for {missing_weights.shown(lacking)}{advised}"
        )
    return PipelineRunner(pipe, task, options.model, max_rows, pool_threads, room)


def _warm_up_answer(pipe: Pipe, task: str) -> bytes:
    """What the pipeline says to the warm-up input; all that it finds, where it would choose."""
    inputs, parameters = warm_up_input(task, pipe)
    if "threshold" in TASKS[task].parameters:
        parameters = {**parameters, "threshold": 0.0}
    payload = PipelineInput(inputs, parameters)
    with Room(1 << 20).place() as place:
        return to_json(
            pipe(read_input(task, payload, pipe, context_limit(pipe), place), **parameters)
        )


class PipelineRunner:
    """Implements worker.protocol.Runner for one pipeline."""

    def __init__(
        self,
        pipe: Pipe,
        task_name: str,
        model_name: str,
        max_rows: int,
        pool_threads: int,
        room: Room,
    ) -> None:
        self.pipe = pipe
        self.task_name = task_name
        self.task = TASKS[task_name]
        self.max_rows = max_rows
        self.room = room
        self.planes = output_planes(task_name, pipe)
        self.limit = context_limit(pipe)
        self.vocabulary = vocabulary(pipe)
        self.generates = task_name == "text-generation"
        if pipe.tokenizer is not None and self.task.kind == "text":
            pipe.tokenizer.padding_side = "left" if self.generates else "right"
        self.packing: Packing | None = None
        batching, why = self._choose_batching()
        self.info = ModelInfo(
            task=task_name,
            model=model_name,
            device=str(pipe.device),
            dtype=str(pipe.dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in pipe.model.parameters()),
            batching=batching,
            why=why,
        )
        self._copies = Replicas(pipe, pool_threads)
        if pipe.device.type == "cpu" and cpu_linear.spares_emulation(pipe.dtype):
            self._lay_out()

    def _choose_batching(self) -> tuple[Batching, str]:
        """The best way to batch that gives the model's own output; why none better."""
        if not self.task.stages or not self.task.batches:
            return "single", ""
        if self.task.kind != "text":
            return "same shape", ""
        model, tokenizer = self.pipe.model, self.pipe.tokenizer
        if tokenizer is None or tokenizer.pad_token_id is None:
            return "single", "its tokenizer has no padding token"
        if tokenizer.pad_token_id >= self.vocabulary:
            return "single", "it does not know its tokenizer's padding token"
        if self.generates:
            why = _refusal(lambda: check_left_padding(model, tokenizer, self.limit))
            return ("single", why) if why else ("padded", "")

        def pack() -> None:
            packing = Packing(model)
            check_packing(packing, tokenizer, self.limit)
            packing.attach()
            self.packing = packing

        if not (why := _refusal(pack)):
            return "packed", ""
        if why_not_padded := _refusal(lambda: check_padding(model, tokenizer, self.limit)):
            return "single", f"packed: {why}; padded: {why_not_padded}"
        return "padded", why

    def _lay_out(self) -> None:
        """Spare a CPU without bfloat16 its emulation, unless a layer's weights are looked at."""
        model = self.pipe.model
        cpu_linear.pack(model, memory.free_bytes(self.pipe.device))
        try:
            self.warm_up()
        except Exception as error:
            cpu_linear.unpack(model)
            log.warning("this CPU emulates bfloat16: DTYPE=float32 is faster here (%r)", error)

    # ── pool threads ──

    def prepare(self, item: WorkItem) -> None:
        with self._copies.borrow() as pipe:
            prepared = self._prepare(pipe, item.payload)
        item.prepared = prepared
        item.rows = len(prepared.chunks) * prepared.copies
        if self.task.kind == "text" and self.task.stages:
            item.tokens = sum(chunk["input_ids"].shape[-1] for chunk in prepared.chunks)
            item.tokens *= prepared.copies
            item.width = prepared.tokens
        item.key = self._key(prepared) or id(item)

    def _key(self, prepared: Prepared) -> Hashable | None:
        """What an item shares with those it may run with; None if it must run alone."""
        if self.info.batching == "single" or "stop_strings" in prepared.forward:
            return None
        shared = orjson.dumps(prepared.forward, option=orjson.OPT_SORT_KEYS)
        if self.task.kind != "text":
            return shared, shape(prepared.chunks[0])
        prompt = (
            prepared.tokens if self.generates and reads_prompt(self.pipe, prepared.forward) else 0
        )
        return shared, frozenset(prepared.chunks[0]), prompt

    def _prepare(self, pipe: Pipe, payload: PipelineInput) -> Prepared:
        check_strides(payload.parameters, self.limit)
        with self.room.place(payload.allowance) as place, panics_as_errors():
            inputs = read_input(self.task_name, payload, pipe, self.limit, place)
            if self.task.kind != "text" or not self.task.stages:
                self._check_strings(pipe, inputs, payload)
            if not self.task.stages:
                return Prepared([inputs], dict(payload.parameters), {})
            before, during, after = stage_parameters(pipe, payload.parameters)
            made = pipe.preprocess(inputs, **before)
            chunks = self._share_equals(made) if isinstance(pipe, ChunkPipeline) else [made]
            pixels = place.held if self.planes > 1 else 0
        prepared = Prepared(chunks, during, after, pixels=pixels)
        prepared.tokens = check_tokens(chunks, self.limit, self.vocabulary)
        if self.generates:
            own_tokenizer = during.pop("tokenizer", None)  # there with stop strings
            prepared.copies = plan_generation(pipe, during, prepared.tokens, self.limit)
            if own_tokenizer is not None:
                during["tokenizer"] = self.pipe.tokenizer
        if self.task_name == "fill-mask":
            if "target_ids" not in after and after.get("top_k", 0) > self.vocabulary:
                raise InvalidInput(f"the model has {self.vocabulary} tokens", "parameters.top_k")
            mask_id = pipe.tokenizer.mask_token_id
            prepared.masks = [mask_positions(chunk, mask_id) for chunk in chunks]
        return prepared

    def _share_equals(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """The chunks, with one tensor for all that equal the first's: zero-shot-object-detection
        makes the same image again for each label."""
        made: list[Chunk] = []
        for chunk in chunks:
            made.append(chunk)
            for key, value in made[0].items() if self.task.kind == "json" else ():
                if isinstance(value, torch.Tensor) and torch.equal(value, chunk[key]):
                    chunk[key] = value
        return made

    def _check_strings(self, pipe: Pipe, inputs: Any, payload: PipelineInput) -> None:
        """What is tokenized where `check_tokens` does not see it."""
        if pipe.tokenizer is not None:
            fields = {
                **payload.parameters,
                **(inputs if isinstance(inputs, dict) else {"": inputs}),
            }
            strings = [fields[key] for key in ("", "text") if isinstance(fields.get(key), str)]
            template = fields.get("hypothesis_template", "This is a photo of {}.")
            strings += [template.format(label) for label in fields.get("candidate_labels", [])]
            check_strings(pipe, strings, self.limit)
        if self.task_name == "decision":
            check_decision(pipe, inputs, self.limit)

    def finish(self, item: WorkItem, raw: Any) -> bytes:
        """The answer as JSON."""
        prepared: Prepared = item.prepared
        if not self.task.stages:
            return to_json(raw)
        with self.room.place() as place, self._copies.borrow() as pipe:
            if prepared.pixels:
                place.take(prepared.pixels * self.planes // PLANES)
            if prepared.masks is not None and self.packing is not None:
                raw = [
                    spread_masks(output, masks)
                    for output, masks in zip(raw, prepared.masks, strict=True)
                ]
            outputs = raw if isinstance(pipe, ChunkPipeline) else raw[0]
            answer = pipe.postprocess(outputs, **prepared.postprocess)
            if self.task.wraps_string and isinstance(item.payload.inputs, str):
                answer = answer if "top_k" in item.payload.parameters else [answer]
            return to_json(answer)

    # ── the worker thread ──

    def forward(self, prepared: list[Prepared]) -> list[Any]:
        """Raw outputs, a list of one per row for each input."""
        with panics_as_errors():
            return self._forward(prepared)

    def _forward(self, prepared: list[Prepared]) -> list[Any]:
        if not self.task.stages:
            return [self.pipe(*p.chunks, **p.forward) for p in prepared]
        rows = [chunk for p in prepared for chunk in p.chunks]
        masks = [m for p in prepared for m in p.masks or []] or None
        outputs: list[Any] = []
        for part in self._parts(rows):
            outputs += self._forward_rows(rows[part], prepared[0].forward, masks and masks[part])
        taken = iter(outputs)
        return [[next(taken) for _ in p.chunks] for p in prepared]

    def _parts(self, rows: list[Chunk]) -> Iterator[slice]:
        """Rows that run together: at most `max_rows`, and sounds of one length only."""
        most = 1 if self.info.batching == "single" else self.max_rows
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or end - start == most or not self._alike(rows[start], rows[end]):
                yield slice(start, end)
                start = end

    def _alike(self, one: Chunk, other: Chunk) -> bool:
        return self.task.kind == "text" or shape(one) == shape(other)

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
            return split_generated(output, rows, self.pipe.model.generation_config.eos_token_id)
        lengths = [row["input_ids"].shape[-1] for row in rows]
        if self.packing is None:
            return split_rows(self.pipe.forward(batch, **parameters), len(rows), lengths)
        mask = batch.get("attention_mask")
        real = lengths if mask is None else mask.sum(1).tolist()
        with self.packing.batch(real, batch["input_ids"].shape[1], masks):
            output = self.pipe.forward(batch, **parameters)
        return split_rows(output, len(rows), lengths)

    def warm_up(self) -> None:
        inputs, parameters = warm_up_input(self.task_name, self.pipe)
        item = WorkItem(PipelineInput(inputs, parameters), None, float("inf"), 0.0)
        self.prepare(item)
        (raw,) = self.forward([item.prepared])
        self.finish(item, raw)


def _refusal(check: Callable[[], None]) -> str:
    """Why a way of batching is not used; "" if the check passes."""
    try:
        check()
    except (CannotPack, Differs) as error:
        return str(error)
    except Exception as error:  # each model class refuses in its own way
        return f"the forward raised {repr(error)[:200]}"
    return ""


def shape(chunk: Chunk) -> Hashable:
    """Equal for rows that can be stacked: the same keys, and tensors of the same shape."""
    return tuple((k, getattr(v, "shape", (1,))[1:]) for k, v in sorted(chunk.items()))


def stack(rows: Sequence[Chunk]) -> Chunk:
    """Rows of equal shapes as one batch."""
    first = rows[0]
    return {
        key: torch.cat([row[key] for row in rows])
        if isinstance(first[key], torch.Tensor)
        else [row[key] for row in rows]
        for key in first
    }


def mask_positions(chunk: Chunk, mask_token_id: int) -> list[int]:
    ids: torch.Tensor = chunk["input_ids"][0]
    positions: list[int] = (ids == mask_token_id).nonzero().squeeze(1).tolist()
    return positions
