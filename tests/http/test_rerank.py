"""Reranking: cross-encoders and yes-no decoders; the formats of Jina, Cohere and TEI."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batching.errors import InvalidInput
from tests import tiny
from tests.event_streams import CLIENT, assert_refused, error_of, post
from tests.http import test_embeddings
from tests.serving import Server, serving
from tests.tiny import hf
from tests.tiny_embedders import checkpoint, scored, write
from worker.engines.embedding.loading import ScoringOptions, load_reranker
from worker.engines.embedding.reranker import Reranker
from worker.messages.scoring import ScoringInput, Truncation

QUERY = "the capital of france"
DOCUMENTS = ["paris is a city", "a cow says moo " * 4, "the cat sat on the mat", "hello"]


def scores(reranker: Reranker, documents: list[str], **options: Any) -> list[float]:
    paths = [("query", f"documents[{n}]") for n in range(len(documents))]
    pairs = [(QUERY, document) for document in documents]
    return scored(reranker, ScoringInput(pairs, paths, **options)).scores


def load(folder: Path) -> Reranker:
    reranker = load_reranker(ScoringOptions(str(folder)))
    assert isinstance(reranker, Reranker)
    return reranker


@torch.no_grad()
def logits(folder: Path, document: str, **options: Any) -> float:
    """Of the model alone."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    return float(model(**tokenizer(QUERY, document, return_tensors="pt", **options)).logits)


@pytest.mark.parametrize("base", ["bert-rank", "modernbert-rank"])
def test_cross_encoder_scores_equal_transformers_alone_and_batched(base: str) -> None:
    folder = tiny.folder(base)
    reranker = load(folder)
    assert reranker.info.batching == "packed"
    expected = [logits(folder, document) for document in DOCUMENTS]
    np.testing.assert_allclose(scores(reranker, DOCUMENTS, raw=True), expected, atol=1e-3)
    sigmoids = 1 / (1 + np.exp(-np.array(expected)))
    np.testing.assert_allclose(scores(reranker, DOCUMENTS), sigmoids, atol=1e-3)
    for document, expected_one in zip(DOCUMENTS, sigmoids, strict=True):
        assert scores(reranker, [document])[0] == pytest.approx(expected_one, abs=1e-3)


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_activation_is_that_of_the_checkpoint(tmp_path: Path, key: str) -> None:
    name = "torch.nn.modules.linear.Identity"
    value: Any = {"activation_fn": name} if key == "sentence_transformers" else name
    folder = checkpoint(tmp_path / "m", "bert-rank", **{key: value})
    reranker = load(folder)
    assert scores(reranker, DOCUMENTS) == scores(reranker, DOCUMENTS, raw=True)


def test_long_document_is_truncated_unless_truncation_is_off(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "bert-rank", bert={"max_seq_length": 16})
    reranker = load(folder)
    long = "a cow says moo " * 30
    expected = logits(folder, long, truncation="only_second", max_length=16)
    assert scores(reranker, [long], raw=True)[0] == pytest.approx(expected, abs=1e-3)
    short = scores(reranker, ["a a a"])
    assert scores(reranker, ["a " * 30], max_document_tokens=3) == pytest.approx(short, abs=1e-5)
    with pytest.raises(InvalidInput, match=r"documents\[0\]: has"):
        scores(reranker, [long], truncation=Truncation())
    with pytest.raises(InvalidInput, match="instruction"):
        scores(reranker, ["a"], instruction="Find it")


# ── decoders ──

# The prompt of Qwen3-Reranker, by its model card.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] in ('system', 'query', 'document') %}"
    "[{{ m['role'] }}] {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def decoder(folder: Path, template: str | None = None) -> Path:
    """One that answers `a` for yes and `b` for no."""
    model = checkpoint(folder, "qwen3-lm")
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    if template:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
    yes, no = tokenizer.convert_tokens_to_ids(["a", "b"])
    write(model, "1_LogitScore/config.json", {"true_token_id": yes, "false_token_id": no})
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    modules = [
        {"idx": n, "path": path, "type": f"sentence_transformers.{kind}"}
        for n, (path, kind) in enumerate(zip(("", "1_LogitScore"), kinds, strict=True))
    ]
    write(model, "modules.json", modules)
    return model


