"""Load an embedder or a reranker, on the worker thread: a checkpoint with the files that
sentence-transformers wrote beside it.

Loading checks that the checkpoint has the weights that the outputs depend on, and chooses the
fastest RowModel that keeps the model's own output.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from batching.batcher import DynamicBatcher
from worker.device.self_check import TOLERANCE, CannotRun
from worker.engines.embedding.embedder import Embedder
from worker.engines.embedding.engine import ScoringEngine, load_paged_runner
from worker.engines.embedding.pairs import CrossEncoderTokenizer, PromptTokenizer
from worker.engines.embedding.pooling_runner import RowModel, states_of
from worker.engines.embedding.reranker import LateReranker, Reranker, answer_logit, label_logit
from worker.engines.embedding.sentence_transformers import (
    SentenceTransformersConfig,
    make_activation,
    read_config,
)
from worker.engines.embedding.single_pass import LOGITS, STATES, SinglePassModel
from worker.engines.embedding.splade import SpladeHead
from worker.engines.embedding.tokenization import TextTokenizer, TokenRow
from worker.engines.pipeline.engine import PipelineEngine
from worker.engines.pipeline.limits import context_limit, vocabulary_size
from worker.engines.pipeline.packed_attention import start_native_kernels, use_flash_attention
from worker.load_context import on_worker
from worker.messages.protocol import Batching, Engine, ModelInfo
from worker.model.language_model import LanguageModel, check_generates
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    checkpoint_path,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    log_own_attention,
    missing_weights_matter,
    model_info,
)
from worker.model.paged_runner import PagedRunner

log = logging.getLogger("onequeue.embedding")


@dataclass(frozen=True, slots=True)
class ScoringOptions(ModelOptions):
    compile: str = "auto"
    allow_dimensions: bool = False
    embedding_pooling: str = "auto"  # auto, splade


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint, with its configuration."""

    options: ScoringOptions
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: SentenceTransformersConfig
    missing_weights: dict[str, str]
    parameters: int

    @property
    def limit(self) -> int:
        """The most tokens of a text."""
        limit = context_limit(self)
        return min(limit, self.config.max_length or limit)

    def text_tokenizer(self) -> TextTokenizer:
        size = vocabulary_size(self)
        return TextTokenizer(self.tokenizer, self.limit, size, self.config.lower_case)

    def row_model(self, model: PreTrainedModel, output_name: str) -> RowModel:
        """Return the fastest RowModel that keeps the output of this model or a part of it."""
        options = self.options
        if output_name == STATES and not self.config.late:
            language = LanguageModel(options.model, model, self.tokenizer)
            try:
                paged = load_paged_runner(language, self.limit, options.compile)
                log_own_attention(options.attention, "steps on the paged cache")
                return paged
            except CannotRun as error:
                log.debug("not paged: %s", error)
        rows = SinglePassModel(model, self.tokenizer, self.limit, output_name)
        if rows.packing:
            log_own_attention(options.attention, "packed batches")
        warm_up = partial(on_worker, rows.warm_up)
        use_flash_attention(rows.model, rows.packing, warm_up)
        start_native_kernels(rows.model, rows.packing, warm_up, options.compile)
        return rows

    def info(self, task: str, rows: RowModel) -> ModelInfo:
        batching: Batching = "continuous"
        why = ""
        if isinstance(rows, SinglePassModel):
            batching, why = rows.batching, rows.batching_reason
        return model_info(task, self.options.name, self.model, self.parameters, batching, why)


def load_embedder(options: ScoringOptions) -> Embedder:
    """Load an embedder. Raises LoadingFailed if the model cannot be served."""
    with load_errors(options.model, "embeddings", options.attention):
        checkpoint = read_checkpoint(options, encoder_class)
        check_weights(checkpoint)
        body: Any = checkpoint.model
        if splade := checkpoint.config.splade:
            on_worker(partial(splade.attach, body))
            body = body.base_model
        rows = checkpoint.row_model(body, STATES)
        dimensions = None
        if not options.allow_dimensions:
            dimensions = trained_dimensions(checkpoint.model.config)
        pooling = "splade" if splade else "+".join(checkpoint.config.poolings)
        if checkpoint.config.late:
            pooling = "late interaction"
        info = replace(checkpoint.info("feature-extraction", rows), pooling=pooling)
        tokenizer = checkpoint.text_tokenizer()
        return on_worker(partial(Embedder, rows, tokenizer, checkpoint.config, dimensions, info))


def load_reranker(options: ScoringOptions) -> Reranker | LateReranker:
    """Load a reranker. Raises LoadingFailed if the model cannot be served."""
    with load_errors(options.model, "reranking", options.attention):
        checkpoint = read_checkpoint(options, reranker_class)
        if checkpoint.config.late:
            return make_late_reranker(checkpoint)
        if is_causal_lm(checkpoint.model.config):
            return make_yes_no_reranker(checkpoint)
        return make_cross_encoder(checkpoint)


def new_engine(scorer: Embedder | Reranker | LateReranker, batcher: DynamicBatcher[Any]) -> Engine:
    """Return the engine of a scorer: the generation engine for one that runs on a paged cache."""
    if isinstance(scorer.model, PagedRunner):
        return ScoringEngine(scorer, batcher.max_size)
    return PipelineEngine(scorer, batcher)


def read_checkpoint(
    options: ScoringOptions, choose_class: Callable[[SentenceTransformersConfig, Any], Any]
) -> Checkpoint:
    """Load the model with the auto class that `choose_class` returns for its configurations."""
    path = checkpoint_path(options.model, "embedding")
    config = read_config(path)
    if options.embedding_pooling == "splade" and not config.splade:
        config = replace(config, splade=SpladeHead({}))
    model, tokenizer, missing = load_checkpoint(
        options, path, partial(choose_class, config), config.subfolder
    )
    if config.late:
        config.late.register_prefixes(tokenizer)
    return Checkpoint(options, model, tokenizer, config, missing, model.num_parameters())


