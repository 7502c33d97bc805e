"""Decoders that embed or rerank are sequences of the generation engine, with a prefix cache."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batching.fair_share import WorkOwner
from batching.request_queue import WorkItem
from tests import tiny_decoders
from tests.event_streams import post
from tests.http.test_rerank import decoder, scores
from tests.http.test_rerank import load as load_reranker
from tests.model.test_embedder import TEXTS, embed
from tests.serving import serving
from tests.tiny import hf
from tests.tiny_embedders import checkpoint, dense, engine_of, load, prepared, run, write
from worker.engines.embedding import engine as engine_module
from worker.engines.embedding.embedder import Embedder
from worker.engines.embedding.engine import ScoringEngine
from worker.engines.embedding.reranker import Reranker
from worker.engines.generation.engine import RUNS_AHEAD
from worker.messages.scoring import EmbeddingInput
from worker.model.attention.kv_cache import BLOCK
from worker.model.paged_runner import PagedRunner

PROMPT = "the cat sat on the mat and a dog is in the city of light " * 3
LONG = "a cow says moo " * 20


def paged(scorer: Embedder | Reranker) -> ScoringEngine:
    engine = engine_of(scorer)
    assert isinstance(engine, ScoringEngine)
    return engine


def record_steps(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the tokens of each step from now on."""
    counts: list[int] = []
    forward = engine.runner.forward

    def counting(batch: Any, sampled: Any = None) -> Any:
        counts.append(len(batch.ids))
        return forward(batch, sampled)

    monkeypatch.setattr(engine.runner, "forward", counting)
    return counts


def item_of(embedder: Embedder, *texts: str, **options: Any) -> WorkItem[Any, Any, Any]:
    return prepared(engine_of(embedder), EmbeddingInput(texts, 0, **options))


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
    steps = record_steps(paged(embedder), monkeypatch)
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


# BLOOM does not run paged, and is left unchanged.
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral", "opt", "bloom"])
def test_decoders_give_the_states_of_their_own_forward(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_decoders.folder(name), tmp_path / name)
    embedder = load(folder)
    assert (embedder.info.batching == "continuous") == (name != "bloom")
    model = hf.AutoModel.from_pretrained(folder).eval()
    texts = [*TEXTS, "moo " * 30]
    for _ in range(2):
        vectors = embed(embedder, texts, normalize=False).vectors
        for text, vector in zip(texts, vectors, strict=True):
            ids = torch.tensor([embedder.tokenizer.encode(text)])
            expected = model(input_ids=ids).last_hidden_state[0].mean(0).detach().numpy()
            np.testing.assert_allclose(vector, expected, atol=1e-3 * abs(expected).max())


def test_a_model_without_memory_for_its_longest_text_is_not_paged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "cache_blocks", lambda *arguments: 2)
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    assert embedder.info.batching == "packed"


def test_a_query_runs_once_for_all_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reranker = load_reranker(decoder(tmp_path / "m"))
    steps = record_steps(paged(reranker), monkeypatch)
    documents = [f"{word} is a city" for word in ("paris", "rome", "moo", "light", "a")]
    scores(reranker, documents)
    [one, *_] = steps
    assert sum(steps) < 2 * one


def limit_step(engine: ScoringEngine, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._budget, "prompt_tokens", lambda *_: tokens)


def test_a_long_text_runs_in_chunks_beside_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": "mean"}))
    alone, engine = embed(embedder, [LONG]).vectors, paged(embedder)
    engine.clear()
    limit_step(engine, 32, monkeypatch)
    steps = record_steps(engine, monkeypatch)
    long, short = item_of(embedder, LONG), item_of(embedder, "hello")
    engine.add(long)
    assert not engine.step().outputs
    engine.add(short)
    outcome = engine.step()
    assert [item for item, _ in outcome.outputs] == [short]
    [output] = run(engine)
    np.testing.assert_allclose(output.vectors, alone, atol=1e-5)
    assert max(steps) <= 32
    assert sum(steps) == long.tokens + short.tokens
    assert (short.batch_size, long.batch_size) == (2, 1)
    assert short.started_at <= short.finished_at < long.finished_at


@pytest.mark.parametrize("name", ["lasttoken", "mean"])
def test_vectors_are_equal_when_steps_run_ahead(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": name}))
    texts = [*TEXTS, LONG]
    expected = embed(embedder, texts).vectors
    monkeypatch.setitem(RUNS_AHEAD, "cpu", True)
    del vars(embedder)["engine"]
    limit_step(paged(embedder), 40, monkeypatch)
    np.testing.assert_allclose(embed(embedder, texts).vectors, expected, atol=1e-5)
    assert not paged(embedder).scheduler.pool.used


@pytest.mark.usefixtures("native")
def test_a_vector_does_not_depend_on_the_other_texts_of_a_step(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3-base", pooling={}, layers=("Dense",))
    dense(folder, "2_Dense", 12, "torch.nn.Tanh")
    embedder = load(folder, compile="on")
    runner = paged(embedder).runner
    assert isinstance(runner, PagedRunner)
    runner._use_native_ops()
    together = embed(embedder, TEXTS).vectors
    for text, vector in zip(TEXTS, together, strict=True):
        paged(embedder).clear()
        np.testing.assert_array_equal(embed(embedder, [text]).vectors[0], vector)


def test_a_client_with_one_text_waits_at_most_two_steps_behind_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base"))
    engine = paged(embedder)
    limit_step(engine, 100, monkeypatch)
    lists = [item_of(embedder, *[f"{n} {LONG}" for n in range(16)]) for _ in range(4)]
    for item in lists:
        item.owner = WorkOwner("a")
        engine.add(item)
    engine.step()
    one = item_of(embedder, "hello")
    one.owner = WorkOwner("b")
    engine.add(one)
    assert one in [item for _ in range(2) for item, _ in engine.step().outputs]
    assert len(engine.live) == 4


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
                steps, ran = record_steps(model.engine, patch), []
                for key, salt in (("one", {}), ("two", {}), ("one", {"cache_salt": "mine"})):
                    for _ in range(2):
                        steps.clear()
                        bearer = f"Bearer {key}"
                        answer = post(server, path, {**body, **salt}, authorization=bearer)
                        assert answer.status_code == 200
                        ran.append(sum(steps))
            assert ran[0] == ran[2] == ran[4]
            assert ran[1] == ran[3] == ran[5] < ran[0]


@pytest.mark.parametrize("name", ["lasttoken", "mean"])
def test_a_head_reads_the_last_state_alone_where_that_is_enough(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(checkpoint(tmp_path / "m", "qwen3-base", pooling={"pooling_mode": name}))
    forward, read = paged(embedder).runner.forward, []

    def counting(batch: Any, sampled: Any) -> Any:
        read.append(len(batch.rows))
        return forward(batch, sampled)

    monkeypatch.setattr(paged(embedder).runner, "forward", counting)
    embed(embedder, TEXTS)
    assert read == [len(TEXTS) if name == "lasttoken" else item_of(embedder, *TEXTS).tokens]
