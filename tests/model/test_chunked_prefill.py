"""Decoders that embed or rerank run prefill in chunks on paged memory, with a prefix cache."""

import importlib
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batching.batcher import DynamicBatcher
from batching.request_queue import WorkItem
from tests import tiny_decoders
from tests.event_streams import post
from tests.http.test_rerank import decoder, scores
from tests.http.test_rerank import load as load_reranker
from tests.model.test_embedder import TEXTS, embed
from tests.serving import serving
from tests.tiny_embedders import checkpoint, load, write
from worker.embedding import chunked_prefill
from worker.embedding.chunked_prefill import ChunkedPrefillModel
from worker.embedding.embedder import Embedder
from worker.embedding.tokenization import TokenRow
from worker.messages.protocol import UNFINISHED, Unfinished
from worker.messages.scoring import EmbeddingInput
from worker.model.attention.kv_cache import BLOCK
from worker.pipeline.engine import PipelineEngine

hf: Any = importlib.import_module("transformers")  # half of it is not annotated
PROMPT = "the cat sat on the mat and a dog is in the city of light " * 3
LONG = "a cow says moo " * 20


def record_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the tokens of each step from now on."""
    assert isinstance(model, ChunkedPrefillModel)
    counts: list[int] = []
    forward = model.runner.forward

    def counting(batch: Any) -> Any:
        counts.append(len(batch.ids))
        return forward(batch)

    monkeypatch.setattr(model.runner, "forward", counting)
    return counts


EmbeddingItem = WorkItem[EmbeddingInput, list[TokenRow]]


def item_of(embedder: Embedder, *texts: str, **options: Any) -> EmbeddingItem:
    item: EmbeddingItem = WorkItem(EmbeddingInput(texts, 0, **options), float("inf"), 0.0)
    embedder.prepare(item)
    return item


@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize("name", ["lasttoken", "mean", "weightedmean", "max"])
def test_vectors_equal_sentence_transformers_with_and_without_a_cached_prefix(
    tmp_path: Path, name: str, included: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = pytest.importorskip("sentence_transformers")
    pooling = {"pooling_mode": name, "include_prompt": included}
    general = {"prompts": {"query": PROMPT}}
    folder = checkpoint(
        tmp_path / "m", "qwen3-base", pooling=pooling, prefix="sentence_transformers.models."
    )
    write(folder, "config_sentence_transformers.json", general)
    embedder = load(folder)
    steps = record_steps(embedder.model, monkeypatch)
    oracle = importlib.import_module(module.__name__).SentenceTransformer(str(folder), device="cpu")
    expected = oracle.encode(TEXTS, prompt_name="query")
    item = item_of(embedder, *TEXTS, prompt="query")
    for is_cached in (False, True):
        steps.clear()
        vectors = embed(embedder, TEXTS, prompt="query").vectors
        np.testing.assert_allclose(vectors, expected, atol=1e-4 * abs(expected).max())
        prompt = len(embedder.tokenizer.encode(PROMPT)) // BLOCK * BLOCK
        saved = len(TEXTS) if is_cached else len(TEXTS) - 1
        assert sum(steps) <= item.tokens - saved * prompt


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral", "opt"])
def test_decoders_give_the_states_of_their_own_forward(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_decoders.folder(name), tmp_path / name)
    embedder = load(folder)
    assert embedder.info.batching == "continuous"
    model = hf.AutoModel.from_pretrained(folder).eval()
    texts = [*TEXTS, "moo " * 30]
    for _ in range(2):
        vectors = embed(embedder, texts, normalize=False).vectors
        for text, vector in zip(texts, vectors, strict=True):
            ids = torch.tensor([embedder.tokenizer.encode(text)])
            expected = model(input_ids=ids).last_hidden_state[0].mean(0).detach().numpy()
            np.testing.assert_allclose(vector, expected, atol=1e-3 * abs(expected).max())


def test_a_model_that_does_not_run_paged_is_left_unchanged(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_decoders.folder("bloom"), tmp_path / "m")
    embedder = load(folder)
    assert embedder.info.batching != "continuous"
    model = hf.AutoModel.from_pretrained(folder).eval()
    [vector] = embed(embedder, TEXTS[:1], normalize=False).vectors
    ids = torch.tensor([embedder.tokenizer.encode(TEXTS[0])])
    expected = model(input_ids=ids).last_hidden_state[0].mean(0).detach().numpy()
    np.testing.assert_allclose(vector, expected, atol=1e-3 * abs(expected).max())


def test_a_model_without_memory_for_its_longest_text_is_not_paged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_prefill, "cache_blocks", lambda *arguments: 2)
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    assert embedder.info.batching == "packed"


def test_a_cached_prefix_is_shared_within_a_cache_namespace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    steps = record_steps(embedder.model, monkeypatch)
    ran = []
    for namespace in (b"one", b"two", b"one"):
        steps.clear()
        embedder.run(EmbeddingInput([PROMPT], 0, cache_namespace=namespace))
        ran.append(sum(steps))
    assert ran[0] == ran[1] > ran[2]


def test_a_query_runs_once_for_all_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reranker = load_reranker(decoder(tmp_path / "m"))
    steps = record_steps(reranker.model, monkeypatch)
    documents = [f"{word} is a city" for word in ("paris", "rome", "moo", "light", "a")]
    scores(reranker, documents)
    [one, *_] = steps
    assert sum(steps) < 2 * one


def limit_step(embedder: Embedder, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = embedder.model
    monkeypatch.setattr(rows._budget, "prompt_tokens", lambda streaming, **_: tokens)


def test_a_long_text_runs_in_chunks_beside_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": "mean"}))
    alone = embed(embedder, [LONG]).vectors
    embedder.model._reset()  # type: ignore[attr-defined]
    limit_step(embedder, 32, monkeypatch)
    steps = record_steps(embedder.model, monkeypatch)
    long, short = item_of(embedder, LONG), item_of(embedder, "hello")
    assert embedder.forward([long.prepared]) == [UNFINISHED]
    raw, done = embedder.forward([long.prepared, short.prepared])
    assert raw is UNFINISHED
    assert done is not UNFINISHED
    while isinstance(raw, Unfinished):
        [raw] = embedder.forward([long.prepared])
    np.testing.assert_allclose(embedder.finish(long, raw).vectors, alone, atol=1e-5)
    assert max(steps) <= 32
    assert sum(steps) == long.tokens + short.tokens


def test_a_cancelled_row_frees_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    limit_step(embedder, 32, monkeypatch)
    rows: Any = embedder.model
    embedder.forward([item_of(embedder, LONG).prepared])
    assert rows._scheduler.pool.used
    embed(embedder, ["hello"])
    assert not rows._scheduler.pool.used


def test_a_failed_step_leaves_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    rows: Any = embedder.model
    forward = rows.runner.forward

    def failing(batch: Any) -> Any:
        raise ValueError("a broken model")

    rows.runner.forward = failing
    with pytest.raises(ValueError, match="broken"):
        embed(embedder, [LONG])
    assert not rows._scheduler.pool.used
    rows.runner.forward = forward
    embed(embedder, [LONG])


def test_a_row_that_fails_in_a_later_chunk_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    limit_step(embedder, 32, monkeypatch)
    rows: Any = embedder.model
    forward, poison = rows.runner.forward, embedder.tokenizer.encode("paris")[-1]

    def failing(batch: Any) -> Any:
        if poison in batch.ids:
            raise ValueError("a broken model")
        return forward(batch)

    monkeypatch.setattr(rows.runner, "forward", failing)
    engine = PipelineEngine(embedder, DynamicBatcher[Any](8, 1000, 0.0))
    bad, good = item_of(embedder, "a cow says moo " * 5 + "paris"), item_of(embedder, "moo " * 60)
    for item in (bad, good):
        engine.add(item)
    failed: list[WorkItem] = []
    finished: list[WorkItem] = []
    while engine.busy:
        outcome = engine.step(math.inf)
        assert outcome
        failed += [item for item, _ in outcome.done]
        finished += [item for item, _ in outcome.outputs]
    assert (failed, finished) == ([bad], [good])


# ── over HTTP ──


def test_api_keys_and_cache_salts_share_no_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint(tmp_path / "m", "qwen3-base"))
    ranking = str(decoder(tmp_path / "r"))
    with serving(embedding_model=folder, rerank_model=ranking, api_keys=("one", "two")) as server:
        requests: dict[str, tuple[str, Any]] = {
            "/v1/embeddings": ("embedding", {"input": PROMPT}),
            "/rerank": ("rerank", {"query": PROMPT, "documents": ["a"]}),
            "/v1/score": ("rerank", {"text_1": LONG, "text_2": "a", "model": ranking}),
        }
        for path, (name, body) in requests.items():
            model: Any = server.worker_client.models[name]
            with monkeypatch.context() as patch:
                steps, ran = record_steps(model.engine.runner.model, patch), []
                for key, salt in (("one", {}), ("two", {}), ("one", {"cache_salt": "mine"})):
                    for _ in range(2):
                        steps.clear()
                        bearer = f"Bearer {key}"
                        answer = post(server, path, {**body, **salt}, authorization=bearer)
                        assert answer.status_code == 200
                        ran.append(sum(steps))
            assert ran[0] == ran[2] == ran[4]
            assert ran[1] == ran[3] == ran[5] < ran[0]


def test_long_texts_are_embedded_over_many_steps(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": "lasttoken"})
    texts = [LONG, "hello", LONG[2:]] * 12
    with serving(embedding_model=str(folder)) as server:
        whole = post(server, "/embed", {"inputs": texts}).json()
        model: Any = server.worker_client.models["embedding"]
        rows = model.engine.runner.model
        rows._reset()
        rows._budget.prompt_tokens = lambda streaming, **_: 40
        np.testing.assert_allclose(
            post(server, "/embed", {"inputs": texts}).json(), whole, atol=1e-5
        )
        assert not rows._scheduler.pool.used
        assert not model.engine.busy
