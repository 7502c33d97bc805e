"""Vectors of late interaction (`/embed_all`) and their scores equal those of sentence-transformers'
MultiVectorEncoder."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batching.errors import InvalidInput
from server.apis.openai.embedding import score as score_module
from tests import tiny
from tests.event_streams import error_of, post
from tests.model.test_embedder import TEXTS, embed
from tests.model.test_token_states import token_states
from tests.serving import serving
from tests.tiny_embedders import checkpoint, dense, load, scored, write
from worker.engines.embedding import embedder as embedder_module
from worker.engines.embedding import reranker as reranker_module
from worker.engines.embedding.embedder import Embedder
from worker.engines.embedding.loading import ScoringOptions, load_reranker
from worker.messages.scoring import ScoringInput, Truncation
from worker.model.loading import LoadingFailed

ST = pytest.importorskip("sentence_transformers")
modules: Any = importlib.import_module("sentence_transformers.multi_vector_encoder.modules")
base: Any = importlib.import_module("sentence_transformers.base.modules")
EXPANSION = {"strategy": "fixed", "length": 14}
PROMPTS = {"query": "what is ", "document": "a page: "}
TOKEN: dict[str, Any] = {"module_input_name": "token_embeddings"}
LONG = Truncation(enabled=True)
# Tolerance of float32 vectors and of MaxSim, a sum over them: the library's own vectors of a text
# alone and in a batch differ by up to 1e-5.
ROUNDING = 5e-5


def saved(
    folder: Path,
    name: str = "bert-base",
    mask: dict[str, Any] | None = None,
    similarity: str | None = None,
    further: tuple[Any, ...] = (),
    **transformer: Any,
) -> Path:
    """Save a MultiVectorEncoder of a tiny model."""
    torch.manual_seed(0)
    layers = [
        base.Transformer(str(tiny.folder(name)), **transformer),
        base.Dense(32, 8, bias=False, activation_function=torch.nn.Identity(), **TOKEN),
        modules.MultiVectorMask(**(mask or {})),
        base.Normalize(**TOKEN),
        *further,
    ]
    encoder = ST.MultiVectorEncoder(
        modules=layers, device="cpu", prompts=PROMPTS, similarity_fn_name=similarity
    )
    encoder.save(str(folder))
    return folder


def pylate(folder: Path, **general: Any) -> Path:
    """Write a checkpoint as PyLate does."""
    torch.manual_seed(0)
    checkpoint(folder, pooling={}, layers=(), general={"model_type": "ColBERT", **general})
    write(folder, "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    dense(folder, "1_Dense", 8, "torch.nn.modules.linear.Identity")
    types = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    content = [
        {"idx": n, "name": str(n), "path": path, "type": kind}
        for n, (path, kind) in enumerate(zip(["", "1_Dense"], types, strict=True))
    ]
    write(folder, "modules.json", content)
    return folder


def check(embedder: Embedder, folder: Path) -> Any:
    """Compare the vectors of queries and documents, in batches and alone; return the library's
    model."""
    encoder = ST.MultiVectorEncoder(str(folder), device="cpu")
    for form, encode in (("query", encoder.encode_query), ("document", encoder.encode_document)):
        expected = encode(TEXTS, convert_to_numpy=True)
        together = token_states(embedder, TEXTS, prompt=form, truncation=LONG)
        alone = [token_states(embedder, [t], prompt=form, truncation=LONG)[0] for t in TEXTS]
        for one, other, wanted in zip(together, alone, expected, strict=True):
            np.testing.assert_allclose(one, wanted, atol=ROUNDING)
            np.testing.assert_allclose(other, wanted, atol=ROUNDING)
    return encoder


@pytest.mark.parametrize("name", ["bert-base", "modernbert-mlm", "deberta-base"])
@pytest.mark.parametrize("attend", [False, True])
def test_queries_and_documents_equal_a_multi_vector_encoder(
    tmp_path: Path, name: str, attend: bool
) -> None:
    words = {"skiplist_words": ["the", "a", "of", "e", "absent"]}
    expansion = {**EXPANSION, "attend": attend}
    folder = saved(tmp_path / "m", name, words, query_expansion=expansion, document_length=20)
    embedder = load(folder)
    assert embedder.info.pooling == "late interaction"
    assert embedder.dimensions == 8
    check(embedder, folder)


@pytest.mark.parametrize("tasks", [["query"], ["query", "document"]])
def test_long_queries_and_masks_of_both_forms(tmp_path: Path, tasks: list[str]) -> None:
    mask = {"skiplist_words": ["a", "the"], "skiplist_tasks": tasks}
    mask["keep_only_token_ids"] = [*range(100)]
    expansion = {"strategy": "min", "length": 9, "token": "[SEP]"}
    folder = saved(tmp_path / "m", mask=mask, query_expansion=expansion, query_length=30)
    check(load(folder), folder)


@pytest.mark.parametrize(
    "general",
    [
        {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16},
        {"query_prefix": "[MASK] ", "attend_to_expansion_tokens": True, "skiplist_words": ["a"]},
        {"document_length": 12, "do_query_expansion": False, "query_length": 10},
        {"prompts": PROMPTS},
    ],
)
def test_checkpoints_of_pylate_equal_a_multi_vector_encoder(
    tmp_path: Path, general: dict[str, Any]
) -> None:
    folder = pylate(tmp_path / "m", **general)
    check(load(folder), folder)


def test_a_prefix_that_the_tokenizer_would_split_is_one_token(tmp_path: Path) -> None:
    folder = pylate(tmp_path / "m", query_prefix="[unused0] ", document_prefix="a ")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary["[unused0]"] = vocabulary.pop(last)
    write(folder, "tokenizer.json", content)
    embedder = load(folder)
    assert embedder.encode("[unused0] a")[1] == vocabulary["[unused0]"]
    check(embedder, folder)


def test_texts_over_the_length_of_their_form_and_other_endpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "m", query_expansion=EXPANSION, document_length=16)
    embedder = load(folder)
    long = "a b c d e f g h i j k l m n o p q r s t"
    for form, limit in (("query", 14), ("document", 16)):
        with pytest.raises(InvalidInput, match=f"context length is {limit} tokens"):
            token_states(embedder, [long], prompt=form)
    for encoding in ("float", "base64", "bare", "sparse"):
        with pytest.raises(InvalidInput, match="POST /embed_all"):
            embed(embedder, ["a"], encoding=encoding)
    with pytest.raises(InvalidInput, match="must be one of document, query, search_query"):
        token_states(embedder, ["a"], prompt="other")
    ids = embedder.documents.tokenizer.encode(PROMPTS["document"] + "a dog")
    assert token_states(embedder, [ids]) == token_states(embedder, ["a dog"])
    monkeypatch.setattr(embedder_module, "MAX_NUMBERS", 14 * 8)
    token_states(embedder, ["a"], prompt="query")
    with pytest.raises(InvalidInput, match="more than 112 numbers"):
        token_states(embedder, ["a", "b"], prompt="query")


def test_a_text_without_a_kept_token_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", mask={"keep_only_token_ids": [5]})
    with pytest.raises(LoadingFailed, match="no tokens that this model compares"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "images"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chat messages"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "no"}}, "expansion"),
        (
            "sentence_bert_config.json",
            {"query_expansion": EXPANSION | {"length": 99}},
            "1 to 64",
        ),
        (
            "sentence_bert_config.json",
            {"query_expansion": EXPANSION | {"token": "no"}},
            "cannot",
        ),
        ("tokenizer_config.json", {"padding_side": "left"}, "at the right"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "not token_embedd"),
        ("config.json", {"architectures": ["HF_ColBERT"]}, "Stanford"),
    ],
)
def test_other_modules_and_settings_do_not_load(
    tmp_path: Path, name: str, content: dict[str, Any], message: str
) -> None:
    folder = saved(tmp_path / "m", query_expansion=EXPANSION)
    write(folder, name, json.loads((folder / name).read_text()) | content)
    with pytest.raises(LoadingFailed, match=message):
        load(folder)


def test_token_pooling_and_models_without_a_mask_do_not_load(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", further=(modules.HierarchicalTokenPooling(),))
    with pytest.raises(LoadingFailed, match=r"unsupported module: .*HierarchicalTokenPooling"):
        load(folder)
    content = json.loads((folder / "modules.json").read_text())
    write(folder, "modules.json", content[:2])
    with pytest.raises(LoadingFailed, match="no MultiVectorMask"):
        load(folder)


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_scores_of_pairs_equal_a_multi_vector_encoder(tmp_path: Path, similarity: str) -> None:
    folder = saved(tmp_path / "m", similarity=similarity, query_expansion=EXPANSION)
    reranker = load_reranker(ScoringOptions(str(folder)))
    encoder = ST.MultiVectorEncoder(str(folder), device="cpu")
    queries = ["hello", "a dog"]
    expected = encoder.similarity(encoder.encode_query(queries), encoder.encode_document(TEXTS))
    pairs = [(query, text) for query in queries for text in TEXTS]
    paths = [("query", f"documents[{n}]") for n in range(len(pairs))]
    together = scored(reranker, ScoringInput(pairs, paths)).scores
    np.testing.assert_allclose(together, expected.flatten(), rtol=1e-5, atol=ROUNDING)
    for pair, score in zip(pairs, together, strict=True):
        [alone] = scored(reranker, ScoringInput([pair], paths[:1])).scores
        assert alone == pytest.approx(score, rel=1e-5, abs=ROUNDING)


def test_pairs_are_bounded_and_take_no_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reranker = load_reranker(ScoringOptions(str(saved(tmp_path / "m", query_length=20))))
    pair = ScoringInput([("a dog", "a b c d e f g h i")], [("query", "documents[0]")])
    with pytest.raises(InvalidInput, match="instruction: this model takes no instruction"):
        reranker.tokenize(replace(pair, instruction="x"))
    rows = reranker.tokenize(replace(pair, max_document_tokens=6, truncation=Truncation()))
    assert len(rows[1].ids) == 6
    long = replace(pair, pairs=[("a " * 30, "b")])
    assert len(reranker.tokenize(long)[0].ids) == 20
    with pytest.raises(InvalidInput, match=r"query: has .* tokens; .* length is 20 tokens"):
        reranker.tokenize(replace(long, truncation=Truncation()))
    counts = [len(row.kept or ()) for row in reranker.tokenize(pair)]
    monkeypatch.setattr(reranker_module, "MAX_TOKEN_PAIRS", counts[0] * counts[1])
    reranker.tokenize(pair)
    monkeypatch.setattr(reranker_module, "MAX_TOKEN_PAIRS", counts[0] * counts[1] - 1)
    with pytest.raises(InvalidInput, match=r"documents\[0\]: has over .* pairs of its tokens"):
        reranker.tokenize(pair)


# ── over HTTP ──


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_scores_of_an_embedding_model_are_maxsim(
    tmp_path: Path, similarity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "m", similarity=similarity, query_expansion=EXPANSION)
    encoder = ST.MultiVectorEncoder(str(folder), device="cpu")
    texts = TEXTS * 5  # several parts
    queries, documents = encoder.encode_query(["a dog", "a"]), encoder.encode_document(texts)
    expected = encoder.similarity(queries, documents).numpy()
    with serving(embedding_model=str(folder)) as server:

        def scores(first: Any, second: Any) -> Any:
            response = post(server, "/v1/score", {"text_1": first, "text_2": second}).json()
            return [entry["score"] for entry in response["data"]]

        np.testing.assert_allclose(scores("a dog", texts), expected[0], rtol=1e-5, atol=ROUNDING)
        pairs = scores(["a dog", "a"], texts[:2])
        np.testing.assert_allclose(pairs, expected[:, :2].diagonal(), rtol=1e-5, atol=ROUNDING)
        np.testing.assert_allclose(
            scores(["a dog", "a"], texts[0]), expected[:, 0], rtol=1e-5, atol=ROUNDING
        )
        body = {"inputs": {"source_sentence": "a", "sentences": texts}}
        np.testing.assert_allclose(
            post(server, "/similarity", body).json(), expected[1], rtol=1e-5, atol=ROUNDING
        )
        monkeypatch.setattr(score_module, "MAX_TOKEN_PAIRS", 100)
        answer = post(server, "/similarity", body)
        assert answer.status_code == 400
        assert "over 100 pairs of tokens" in error_of(answer)["message"]
        limit = sum(document.numel() for document in documents)  # without the query's
        monkeypatch.setattr(embedder_module, "MAX_NUMBERS", limit)
        answer = post(server, "/v1/score", {"text_1": "a", "text_2": texts})
        assert answer.status_code == 400
        assert f"more than {limit} numbers" in error_of(answer)["message"]
