"""The comparison that the checks at load share: rounding passes, a fault does not."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch
from tests import tiny_decoders
from tests.generating import load_paged, small
from worker.backends.cpu.linear_layers import (
    Bf16WeightLinear,
    NativeInt4Linear,
    NativeInt8Linear,
    PackedLinear,
    _quantize_int4,
)
from worker.device.self_check import CannotRun, relative_error
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import AttentionMetadata, SpanGroup
from worker.model.check import Reference, check, run_in_float32
from worker.model.language_model import LanguageModel, load_language_model
from worker.model.paged_runner import PagedRunner

torch.set_num_threads(1)

PROMPTS = [[0], [1]]
EXACT = torch.linspace(-1, 1, 64).expand(8, 64)


def rounded(error: float, seed: int) -> Tensor:
    """Return EXACT with errors of this root mean square."""
    noise = torch.randn(EXACT.shape, generator=torch.Generator().manual_seed(seed))
    return (EXACT + error * noise).to(torch.bfloat16)


def own(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The reference: rounded, unless it runs in float32."""
    is_exact = torch.empty(0, dtype=torch.bfloat16).dtype == torch.float32
    return [EXACT if is_exact else rounded(0.05, prompt[0]) for prompt in prompts]


def test_rounding_beyond_the_tolerance_passes_by_its_error_against_float32() -> None:
    check(own, lambda prompts: [rounded(0.05, 10 + p[0]) for p in prompts], PROMPTS, 0.01)


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_an_error_larger_than_that_of_the_reference_is_refused(error: float) -> None:
    with pytest.raises(
        CannotRun, match=r"against float32 is (1\.9|2\.0|nan) times the reference's"
    ):
        check(own, lambda prompts: [rounded(error, 10 + p[0]) for p in prompts], PROMPTS, 0.01)


