"""Sparse vectors (`/embed_sparse`) equal those of sentence-transformers' SparseEncoder."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from transformers.modeling_outputs import BaseModelOutput

from batching.errors import InvalidInput
from tests import tiny
from tests.event_streams import CLIENT, error_of, post
from tests.model.test_embedder import TEXTS, embed
from tests.model.test_token_states import token_states
from tests.serving import serving
from tests.tiny_embedders import checkpoint, load, write
from worker.engines.embedding import splade
from worker.engines.embedding.embedder import Embedder
from worker.model.loading import LoadingFailed

OLD = "sentence_transformers.sparse_encoder.models."
NEW = "sentence_transformers.sparse_encoder.modules.splade_pooling."


def folder_of(
    path: Path, base: str = "bert-mlm", prefix: str = NEW, general: Any = None, **config: Any
) -> Path:
    """Write a checkpoint with the modules of a SparseEncoder."""
    folder = checkpoint(path, base, general={"model_type": "SparseEncoder", **(general or {})})
    transformer = "MLMTransformer" if prefix == OLD else "Transformer"
    write(folder, "sentence_bert_config.json", {"transformer_task": "fill-mask"})
    types = ["sentence_transformers.base.modules.transformer.Transformer", NEW + "SpladePooling"]
    if prefix == OLD:
        types = [OLD + transformer, OLD + "SpladePooling"]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": kind}
        for n, (path, kind) in enumerate(zip(["", "1_SpladePooling"], types, strict=True))
    ]
    write(folder, "modules.json", modules)
    write(folder, "1_SpladePooling/config.json", config)
    return folder


def sparse(embedder: Embedder, texts: list[str], **options: Any) -> Any:
    """Return the sparse vectors as dense ones."""
    content = embed(embedder, texts, encoding="sparse", **options).content
    dense = np.zeros((len(texts), embedder.dimensions), np.float32)
    for row, entries in zip(dense, orjson.loads(b"[%b]" % content), strict=True):
        assert all(entry["value"] > 0 for entry in entries)
        row[[entry["index"] for entry in entries]] = [entry["value"] for entry in entries]
    return dense


def reference(folder: Path, texts: list[str], **options: Any) -> Any:
    pytest.importorskip("sentence_transformers")
    module: Any = importlib.import_module("sentence_transformers")
    encoder = module.SparseEncoder(str(folder), device="cpu")
    return encoder.encode(texts, convert_to_sparse_tensor=False, **options).numpy()


def check(embedder: Embedder, folder: Path, texts: list[str], **options: Any) -> None:
    named = {"prompt": options["prompt_name"]} if options else {}
    expected = reference(folder, texts, **options)
    assert expected.max() > 0
    # On some CPUs the tiny ModernBERT differs from its own float64 by 2e-4.
    np.testing.assert_allclose(sparse(embedder, texts, **named), expected, atol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_poolings_and_prompts_equal_a_sparse_encoder(
    tmp_path: Path, strategy: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splade, "CHUNK", 4)
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    general = {"prompts": {"query": "what is "}}
    folder = folder_of(tmp_path / "m", general=general, **pooling)
    embedder = load(folder)
    assert embedder.info.pooling == "splade"
    check(embedder, folder, TEXTS)
    check(embedder, folder, TEXTS, prompt_name="query")


@pytest.mark.parametrize("base", ["roberta-mlm", "distilbert-mlm", "modernbert-mlm", "deberta-mlm"])
def test_the_head_of_each_architecture_is_found(tmp_path: Path, base: str) -> None:
    folder = folder_of(tmp_path / "m", base)
    check(load(folder), folder, TEXTS)


def test_a_folder_of_an_older_version_and_a_bare_checkpoint_equal_each_other(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path / "old", prefix=OLD)
    check(load(folder), folder, TEXTS)
    bare = Path(shutil.copytree(tiny.folder("bert-mlm"), tmp_path / "bare"))
    check(load(bare, embedding_pooling="splade"), bare, TEXTS)
    assert load(bare).info.pooling == "mean"


def test_the_largest_weights_are_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", general={"max_active_dims": 5})
    vectors = sparse(load(folder), TEXTS)
    assert (np.count_nonzero(vectors, 1) == 5).all()
    check(load(folder), folder, TEXTS)


def test_dense_vectors_of_a_sparse_model_are_refused(tmp_path: Path) -> None:
    embedder = load(folder_of(tmp_path / "m"))
    for encoding in ("float", "bare", "vectors"):
        with pytest.raises(InvalidInput, match="are sparse: POST /embed_sparse"):
            embed(embedder, TEXTS, encoding=encoding)
    [states] = token_states(embedder, TEXTS[:1])
    assert len(states[0]) == 32


@pytest.mark.parametrize(
    ("base", "config", "message"),
    [
        ("bert-mlm", {"pooling_strategy": "mean"}, "SPLADE pooling is not supported"),
        ("bert-mlm", {"activation_function": "gelu"}, "SPLADE pooling is not supported"),
        ("bert-base", {}, "cls.predictions"),
        ("gpt2-lm", {}, "MaskedLM"),
    ],
)
def test_other_poolings_and_checkpoints_without_the_head_do_not_load(
    tmp_path: Path, base: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadingFailed, match=message):
        load(folder_of(tmp_path / "m", base, **config))


def test_a_head_that_reads_more_than_the_last_states_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_body(self: Any, *_: Any, **inputs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self._states + 1)

    monkeypatch.setattr(splade.SpladeHead, "_body", wrong_body)
    with pytest.raises(LoadingFailed, match="not those of its head"):
        load(folder_of(tmp_path / "m"))


# ── over HTTP ──


def test_sparse_vectors_are_entries_of_index_and_value(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    expected = reference(folder, TEXTS[:2])
    with serving(embedding_model=str(folder)) as server:
        vectors = post(server, "/embed_sparse", {"inputs": TEXTS[:2]}).json()
        for entries, row in zip(vectors, expected, strict=True):
            assert [entry["index"] for entry in entries] == row.nonzero()[0].tolist()
            values = [entry["value"] for entry in entries]
            np.testing.assert_allclose(values, row[row > 0], atol=1e-4)
        assert post(server, "/embed_sparse", {"inputs": TEXTS[0]}).json() == vectors[:1]
        info = CLIENT.get(server.url + "/info").json()
        assert info["model_type"] == {"embedding": {"pooling": "splade"}}
        answer = post(server, "/score", {"text_1": "a", "text_2": "b"})
        assert "POST /embed_sparse returns them" in error_of(answer)["message"]
    bare = f"{tiny.folder('bert-mlm')};pooling=splade"
    with serving(embedding_model=bare) as server:
        assert len(post(server, "/embed_sparse", {"inputs": TEXTS}).json()) == len(TEXTS)
    with serving(embedding_model="demo") as server:
        answer = post(server, "/embed_sparse", {"inputs": "a"})
        assert answer.status_code == 400
        assert "are dense: POST /embed returns them" in error_of(answer)["message"]
