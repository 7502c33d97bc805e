"""From settings to an embedder or a reranker, on the worker thread: the checkpoint with what
sentence-transformers wrote beside it, run, and checked to have the weights that its answers depend
on.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from worker.device.self_check import TOLERANCE, CannotRun
from worker.embedding.embedder import Embedder
from worker.embedding.paged_rows import PagedRows, paged_rows
from worker.embedding.pairs import QuestionPairs, TextPairs
from worker.embedding.reranker import Reranker, of_answer, of_label
from worker.embedding.rows import LOGITS, STATES, RowModel
from worker.embedding.sentence_transformers import (
    SentenceTransformersConfig,
    activation,
    read_files,
)
from worker.embedding.texts import Row, TextReader
from worker.messages.protocol import ModelInfo
from worker.model.language_model import LanguageModel, check_generates
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    local_path,
    missing_weights_matter,
    model_info,
)
from worker.pipeline.limits import context_limit, vocabulary_size
from worker.pipeline.packed_attention import start_native_kernels

log = logging.getLogger("onequeue.embedding")


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
    files: SentenceTransformersConfig
    lacking: dict[str, str]  # weights that it has not, by name
    parameters: int  # how many there are

    @property
    def limit(self) -> int:
        """Tokens of a text at most."""
        return min(context_limit(self), self.files.max_length or context_limit(self))

    @property
    def reader(self) -> TextReader:
        return TextReader(self.tokenizer, self.limit, vocabulary_size(self), self.files.lower_case)

    def rows(self, model: PreTrainedModel, wanted: str) -> RowModel | PagedRows:
        """Through this model or part of it, in the way that it can take."""
        if wanted == STATES:
            language = LanguageModel(self.options.model, model, self.tokenizer)
            try:
                options = self.options
                return paged_rows(language, self.limit, options.compile, options.max_running)
            except CannotRun as error:
                log.debug("not paged: %s", error)
        rows = RowModel(model, self.tokenizer, self.limit, wanted)
        start_native_kernels(rows.model, rows.packing, rows.warm_up, self.options.compile)
        return rows

    def info(self, task: str, rows: RowModel | PagedRows) -> ModelInfo:
        name, count = self.options.model, self.parameters
        return model_info(task, name, self.model, count, rows.batching, rows.why)


def load_embedder(options: ScoringOptions) -> Embedder:
    """LoadingFailed if the model cannot be served."""
    with load_errors(options.model, "embeddings"):
        made = read_checkpoint(options, encoder_class)
        check_weights(made)
        rows = made.rows(made.model, STATES)
        sizes = None if options.allow_dimensions else trained_sizes(made.model.config)
        info = made.info("feature-extraction", rows)
        return Embedder(rows, made.reader, made.files, sizes, info)


def read_checkpoint(options: ScoringOptions, choose: Callable[[Any], Any]) -> Checkpoint:
    """By one of transformers' auto classes, which `choose` knows from the configuration."""
    path = local_path(options.model, "embedding")
    files = read_files(path)
    model, tokenizer, lacking = load_checkpoint(options, path, choose, files.subfolder)
    return Checkpoint(options, model, tokenizer, files, lacking, model.num_parameters())


def encoder_class(config: Any) -> Any:
    """Of a model with an encoder and a decoder, the encoder."""
    return AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel


def reranker_class(config: Any) -> Any:
    return AutoModelForCausalLM if decides_by_tokens(config) else AutoModelForSequenceClassification


def decides_by_tokens(config: Any) -> bool:
    return any(each.endswith("ForCausalLM") for each in config.architectures or ())


def check_weights(made: Checkpoint) -> None:
    """LoadingFailed where states depend on weights that the checkpoint has not."""

    @torch.inference_mode()
    def states() -> bytes:
        ids = torch.arange(1, 8, device=made.model.device)[None]
        hidden: torch.Tensor = made.model(input_ids=ids).last_hidden_state
        return hidden.float().cpu().numpy().tobytes()

    if missing_weights_matter(made.model, made.lacking, states):
        raise LoadingFailed(describe_missing_weights(made.lacking))


def trained_sizes(config: Any) -> Sequence[int] | None:
    """What vectors may be shortened to by the checkpoint's own mark, as vLLM reads it too."""
    if sizes := getattr(config, "matryoshka_dimensions", None):
        return [int(size) for size in sizes]
    return None if getattr(config, "is_matryoshka", False) else ()


def load_reranker(options: ScoringOptions) -> Reranker:
    """LoadingFailed if the model cannot be served."""
    with load_errors(options.model, "reranking"):
        made = read_checkpoint(options, reranker_class)
        decides = decides_by_tokens(made.model.config)
        return decider(made) if decides else cross_encoder(made)


def cross_encoder(made: Checkpoint) -> Reranker:
    if (labels := made.model.config.num_labels) != 1:
        raise LoadingFailed(f"it has {labels} labels; a reranker has one")
    if made.lacking:
        raise LoadingFailed(describe_missing_weights(made.lacking))
    reader, rows = made.reader, made.rows(made.model, LOGITS)
    chosen = made.files.activation or own_activation(made.model)
    info = made.info("text-classification", rows)
    return Reranker(rows, of_label, reader, TextPairs(reader), chosen, info)


def own_activation(model: PreTrainedModel) -> nn.Module | None:
    """As sentence-transformers writes it into a cross-encoder's config.json."""
    written = getattr(model.config, "sentence_transformers", None) or {}
    old = getattr(model.config, "sbert_ce_default_activation_function", None)
    path = written.get("activation_fn") or old
    return activation(path) if path else None


def decider(made: Checkpoint) -> Reranker:
    """A decoder that says yes or no."""
    model, reader = made.model, made.reader
    check_generates(model, made.lacking)
    yes, no = made.files.answers or (token_of(reader, "yes"), token_of(reader, "no"))
    probe = Row(reader.encode("yes or no", add_special_tokens=False))
    ids = torch.tensor([probe.ids], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1].float()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    weight, expected = head.weight.detach().float(), logits[yes]
    direction = weight[yes]
    if no is not None:
        direction, expected = direction - weight[no], expected - logits[no]
    body: Any = model.base_model  # typed as any module
    rows = made.rows(body, STATES)
    info, activation = made.info("yes-no", rows), made.files.activation
    reranker = Reranker(rows, of_answer(direction), reader, QuestionPairs(reader), activation, info)
    [[score]] = reranker.forward([[probe]])
    if not (score - expected).abs() <= TOLERANCE[model.dtype] * logits.abs().max():
        raise LoadingFailed("its answers are more than its last state times its output weights")
    return reranker


def token_of(reader: TextReader, word: str) -> int:
    """LoadingFailed unless it is one token."""
    ids = reader.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise LoadingFailed(f"its tokenizer has no token for {word!r}")
    return ids[0]
