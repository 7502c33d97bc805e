"""Vectors of all-MiniLM-L6-v2 equal those of sentence-transformers."""

import importlib
from typing import Any

import numpy as np
import pytest

from tests.model.test_embedder import embed
from tests.real.checkpoints import minilm, package_folder
from worker.engines.embedding.embedder import Embedder
from worker.engines.embedding.loading import ScoringOptions, load_embedder

pytestmark = pytest.mark.real

PARAPHRASES = [
    ("How can I reset my password?", "I forgot my login and need a new one."),
    ("A man is playing a guitar on stage.", "Somebody performs music with an instrument."),
    ("The stock market fell sharply today.", "Shares dropped steeply on Monday."),
    ("It is raining heavily outside.", "There is a downpour."),
]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(ScoringOptions(minilm()))


def test_paraphrases_are_more_similar_than_other_sentences(embedder: Embedder) -> None:
    sides = [embed(embedder, list(side)).vectors for side in zip(*PARAPHRASES, strict=True)]
    similarities = sides[0] @ sides[1].T
    assert (similarities.argmax(1) == np.arange(len(PARAPHRASES))).all()


def test_vectors_equal_sentence_transformers(embedder: Embedder) -> None:
    package_folder("sentence_transformers")
    module: Any = importlib.import_module("sentence_transformers")
    oracle = module.SentenceTransformer(minilm(), device="cpu")
    texts = [text for pair in PARAPHRASES for text in pair]
    texts += ["word", "a long one: " + "the quick brown fox jumps over the lazy dog " * 15]
    vectors = embed(embedder, texts).vectors
    assert ((vectors * oracle.encode(texts)).sum(1) > 0.9999).all()