@torch.no_grad()
def yes_less_no(folder: Path, *parts: str) -> float:
    """Return the logit of yes less that of no after these texts, each tokenized apart."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False)["input_ids"]]
    last = model(input_ids=torch.tensor([ids])).logits[0, -1]
    yes, no = tokenizer.convert_tokens_to_ids(["a", "b"])
    return float(last[yes] - last[no])


def test_decoder_scores_yes_and_no_in_qwens_template(tmp_path: Path) -> None:
    folder = decoder(tmp_path / "m")
    reranker = load(folder)
    assert reranker.info.batching == "continuous"
    for instruction in (None, "Find rude words"):
        got = scores(reranker, DOCUMENTS, raw=True, instruction=instruction)
        prefix = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {QUERY}\n<Document>: "
        expected = [yes_less_no(folder, BEFORE, prefix + document, AFTER) for document in DOCUMENTS]
        np.testing.assert_allclose(got, expected, atol=1e-3)


def test_template_of_the_decoder_is_used(tmp_path: Path) -> None:
    folder = decoder(tmp_path / "m", TEMPLATE)
    [got] = scores(load(folder), ["moo"], raw=True, instruction="Find it")
    text = f"[system] Find it [query] {QUERY} [document] moo <|assistant|>"
    assert got == pytest.approx(yes_less_no(folder, text), abs=1e-3)


# ── over HTTP ──


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(rerank_model=str(tiny.folder("bert-rank")), embedding_model="demo") as started:
        yield started


def test_texts_have_the_format_of_text_embeddings_inference(server: Server) -> None:
    body: dict[str, Any] = {"query": QUERY, "texts": DOCUMENTS}
    ranked = post(server, "/rerank", body).json()
    assert {tuple(entry) for entry in ranked} == {("index", "score")}
    raw = post(server, "/rerank", body | {"raw_scores": True, "return_text": True}).json()
    assert [entry["index"] for entry in raw] == [entry["index"] for entry in ranked]
    assert raw[0]["text"] == DOCUMENTS[raw[0]["index"]]
    sigmoids = [1 / (1 + np.exp(-entry["score"])) for entry in raw]
    np.testing.assert_allclose([entry["score"] for entry in ranked], sigmoids, atol=1e-5)
    long = body | {"texts": ["a cow says moo " * 100]}
    assert error_of(post(server, "/rerank", long))["param"] == "texts[0]"
    assert post(server, "/rerank", long | {"truncate": True}).status_code == 200


def test_truncation_and_activation_fields_of_vllm_and_tei_are_used(server: Server) -> None:
    long, cut = "the cat sat on the mat " * 40 + "hello", {"truncate_prompt_tokens": -1}
    pair = {"text_1": QUERY, "text_2": long}
    assert post(server, "/v1/score", pair).status_code == 400
    [scored] = post(server, "/v1/score", pair | cut).json()["data"]
    [raw] = post(server, "/v1/score", pair | cut | {"use_activation": False}).json()["data"]
    assert scored["score"] == pytest.approx(1 / (1 + np.exp(-raw["score"])), abs=1e-5)
    texts = {"query": QUERY, "texts": [long], "truncate": True}
    ends = [
        post(server, "/rerank", texts | {"truncation_direction": end, **options}).json()[0]["score"]
        for end in ("Right", "Left")
        for options in ({}, {"use_activation": False})
    ]
    assert ends[:2] == pytest.approx([scored["score"], raw["score"]], abs=1e-5)
    assert abs(ends[3] - ends[1]) > 1e-4


def test_hundred_documents_are_ranked(server: Server) -> None:
    documents = [f"{'cat ' * (n % 17)} number {n}" for n in range(100)]
    body = {"query": QUERY, "documents": documents}
    results = post(server, "/rerank", body | {"top_n": 0}).json()["results"]
    by_index = {result["index"]: result["relevance_score"] for result in results}
    scored = post(server, "/v1/score", {"text_1": QUERY, "text_2": documents}).json()["data"]
    assert [entry["index"] for entry in scored] == list(range(100))
    np.testing.assert_allclose(
        [entry["score"] for entry in scored], [by_index[n] for n in range(100)], atol=1e-5
    )


def test_score_is_that_of_the_named_model(server: Server) -> None:
    body = {"text_1": "red", "text_2": "red"}
    assert post(server, "/v1/score", body).json()["model"] == "bert-rank"
    by_cosine = post(server, "/v1/score", body | {"model": "demo"}).json()
    assert by_cosine["data"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert post(server, "/v1/score", body | {"model": "other"}).status_code == 404
    listed = CLIENT.get(server.url + "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["demo", "bert-rank"]


def test_info_describes_a_reranker_where_nothing_embeds() -> None:
    with serving(rerank_model=str(tiny.folder("bert-rank"))) as server:
        assert list(CLIENT.get(server.url + "/info").json()["model_type"]) == ["reranker"]
        assert "it needs EMBEDDING_MODEL" in post(server, "/similarity", {}).text


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    **test_embeddings.WRONG,
    "/rerank": [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": ["a"], "texts": ["a"]}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "a", "documents": [{"txt": "a"}]}, "documents[0].text"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
        ({"query": "a " * 100, "documents": ["a"]}, "query"),
    ],
    "/v1/score": [
        *test_embeddings.WRONG["/v1/score"],
        ({"model": "demo", "text_1": "", "text_2": ["b", "c"]}, "text_1"),
        ({"model": "demo", "text_1": [""], "text_2": ["b", "c"]}, "text_1[0]"),
        ({"model": "demo", "text_1": "a " * 300, "text_2": ["b", "c"]}, "text_1"),
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(path, body, param) for path, bodies in WRONG.items() for body, param in bodies],
)
def test_error_names_the_invalid_field(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    assert_refused(post(server, path, body), param)
