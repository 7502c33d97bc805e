"""The model runner over paged memory: eager, compiled or captured steps."""

from typing import Literal

from torch import Tensor

from batching.sequence import Batch
from worker.model.cuda_graphs import SIZES, SPARE, DecodeGraphs, decode_graphs
from worker.model.language_model import LanguageModel
from worker.model.paged_attention import BLOCK, PagedCache, Step


class PagedRunner:
    def __init__(
        self, language: LanguageModel, blocks: int, max_model_len: int, max_running: int
    ) -> None:
        self.language = language
        self.cache = PagedCache(language.layers, blocks + SPARE, language.dtype, language.device)
        self.compile_state: Literal["running", "done", "off"] = "off"
        self._sizes = blocks, min(blocks, -(-max_model_len // BLOCK)), min(max_running, SIZES[-1])
        self._graphs = self._capture()

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] of the batch's rows."""
        if self._graphs and self._graphs.call is not self.language.call:
            self._graphs = None  # their memory is needed
            self._graphs = self._capture()  # of the model that is compiled now
        if self._graphs and self._graphs.takes(batch.spans):
            return self._graphs.forward(batch.spans, batch.ids, batch.rows)
        step = Step(self.cache, batch.spans, self.language.dtype)
        return self.language.forward(step, batch.ids, batch.rows)

    def compile(self) -> None:
        """Begin; `compile_state` tells when it is done."""
        from worker.model.compiling import compile_in_background  # seconds to import

        def done(compiled: bool) -> None:
            self.compile_state = "done" if compiled else "off"

        self.compile_state = "running"
        compile_in_background(self.language, done)

    def _capture(self) -> DecodeGraphs | None:
        return decode_graphs(self.language, self.cache, *self._sizes)