def test_one_wrong_row_of_many_is_refused() -> None:
    def candidate(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        logits = [rounded(0.01, 10 + prompt[0]) for prompt in prompts]
        logits[1][3] = rounded(0.5, 20)[3]
        return logits

    with pytest.raises(CannotRun, match=r"reference's, (9|10)\.\d times in the worst row"):
        check(own, candidate, PROMPTS, 0.01)


def test_a_row_that_rounding_throws_far_off_does_not_decide() -> None:
    """Its root mean square is 1.9 times the reference's."""

    def candidate(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        logits = [rounded(0.04, 10 + prompt[0]) for prompt in prompts]
        logits[1][3] = rounded(0.35, 20)[3]
        return logits

    check(own, candidate, PROMPTS, 0.01)


def test_a_reference_whose_model_has_changed_does_not_run_again() -> None:
    reference = Reference(own, PROMPTS)
    reference.close()
    with pytest.raises(CannotRun, match="the model is changed"):
        reference.check([rounded(0.05, 10 + n) for n in range(2)], 0.01)


def test_float32_logits_are_not_run_again() -> None:
    with pytest.raises(CannotRun, match=r"by 5\.0e-01 of the largest"):
        check(lambda prompts: [EXACT], lambda prompts: [EXACT / 2], PROMPTS[:1], 0.01)


# ── models ──


def loaded(name: str) -> PagedRunner:
    return load_paged(tiny_decoders.folder(name), dtype="bfloat16")


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3.5"])
@pytest.mark.parametrize("native", [False, True])
def test_float32_logits_of_a_bfloat16_model_are_those_of_its_float32_copy(
    name: str, native: bool
) -> None:
    runner = loaded(name)
    language = runner.language
    copy = language_of(name)
    to_float32: Any = copy.model.to  # torch leaves it untyped
    to_float32(torch.float32)
    if native:
        runner._use_native_ops()
    prompts = language.random_prompts([40, 21])
    run = partial(runner._run_chunks, AttentionMetadata)
    assert run(prompts)[0].dtype == torch.bfloat16
    for prompt, logits in zip(prompts, run_in_float32(run, prompts), strict=True):
        with torch.inference_mode():
            expected = copy.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize(
    "kind", [PackedLinear, NativeInt8Linear, NativeInt4Linear, Bf16WeightLinear]
)
def test_a_packed_layer_runs_in_float32_with_the_weights_that_it_has(kind: Any) -> None:
    weight, bias = (rounded(1, 1)[: 8 * n].reshape(-1)[: 80 * n].view(-1, n) for n in (6, 1))
    layer = kind(weight, bias.flatten())
    if kind is NativeInt8Linear:
        codes = layer.panels.transpose(1, 2).reshape(-1, 32)[:80, :6]
        weight = (codes.float() - 128) * layer.scales[:80, None]
    if kind is NativeInt4Linear:
        codes, *factors = _quantize_int4(torch.nn.functional.pad(weight, (0, 26)))
        scale, offset = (factor.float() for factor in factors)  # [80, 1]: of one group
        weight = ((codes.float() - 8) * scale + offset)[:, :6]
    x = EXACT[:3, :6].bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.flatten().float())
    torch.testing.assert_close(run_in_float32(layer, x), expected)


def language_of(name: str) -> LanguageModel:
    return load_language_model(small(tiny_decoders.folder(name), dtype="bfloat16"))


def test_prompts_of_the_checks_have_ordinary_tokens_only() -> None:
    language = language_of("llama")
    tokenizer = language.tokenizer
    tokenizer.add_tokens(["<added>"])
    [ids] = language.random_prompts([5000])
    vocabulary = range(language.vocab_size)
    ordinary = {n for n in vocabulary if n < len(tokenizer) and n not in tokenizer.all_special_ids}
    assert set(ids) == ordinary - set(tokenizer.get_added_vocab().values())
    assert language.random_prompts([3]) == [ids[:3]]


# ── faults, in bfloat16 ──


class WithoutWindow(AttentionMetadata):
    def groups(self, window: int, chunk: int, needs_mask: bool) -> list[SpanGroup]:
        return super().groups(0, chunk, needs_mask)


class WithSwappedHeads(AttentionMetadata):
    """Swaps two heads of one layer."""

    def attend(self, *args: Any) -> Tensor:
        out = super().attend(*args)
        return out[:, :, [1, 0, *range(2, out.shape[2])]] if args[4] == 1 else out


class WithoutStates(AttentionMetadata):
    """Loses the states of recurrent layers before each step."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        super().__init__(cache, batch)
        for state in cache.states:
            state.zero_()


@pytest.mark.parametrize(
    ("name", "fault"),
    [("mistral", WithoutWindow), ("llama", WithSwappedHeads), ("qwen3.5", WithoutStates)],
)
def test_a_faulty_backend_is_refused(name: str, fault: type[AttentionMetadata]) -> None:
    runner = loaded(name)
    runner._check_attention(AttentionMetadata)
    with pytest.raises(CannotRun, match=r"against float32 is [\d.]+ times the reference's"):
        runner._check_attention(fault)


@torch.inference_mode()
def test_an_own_forward_with_a_swapped_head_is_refused() -> None:
    language = language_of("llama")
    check_own = language.own_check()
    check_own()
    projection: Any = language.decoder.model.layers[0].self_attn.o_proj.weight
    size = projection.shape[1] // 4
    projection.copy_(projection.roll(size, 1))
    with pytest.raises(CannotRun, match="logits differ"):
        check_own()


def test_the_reference_runs_in_float32_only_when_needed_and_once() -> None:
    runs = 0

    def counted(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        nonlocal runs
        runs += 1
        return own(prompts)

    reference = Reference(counted, PROMPTS)
    reference.check(reference.logits, 0.01)
    assert runs == 1
    for _ in range(2):
        reference.check([rounded(0.05, 10), rounded(0.05, 12)], 0.01)
    assert runs == 2
