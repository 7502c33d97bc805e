"""The states of each token (`/embed_all`) equal those of sentence-transformers."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from batching.errors import InvalidInput
from tests.model.test_embedder import TEXTS, embed
from tests.model.test_scoring_engine import LONG, PROMPT, limit_step, paged
from tests.tiny_embedders import checkpoint, engine_of, load, prepared, run
from worker.engines.embedding.embedder import Embedder
from worker.messages.scoring import EmbeddingInput, Truncation

GENERAL = {"prompts": {"query": "what is ", "long": PROMPT}}


def token_states(embedder: Embedder, texts: list[Any], **options: Any) -> list[Any]:
    return list(
        orjson.loads(b"[%b]" % embed(embedder, texts, encoding="tokens", **options).content)
    )


def assert_equal(states: list[Any], expected: list[Any]) -> None:
    for one, other in zip(states, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * abs(other.numpy()).max())


def reference(folder: Path) -> Any:
    pytest.importorskip("sentence_transformers")
    module: Any = importlib.import_module("sentence_transformers")
    return module.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("base", "prompt"), [("bert-base", "query"), ("deberta-base", "query"), ("qwen3-base", "long")]
)
def test_states_of_tokens_equal_sentence_transformers(
    tmp_path: Path, base: str, prompt: str
) -> None:
    folder = checkpoint(tmp_path / "m", base, {"pooling_mode": "mean"}, general=GENERAL)
    embedder, oracle = load(folder), reference(folder)
    for name in (None, prompt):
        expected = oracle.encode(TEXTS, output_value="token_embeddings", prompt_name=name)
        for _ in range(2):  # a decoder takes the prompt from its prefix cache then
            assert_equal(token_states(embedder, TEXTS, prompt=name), expected)
    [cut] = token_states(embedder, [LONG], truncation=Truncation(True, 9))
    assert len(cut) == 9


def test_states_and_pooled_vectors_share_a_batch(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", pooling={"pooling_mode": "mean"}, layers=("Normalize",))
    embedder = load(folder)
    [states], [vector] = token_states(embedder, TEXTS[:1]), embed(embedder, TEXTS[:1]).vectors
    engine = engine_of(embedder)
    for encoding in ("vectors", "tokens", "vectors"):
        engine.add(prepared(engine, EmbeddingInput(TEXTS[:1], 0, encoding=encoding)))
    first, tokens, last = run(engine)
    np.testing.assert_allclose(orjson.loads(tokens.content), states, atol=1e-4)
    for output in (first, last):
        np.testing.assert_allclose(output.vectors, [vector], atol=1e-5)


def test_a_decoder_gives_the_states_of_a_text_that_runs_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": "mean"})
    embedder = load(folder)
    limit_step(paged(embedder), 32, monkeypatch)
    expected = reference(folder).encode([LONG], output_value="token_embeddings")
    assert_equal(token_states(embedder, [LONG]), expected)


def test_a_decoder_that_pools_its_last_token_has_no_states_of_others(tmp_path: Path) -> None:
    pooling = {"pooling_mode": "lasttoken"}
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base", pooling=pooling))
    with pytest.raises(InvalidInput, match="the state of a text's last token only"):
        token_states(embedder, TEXTS)
