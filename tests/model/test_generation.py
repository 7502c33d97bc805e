"""Greedy output of the generation engine equals that of transformers' `generate`, with any features
and other requests."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batching import step_times
from batching.block_pool import BlockPool
from batching.sequence import Batch
from tests.generating import (
    assert_greedy,
    engine,
    greedy,
    prompts,
    request,
    serve,
)
from tests.matrix import matrix
from tests.tiny_decoders import ARCHITECTURES
from worker.backends.native_attention import NativeMetadata
from worker.engines.generation.speculation import NgramDrafter, Speculation
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import AttentionBackend, AttentionMetadata

pytestmark = pytest.mark.usefixtures("steps")

LENGTHS = (1, 2, 7, 16, 17, 33, 48, 60)
NEW = 12
PREFILL_TOKENS = 24  # prompt tokens a step
FEW_BLOCKS = 7  # for one or two of the longest sequences
FEATURES = frozenset({"chunked prefill", "prefix cache", "preemption", "speculation"})


def drafting(
    texts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> Callable[[NgramDrafter, Sequence[int], int], tuple[int, ...]]:
    """Drafts that are right up to a random position, since random weights repeat nothing."""
    whole = [[*prompt, *tokens] for prompt, tokens in zip(texts, expected, strict=True)]
    chance = random.Random(0)
    ordinary = NgramDrafter.draft

    def draft(drafter: NgramDrafter, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        drafts = ordinary(drafter, tokens, limit)
        if drafts or limit < 1:
            return drafts
        following = next(text for text in whole if text[: len(tokens)] == [*tokens])[len(tokens) :]
        right = following[: min(limit, chance.randrange(5))]
        return (*right, 7)[:limit]

    return draft


def check_parity(
    model: str, features: frozenset[str], seed: int, monkeypatch: pytest.MonkeyPatch,
    metadata: Callable[[KVCache, Batch], AttentionBackend] = AttentionMetadata,
    texts: Sequence[list[int]] = (),
) -> None:  # fmt: skip
    """Serve `texts`, or 32 prompts, at random times. Each feature occurs if and only if it is
    on."""
    texts = texts or prompts(seed, LENGTHS)
    prefill = PREFILL_TOKENS if "chunked prefill" in features else 512
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": prefill})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", prefill)  # whatever was measured
    if "prefix cache" not in features:
        monkeypatch.setattr(BlockPool, "match", lambda *arguments: ([], None))
    if "speculation" in features:
        monkeypatch.setattr(Speculation, "worthwhile", lambda budget, acceptance, limit: limit)
        monkeypatch.setattr(NgramDrafter, "draft", drafting(texts, greedy(model, texts, NEW)))
    generator = engine(
        model,
        blocks=FEW_BLOCKS if "preemption" in features else 400,
        speculation="auto" if "speculation" in features else "off",
        metadata=metadata,
    )
    served, driver = serve(generator, [request(prompt, max_tokens=NEW) for prompt in texts], seed)
    assert_greedy(model, served, NEW)
    occurred = {
        "chunked prefill": driver.partial > 0,
        "prefix cache": driver.total("cached_tokens") > 0,
        "preemption": driver.total("preempted") > 0,
        "speculation": 0 < driver.total("accepted") < driver.total("drafted"),
    }
    assert {feature for feature, did in occurred.items() if did} == features
    assert driver.total("decode_tokens") == len(texts) * NEW
    assert driver.total("admitted") == len(texts)


@pytest.mark.parametrize("model", matrix(ARCHITECTURES, "llama", "gemma3", "deepseek-v3"))
def test_greedy_output_equals_generate(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(model, FEATURES, 1, monkeypatch)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("model", matrix(ARCHITECTURES, "llama", "gpt-oss"))
def test_greedy_output_with_native_attention_equals_generate(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_parity(model, FEATURES, 1, monkeypatch, NativeMetadata)


@pytest.mark.parametrize("feature", [*sorted(FEATURES), None])
@pytest.mark.parametrize("model", matrix(["llama", "gemma3", "qwen3-moe"], "llama"))
def test_each_feature_alone_leaves_the_output_unchanged(
    model: str, feature: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_parity(model, frozenset({feature} if feature else ()), 2, monkeypatch)


COMBINATIONS = [
    frozenset(chosen) for n in range(5) for chosen in itertools.combinations(sorted(FEATURES), n)
]


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("metadata", [AttentionMetadata, NativeMetadata])
@pytest.mark.parametrize("features", COMBINATIONS, ids=lambda chosen: "+".join(sorted(chosen)))
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_all_combinations_of_features_leave_the_output_unchanged(
    model: str, features: frozenset[str], metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_parity(model, features, 3, monkeypatch, metadata)