def encoder_class(files: SentenceTransformersConfig, config: Any) -> Any:
    """Return the auto class of an embedding model: of an encoder-decoder, only the encoder."""
    if files.splade:
        return AutoModelForMaskedLM
    if "HF_ColBERT" in (config.architectures or ()):
        raise LoadingFailed(
            "its files are Stanford ColBERT's: load it with sentence-transformers' "
            "MultiVectorEncoder, and serve what that saves"
        )
    return AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel


def reranker_class(files: SentenceTransformersConfig, config: Any) -> Any:
    if files.late:
        return encoder_class(files, config)
    if is_causal_lm(config):
        return AutoModelForCausalLM
    names = config.architectures or ()
    if names and not any(name.endswith("ForSequenceClassification") for name in names):
        raise LoadingFailed(
            f"its architecture, {', '.join(names)}, has no head that scores pairs: name an "
            "embedding model with EMBEDDING_MODEL, and /v1/score compares its vectors"
        )
    return AutoModelForSequenceClassification


def is_causal_lm(config: Any) -> bool:
    return any(name.endswith("ForCausalLM") for name in config.architectures or ())


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise LoadingFailed where the states depend on weights that the checkpoint lacks."""

    @torch.inference_mode()
    def states() -> bytes:
        ids = torch.arange(1, 8, device=checkpoint.model.device)[None]
        output: torch.Tensor = checkpoint.model(input_ids=ids)[0]  # states, or logits for SPLADE
        return output.float().cpu().numpy().tobytes()

    if missing_weights_matter(checkpoint.model, checkpoint.missing_weights, states):
        raise LoadingFailed(describe_missing_weights(checkpoint.missing_weights))


def trained_dimensions(config: Any) -> Sequence[int] | None:
    """Return the sizes that vectors may be truncated to, from the configuration fields that vLLM
    reads too; None: any."""
    if sizes := getattr(config, "matryoshka_dimensions", None):
        return [int(size) for size in sizes]
    return None if getattr(config, "is_matryoshka", False) else ()


def make_cross_encoder(checkpoint: Checkpoint) -> Reranker:
    model, tokenizer = checkpoint.model, checkpoint.text_tokenizer()
    if (labels := model.config.num_labels) != 1:
        raise LoadingFailed(
            f"it has {labels} labels and a reranker has one: name a classifier with PIPELINE_MODEL"
        )
    if checkpoint.missing_weights:
        raise LoadingFailed(describe_missing_weights(checkpoint.missing_weights))
    rows = checkpoint.row_model(model, LOGITS)
    activation = checkpoint.config.activation or model_activation(model)
    info = checkpoint.info("text-classification", rows)
    pairs = CrossEncoderTokenizer(tokenizer)
    return Reranker(rows, label_logit, tokenizer, pairs, activation, info)


def make_late_reranker(checkpoint: Checkpoint) -> LateReranker:
    check_weights(checkpoint)
    rows = checkpoint.row_model(checkpoint.model, STATES)
    tokenizer, info = checkpoint.text_tokenizer(), checkpoint.info("text-ranking", rows)
    return on_worker(partial(LateReranker, rows, tokenizer, checkpoint.config, info))


def model_activation(model: PreTrainedModel) -> nn.Module | None:
    """Return the activation that sentence-transformers wrote into a cross-encoder's config.json."""
    section = getattr(model.config, "sentence_transformers", None) or {}
    old = getattr(model.config, "sbert_ce_default_activation_function", None)
    name = section.get("activation_fn") or old
    return make_activation(name) if name else None


def make_yes_no_reranker(checkpoint: Checkpoint) -> Reranker:
    """Make a reranker of a decoder that answers yes or no. Raises LoadingFailed unless the logits
    are the product of its last state and its output weights."""
    model, tokenizer = checkpoint.model, checkpoint.text_tokenizer()
    check_generates(model, checkpoint.missing_weights)
    yes, no = checkpoint.config.answer_ids or (
        single_token(tokenizer, "yes"),
        single_token(tokenizer, "no"),
    )
    probe = TokenRow(tokenizer.encode("yes or no", add_special_tokens=False))
    ids = torch.tensor([probe.ids], device=model.device)

    @torch.inference_mode()
    def probe_logits() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids).logits[0, -1].float()
        return logits

    logits = on_worker(probe_logits)
    head: Any = model.get_output_embeddings()
    weight, expected = head.weight.detach().float(), logits[yes]
    direction = weight[yes]
    if no is not None:
        direction, expected = direction - weight[no], expected - logits[no]
    body: Any = model.base_model  # typed as any module
    rows = checkpoint.row_model(body, STATES)
    info, activation = checkpoint.info("yes-no", rows), checkpoint.config.activation
    pairs = PromptTokenizer(tokenizer)
    reranker = Reranker(rows, answer_logit(direction), tokenizer, pairs, activation, info)
    score = on_worker(lambda: reranker.head(states_of(rows, probe), probe))
    if not (score - expected).abs() <= TOLERANCE[model.dtype] * logits.abs().max():
        raise LoadingFailed("its logits are not its last state times its output weights")
    return reranker


def single_token(tokenizer: TextTokenizer, word: str) -> int:
    """Return the id of a word. Raises LoadingFailed unless it is one token."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise LoadingFailed(f"its tokenizer has no token for {word!r}")
    return ids[0]
