"""Tiny checkpoints for embeddings and reranking, with the files that sentence-transformers writes.

Weights are random (tests/tiny.py). A test chooses the pooling and the layers.
"""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from batching.batcher import DynamicBatcher
from batching.request_queue import WorkItem
from tests import tiny
from tests.tiny import folder as folder
from tests.tiny_tokenizers import LIMIT, roberta_tokenizer
from worker.engines.embedding.embedder import Embedder
from worker.engines.embedding.loading import ScoringOptions, load_embedder, new_engine
from worker.engines.embedding.reranker import LateReranker, Reranker
from worker.messages.protocol import ALONE, Engine, OtherModels
from worker.messages.scoring import (
    EmbeddingInput,
    EmbeddingOutput,
    ScoringInput,
    ScoringOutput,
)

hf: Any = importlib.import_module("transformers")  # mostly not annotated
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."

QWEN3: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}


def long_context_decoder() -> list[Any]:
    """Build a decoder whose context fits a long query."""
    model, tokenizer = tiny.decoder(
        hf.Qwen3Config, "CausalLM", max_position_embeddings=2048, **QWEN3
    )()
    tokenizer.model_max_length = 2048
    return [model, tokenizer]


tiny.BUILDERS |= {
    "roberta-base": tiny.encoder(
        hf.RobertaConfig, "", roberta_tokenizer, max_position_embeddings=LIMIT + 2
    ),
    "deberta-base": tiny.encoder(
        hf.DebertaV2Config, "", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "qwen3-base": tiny.decoder(hf.Qwen3Config, "", **QWEN3),
    "qwen3-lm": long_context_decoder,
    "bert-rank": tiny.encoder(hf.BertConfig, "SequenceClassification", num_labels=1),
    "modernbert-rank": tiny.encoder(
        hf.ModernBertConfig, "SequenceClassification", num_labels=1, **tiny.MODERN
    ),
}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content))


def checkpoint(
    folder: Path,
    base: str = "bert-base",
    pooling: dict[str, Any] | None = None,
    layers: tuple[str, ...] = (),
    general: dict[str, Any] | None = None,
    bert: dict[str, Any] | None = None,
    prefix: str = OLD,
    **config: Any,
) -> Path:
    """Copy a tiny model and write its modules.

    `layers`: class names of further modules; `config`: settings to change in config.json.
    """
    shutil.copytree(tiny.folder(base), folder)
    if config:
        settings = json.loads((folder / "config.json").read_text())
        write(folder, "config.json", settings | config)
    names = ["Transformer", "Pooling", *layers]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": prefix + name}
        for n, name in enumerate(names)
    ]
    if pooling is not None:
        write(folder, "modules.json", modules)
        write(folder, "1_Pooling/config.json", {"word_embedding_dimension": 32, **pooling})
    if general is not None:
        write(folder, "config_sentence_transformers.json", general)
    if bert is not None:
        write(folder, "sentence_bert_config.json", bert)
    return folder


def dense(folder: Path, module: str, out: int, activation: str, as_bin: bool = False) -> Any:
    """Write a dense layer and return it."""
    linear = torch.nn.Linear(32, out)
    write(
        folder,
        f"{module}/config.json",
        {"in_features": 32, "out_features": out, "bias": True, "activation_function": activation},
    )
    state = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    if as_bin:
        torch.save(state, folder / module / "pytorch_model.bin")
    else:
        save_file(state, folder / module / "model.safetensors")
    return linear


def load(folder: Path, **options: Any) -> Embedder:
    return load_embedder(ScoringOptions(str(folder), **options))


def engine_of(scorer: Embedder | Reranker | LateReranker) -> Engine:
    """Return the engine that serves a scorer, the same on every call."""
    engine: Engine = vars(scorer).setdefault("engine", None) or new_engine(
        scorer, DynamicBatcher[Any](32, 1 << 14, 0.0)
    )
    vars(scorer)["engine"] = engine
    return engine


def prepared(engine: Engine, payload: EmbeddingInput | ScoringInput) -> WorkItem[Any, Any, Any]:
    item: WorkItem[Any, Any, Any] = WorkItem(payload, float("inf"), 0.0)
    engine.prepare(item)
    return item


def run(engine: Engine) -> list[Any]:
    """Return the results of an engine's items as they end; raise the error of one that fails."""
    results: list[Any] = []
    while engine.busy:
        outcome = engine.step(float("inf"))
        assert outcome
        for _, error in outcome.done:
            assert error
            raise error
        results += [engine.finish(item, raw) for item, raw in outcome.outputs]
    return results


def embedded(
    embedder: Embedder, payload: EmbeddingInput, others: OtherModels = ALONE
) -> EmbeddingOutput:
    engine = engine_of(embedder)
    engine.others = others
    engine.add(prepared(engine, payload))
    [output] = run(engine)
    assert isinstance(output, EmbeddingOutput)
    return output


def scored(reranker: Reranker | LateReranker, payload: ScoringInput) -> ScoringOutput:
    engine = engine_of(reranker)
    engine.add(prepared(engine, payload))
    [output] = run(engine)
    assert isinstance(output, ScoringOutput)
    return output


@torch.no_grad()
def states(base: str, text: str) -> Any:
    """Return the model's hidden states [tokens, H] of a text."""
    model = hf.AutoModel.from_pretrained(tiny.folder(base)).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny.folder(base))
    return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
