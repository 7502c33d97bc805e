"""Run token rows through a model in one forward pass, without padding where the model allows it.

    one row           all texts concatenated from the embeddings on, position ids restart
    packed            texts embedded side by side [B, L], the layers see one row
    padded, single    side by side with padding, or one by one

The first of these that keeps the model's own output is used; loading compares outputs, as for
pipelines (pipeline/loading.py). Decoders that run in chunks are in engine.py.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batching.step_times import StepTimes
from worker.device.self_check import (
    TOLERANCE,
    CannotRun,
    length_beyond_windows,
    random_prompts,
)
from worker.embedding.pooling import PoolFunction
from worker.embedding.tokenization import TokenRow
from worker.load_context import on_worker
from worker.messages.protocol import Batching, OtherModels
from worker.model.check import Reference
from worker.model.long_context import factors_change
from worker.pipeline.loading import choose_batching, pad
from worker.pipeline.packed_attention import Packing
from worker.pipeline.yield_points import YieldPoints

STATES, LOGITS = "last_hidden_state", "logits"


@dataclass(eq=False)
class SinglePassModel:
    """`output_name` is a field of the model's output: STATES, one per token, or LOGITS, one row per
    text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limit: int
    output_name: str
    batching: Batching = field(init=False, default="single")
    batching_reason: str = field(init=False, default="")
    first_position: int | None = field(init=False, default=None)  # None: not as one row
    packing: Packing | None = field(init=False, default=None)
    times: StepTimes = field(init=False, default_factory=StepTimes)
    yield_points: YieldPoints = field(init=False)

    def __post_init__(self) -> None:
        self.per_text = self.output_name == LOGITS
        self.model.config.use_cache = False
        padding = getattr(self.model.config, "pad_token_id", None)
        # RoBERTa counts positions from the padding token's id
        candidates = dict.fromkeys((0, padding + 1 if isinstance(padding, int) else 0))
        if not factors_change(self.model, self.limit) and any(
            on_worker(partial(self._runs_as_one_row, first)) for first in candidates
        ):
            self.batching = "packed"
        else:
            task = "text-classification" if self.per_text else "feature-extraction"
            self.batching, self.batching_reason, self.packing = choose_batching(task, self)
        self.yield_points = YieldPoints(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def run(self, rows: Sequence[TokenRow], pool: PoolFunction, others: OtherModels) -> None:
        """Set the result of each row, or of the first ones, from one forward pass."""
        rows = [row for row in rows if row.result is None]
        if not rows:  # another item of their batch has failed
            return
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
            row.result = pool(part, row)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[TokenRow]) -> Tensor:
        """Return states [tokens of all rows, H], or logits [rows, labels]."""
        if self.first_position is not None:
            return self._forward_one_row(rows)
        if self.batching == "single":
            return torch.cat([self._forward_side_by_side([row]) for row in rows])
        return self._forward_side_by_side(rows)

    def warm_up(self) -> None:
        [ids] = random_prompts(self.model, self.tokenizer, [min(3, self.limit)])
        self([TokenRow(ids)])

    def _forward_one_row(self, rows: Sequence[TokenRow]) -> Tensor:
        assert self.packing is not None
        assert self.first_position is not None
        first, counts = self.first_position, [len(row.ids) for row in rows]
        batch = {"input_ids": [token for row in rows for token in row.ids]}
        batch["position_ids"] = [at for n in counts for at in range(first, first + n)]
        if rows[0].token_type_ids is not None:
            batch["token_type_ids"] = [type_ for row in rows for type_ in row.token_type_ids or ()]
        inputs = {k: torch.tensor([v], device=self.device) for k, v in batch.items()}
        head_positions = [[0]] * len(rows) if self.per_text else None
        with self.packing.batch(counts, None, head_positions):
            output: Tensor = self.model(**inputs)[self.output_name]
        return output if self.per_text else output[0]

    def _forward_side_by_side(self, rows: Sequence[TokenRow]) -> Tensor:
        counts = [len(row.ids) for row in rows]
        batch = {"input_ids": [[*row.ids] for row in rows]}
        if rows[0].token_type_ids is not None:
            batch["token_type_ids"] = [[*(row.token_type_ids or ())] for row in rows]
        inputs = pad(self.tokenizer, batch).to(self.device)
        with self.packing.batch(counts, max(counts)) if self.packing else nullcontext():
            output: Tensor = self.model(**inputs)[self.output_name]
        if self.per_text:
            return output
        return torch.cat([states[:n] for states, n in zip(output, counts, strict=True)])

    def _runs_as_one_row(self, first: int) -> bool:
        """Return whether texts in one row, with positions from `first` on, give the output of each
        text alone. If so, keep running like that."""
        longest = length_beyond_windows(self.model.config, self.limit)
        counts = [min(3, longest), longest, longest - longest // 8]
        rows = [TokenRow(ids) for ids in random_prompts(self.model, self.tokenizer, counts)]
        try:
            alone = Reference(lambda rows: [self(rows)], rows)  # one by one
            packing = Packing(self.model)
            with ExitStack() as undo:
                undo.callback(packing.attach())
                undo.callback(self._set_packing)
                self._set_packing(packing, first)
                outputs = self(rows)
            alone.check([outputs], TOLERANCE[outputs.dtype])
            alone.close()
            if packing.calls != len(packing.layers):
                raise CannotRun("its layers do not call a registered attention function")
        except Exception:  # each model class raises its own errors; choose_batching logs a reason
            return False
        packing.attach()
        self._set_packing(packing, first)
        if self.per_text:
            self._prune_last_layer(rows, alone)
        return True

    def _set_packing(self, packing: Packing | None = None, first: int | None = None) -> None:
        self.packing, self.first_position = packing, first

    def _prune_last_layer(self, rows: Sequence[TokenRow], alone: Reference) -> None:
        """Run only the first token of each text, the only one that the head sees, through the part
        of the last layer that follows attention, if that keeps the logits."""
        assert self.packing is not None
        residual_add = find_residual_add(self.packing.layers[-1], lambda: self(rows))
        if residual_add is None:
            return
        undo = self.packing.prune_last_layer(residual_add)
        try:
            outputs = self(rows)
            alone.check([outputs], TOLERANCE[outputs.dtype])
        except Exception:  # each model class raises its own errors
            undo()


def find_residual_add(layer: nn.Module, run: Callable[[], object]) -> nn.Module | None:
    """Return the submodule of `layer` that receives attention's output and the layer's own input.

    `run` runs the model. None where the layer adds the two by itself.
    """
    layer_input: list[Tensor] = []
    candidates: list[nn.Module] = []

    def record(module: nn.Module, args: Any) -> None:
        if module is layer:
            layer_input[:] = args[:1]
        elif layer_input and len(args) == 2 and args[1] is layer_input[0]:
            candidates.append(module)

    handles = [module.register_forward_pre_hook(record) for module in layer.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return candidates[0] if len(candidates) == 1 else None
