"""A checkpoint in memory, with what sentence-transformers wrote beside it: what embedders and
rerankers have in common. On the worker's thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from worker.embedding.files import SentenceFiles, read_files
from worker.embedding.paged_rows import PagedRows, paged_rows
from worker.embedding.rows import STATES, RowModel
from worker.embedding.texts import TextReader
from worker.model import loading
from worker.model.language_model import LanguageModel
from worker.model.loading import ModelOptions, local_path, model_info
from worker.model.self_check import CannotRun
from worker.pipeline import native_packing
from worker.pipeline.limits import context_limit, vocabulary
from worker.protocol import ModelInfo

log = logging.getLogger("onequeue.embedding")

DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "embedding"


@dataclass(frozen=True, slots=True)
class ScoringOptions(ModelOptions):
    compile: str = "auto"
    allow_dimensions: bool = False
    max_running: int = 256


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory."""

    options: ScoringOptions
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    files: SentenceFiles
    lacking: dict[str, str]  # weights that it has not, by name

    @property
    def limit(self) -> int:
        """Tokens of a text at most."""
        return min(context_limit(self), self.files.max_length or context_limit(self))

    @property
    def reader(self) -> TextReader:
        return TextReader(self.tokenizer, self.limit, vocabulary(self), self.files.lower_case)

    def rows(self, model: PreTrainedModel, wanted: str) -> RowModel | PagedRows:
        """Through this model or part of it, in the way that it can take."""
        if wanted == STATES:
            language = LanguageModel(self.options.model, model, self.tokenizer)
            try:
                return paged_rows(
                    language, self.limit, self.options.compile, self.options.max_running
                )
            except CannotRun as error:
                log.debug("not paged: %s", error)
        rows = RowModel(model, self.tokenizer, self.limit, wanted)
        native_packing.begin(rows.model, rows.packing, rows.warm_up, self.options.compile)
        return rows

    def info(self, task: str, rows: RowModel | PagedRows) -> ModelInfo:
        return model_info(task, self.options.model, self.model, rows.batching, rows.why)


def load_checkpoint(options: ScoringOptions, choose: Callable[[Any], Any]) -> Checkpoint:
    """By one of transformers' auto classes, which `choose` knows from the configuration."""
    path = local_path(options.model, DEMO_FOLDER)
    files = read_files(path)
    if files.subfolder:
        path = str(Path(path) / files.subfolder)  # as old versions saved it
    model, tokenizer, lacking = loading.load_checkpoint(options, path, choose)
    return Checkpoint(options, model, tokenizer, files, lacking)
