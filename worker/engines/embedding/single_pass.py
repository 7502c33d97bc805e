"""Run token rows through a model in one forward pass, as pipelines do: packed, padded or one by one
(engines/pipeline/loading.py). Decoders that run in chunks are in engine.py.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batching.step_times import StepTimes
from worker.device.async_copy import AsyncCopy
from worker.device.self_check import random_prompts
from worker.engines.embedding.pooling import Head
from worker.engines.embedding.tokenization import TokenRow
from worker.engines.pipeline.loading import choose_batching, pad
from worker.engines.pipeline.yield_points import YieldPoints
from worker.messages.protocol import OtherModels

STATES, LOGITS = "last_hidden_state", "logits"


@dataclass(eq=False)
class SinglePassModel:
    """`output_name` is a field of the model's output: STATES, one per token, or LOGITS, one row per
    text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limit: int
    output_name: str
    times: StepTimes = field(init=False, default_factory=StepTimes)

    def __post_init__(self) -> None:
        self.per_text = self.output_name == LOGITS
        self.model.config.use_cache = False
        task = "text-classification" if self.per_text else "feature-extraction"
        self.batching, self.batching_reason, self.packing = choose_batching(task, self)
        self.yield_points = YieldPoints(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def run(self, rows: Sequence[TokenRow], head: Head, others: OtherModels) -> None:
        """Set the output of each row, or of the first ones, from one forward pass."""
        rows = [row for row in rows if row.output is None]
        if not rows:  # another item of their batch has failed
            return
        is_masked = rows[0].attended is not None  # with slower attention
        rows = [row for row in rows if (row.attended is not None) == is_masked]
        rows = rows[: self.times.fitting([len(row.ids) for row in rows], others.max_turn_s)]
        started = time.monotonic() - others.total_s
        with self.yield_points.active(others):
            outputs = self(rows)
        seconds = time.monotonic() - others.total_s - started
        self.times.learn(sum(len(row.ids) for row in rows), 0, seconds)
        if self.per_text:
            parts = outputs.unbind()
        else:
            parts = torch.split(outputs, [len(row.ids) for row in rows])
        for row, part in zip(rows, parts, strict=True):
            row.output = AsyncCopy(head(part, row))

    @torch.inference_mode()
    def __call__(self, rows: Sequence[TokenRow]) -> Tensor:
        """Return states [tokens of all rows, H], or logits [rows, labels]."""
        if self.batching == "single":
            return torch.cat([self._forward([row]) for row in rows])
        return self._forward(rows)

    def warm_up(self) -> None:
        [ids] = random_prompts(self.model, self.tokenizer, [min(3, self.limit)])
        self([TokenRow(ids)])

    def _forward(self, rows: Sequence[TokenRow]) -> Tensor:
        counts = [len(row.ids) for row in rows]
        batch = {"input_ids": [[*row.ids] for row in rows]}
        if rows[0].token_type_ids is not None:
            batch["token_type_ids"] = [[*(row.token_type_ids or ())] for row in rows]
        inputs = pad(self.tokenizer, batch).to(self.device)
        attended = [row.attended for row in rows if row.attended is not None]  # all rows or none
        for n, end in enumerate(attended):
            inputs["attention_mask"][n, end:] = 0
        packing = self.packing
        with packing.batch(counts, max(counts), attended=attended) if packing else nullcontext():
            output: Tensor = self.model(**inputs)[self.output_name]
        if self.per_text:
            return output
        return torch.cat([states[:n] for states, n in zip(output, counts, strict=True)])
