"""Rows of tokens through a model, nothing padded where the model allows it.

    row       all texts end to end in one row from the embeddings on, positions beginning anew
    packed    embedded side by side, one row through the layers
    padded, single    as they are, where neither gives the model's own output

Which it is is found out by running the model, as for pipelines (pipeline/load.py). Decoders that
run in chunks, on blocks of memory, are paged_rows.py's.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from worker.device.self_check import (
    TOLERANCE,
    CannotRun,
    compare,
    length_beyond_windows,
    random_prompts,
)
from worker.embedding.texts import Row
from worker.messages.protocol import Batching
from worker.pipeline.loading import choose_batching, pad
from worker.pipeline.packed_attention import Packing

STATES, LOGITS = "last_hidden_state", "logits"
# From a row's states [tokens, H], or its logits [labels], to what is kept of them.
Reduce = Callable[[Tensor, Row], Tensor]


@dataclass(eq=False)
class RowModel:
    """`wanted` is a field of the model's output: STATES, one for each token, or LOGITS, one row for
    each text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limit: int
    wanted: str
    batching: Batching = field(init=False, default="single")
    why: str = field(init=False, default="")
    first_position: int | None = field(init=False, default=None)  # None: not as one row
    packing: Packing | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.by_text = self.wanted == LOGITS
        self.model.config.use_cache = False
        padding = getattr(self.model.config, "pad_token_id", None)
        firsts = dict.fromkeys((0, padding + 1 if isinstance(padding, int) else 0))
        if not any(self._runs_as_row(first) for first in firsts):
            task = "text-classification" if self.by_text else "feature-extraction"
            self.batching, self.why, self.packing = choose_batching(task, self)
        else:
            self.batching = "packed"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], reduce: Reduce) -> None:
        """Each row's result, from one forward of all."""
        made = self(rows)
        parts = made.unbind() if self.by_text else torch.split(made, [len(row.ids) for row in rows])
        for row, part in zip(rows, parts, strict=True):
            row.result = reduce(part, row)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """States [tokens of all rows, H], or logits [rows, labels]."""
        if self.first_position is not None:
            return self._as_row(rows)
        if self.batching == "single":
            return torch.cat([self._side_by_side([row]) for row in rows])
        return self._side_by_side(rows)

    def warm_up(self) -> None:
        [ids] = random_prompts(self.model, self.tokenizer, [min(3, self.limit)])
        self([Row(ids)])

    def _as_row(self, rows: Sequence[Row]) -> Tensor:
        assert self.packing is not None
        assert self.first_position is not None
        first, counts = self.first_position, [len(row.ids) for row in rows]
        batch = {"input_ids": [token for row in rows for token in row.ids]}
        batch["position_ids"] = [at for n in counts for at in range(first, first + n)]
        if rows[0].types is not None:
            batch["token_type_ids"] = [each for row in rows for each in row.types or ()]
        inputs = {k: torch.tensor([v], device=self.device) for k, v in batch.items()}
        keep = [[0]] * len(rows) if self.by_text else None
        with self.packing.batch(counts, None, keep):
            made: Tensor = self.model(**inputs)[self.wanted]
        return made if self.by_text else made[0]

    def _side_by_side(self, rows: Sequence[Row]) -> Tensor:
        counts = [len(row.ids) for row in rows]
        batch = {"input_ids": [row.ids for row in rows]}
        if rows[0].types is not None:
            batch["token_type_ids"] = [row.types or [] for row in rows]
        inputs = pad(self.tokenizer, batch).to(self.device)
        with self.packing.batch(counts, max(counts)) if self.packing else nullcontext():
            made: Tensor = self.model(**inputs)[self.wanted]
        if self.by_text:
            return made
        return torch.cat([states[:n] for states, n in zip(made, counts, strict=True)])

    def _runs_as_row(self, first: int) -> bool:
        """Whether one row gives what each text gives alone, of two near in length and a short one;
        in place if so."""
        longest = length_beyond_windows(self.model.config, self.limit)
        counts = [min(3, longest), longest, longest - longest // 8]
        rows = [Row(ids) for ids in random_prompts(self.model, self.tokenizer, counts)]
        try:
            with ExitStack() as undo:
                reference = self(rows)  # as it is: single
                self.packing, self.first_position = Packing(self.model), first
                undo.callback(self.packing.attach())
                compare(self(rows), reference, TOLERANCE[reference.dtype])
                if self.packing.calls != len(self.packing.layers):
                    raise CannotRun("its layers do not call a registered attention function")
                undo.pop_all()
        except Exception:  # as each model class refuses; choose_batching says why
            self.packing = self.first_position = None
            return False
        if self.by_text:
            self._end_early(rows, reference)
        return True

    def _end_early(self, rows: Sequence[Row], reference: Tensor) -> None:
        """The head looks at the first token of each text alone: in the last layer attention sees
        all, and from where its answer is added to the layer's input on, only those go on. If that
        gives the same."""
        assert self.packing is not None
        join = find_join(self.packing.layers[-1], lambda: self(rows))
        if join is None:
            return
        undo = self.packing.prune_last_layer(join)
        try:
            compare(self(rows), reference, TOLERANCE[reference.dtype])
        except Exception:  # as the rest of its last layer refuses
            undo()


def find_join(layer: nn.Module, run: Callable[[], object]) -> nn.Module | None:
    """The module in `layer` that is called with attention's answer and the layer's own input, as is
    seen while `run` runs the model; None where a layer adds by itself."""
    inputs: list[Tensor] = []
    found: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        if module is layer:
            inputs[:] = args[:1]
        elif inputs and len(args) == 2 and args[1] is inputs[0]:
            found.append(module)

    handles = [module.register_forward_pre_hook(note) for module in layer.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if len(found) == 1 else None
