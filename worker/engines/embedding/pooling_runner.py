"""What embedders and rerankers share. One whose model runs texts in one pass is served like a
pipeline's runner, a decoder by the generation engine (engine.py).

    prepare (pool thread): tokenize and validate
    → forward (worker thread): run the token rows in one pass, apply the head to their states
    → finish (pool thread): convert to the response's numbers
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from batching.sequence import Batch, Span, TokenIds
from worker.engines.embedding.pooling import Head
from worker.engines.embedding.single_pass import SinglePassModel
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.engines.pipeline.engine import run_alone
from worker.messages.generation import TEXT_ONLY, transcription_chat
from worker.messages.protocol import ALONE, CUT, Cut, ModelInfo, OtherModels, TextModel
from worker.messages.scoring import EmbeddingInput, ScoringInput
from worker.model.attention.kv_cache import BLOCK
from worker.model.paged_runner import PagedRunner

Payload = TypeVar("Payload", bound=EmbeddingInput | ScoringInput)
Result = TypeVar("Result")


RowModel = SinglePassModel | PagedRunner


class PoolingRunner(ABC, Generic[Payload, Result]):
    """Implements Runner, if its model runs texts in one pass, and TextModel of
    worker.messages.protocol. `head` gives the output of a row by its states."""

    warm_up_input: Payload  # the smallest valid one
    others: OtherModels = ALONE
    reads_last_state = True  # and no other one
    # of input processors
    eos_token_ids: Sequence[int] = ()
    media_preprocessor = None

    def __init__(
        self, model: RowModel, head: Head, tokenizer: TextTokenizer, info: ModelInfo
    ) -> None:
        self.model, self.head = model, head
        self.tokenizer, self.hf_tokenizer = tokenizer, tokenizer.tokenizer
        self.info = info
        self.max_model_len = tokenizer.limit
        self.refused_media, self.transcription_chat = TEXT_ONLY, transcription_chat
        self.encode, self.render = tokenizer.encode, tokenizer.render
        self.decode, self.token = tokenizer.decode, tokenizer.token

    @property
    def text_model(self) -> TextModel:
        return self

    def prepare(self, item: WorkItem[Payload, list[TokenRow]]) -> None:
        """Tokenize a payload; set `prepared`, `rows`, `tokens` and `width`. Raises InvalidInput."""
        rows = self.tokenize(item.payload)
        for row in rows:
            row.ids = TokenIds(row.ids)
            row.token_type_ids = row.token_type_ids and TokenIds(row.token_type_ids)
        counts = [len(row.ids) for row in rows]
        item.prepared = rows
        item.rows, item.tokens, item.width = len(rows), sum(counts), max(counts)

    @abstractmethod
    def tokenize(self, payload: Payload) -> list[TokenRow]:
        """Return the token rows of a payload. Raises InvalidInput."""

    @torch.inference_mode()
    def forward(self, prepared: list[list[TokenRow]]) -> list[list[Tensor] | Cut]:
        """Return the outputs of an item's rows; CUT where rows need another batch."""
        assert isinstance(self.model, SinglePassModel)
        self.model.run([row for rows in prepared for row in rows], self.head, self.others)
        outputs = [[row.output.tensor() for row in rows if row.output] for rows in prepared]
        pairs = zip(prepared, outputs, strict=True)
        return [output if len(output) == len(rows) else CUT for rows, output in pairs]

    def finish(self, item: WorkItem[Payload], raw: list[Tensor]) -> Result:
        """Return an item's result from the outputs of its rows. Raises ItemFailed for NaN."""
        if not all(output.isfinite().all() for output in raw):
            raise ItemFailed("the model returned NaN or infinity for this input")
        return self.result(item, raw)

    @abstractmethod
    def result(self, item: WorkItem[Payload], raw: list[Tensor]) -> Result:
        """Do the same for finite outputs."""

    def warm_up(self) -> None:
        """Run the smallest valid payload; raise if the model is broken."""
        run_alone(self, self.warm_up_input)


def states_of(model: RowModel, row: TokenRow) -> Tensor:
    """Return the states [tokens, H] of a row, which runs alone."""
    if isinstance(model, SinglePassModel):
        return model([row])
    count = len(row.ids)
    blocks = range(-(-count // BLOCK))
    return model.forward(Batch([Span(blocks, 0, count)], row.ids, range(count)))
