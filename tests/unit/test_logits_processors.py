"""A row's scores are those of transformers' list of processors for the same generation_config."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, WatermarkingConfig
from transformers.generation import logits_process

from worker.model import sampler
from worker.model.logit_changes import process_logits
from worker.model.logits_processors import CheckpointProcessors, NoRepeatedNgrams
from worker.model.sampler import (
    SamplingInputs,
    SamplingParams,
    SamplingRow,
    SamplingState,
    TokenMask,
)

VOCABULARY, EOS, MAX_TOKENS = 200, [3, 7], 6
PROMPT, OUTPUT = [4, 9, 11, 4, 9, 12, 4], [9, 11, 30, 40, 9, 42]
untyped: Any = GenerationConfig  # not annotated

PROCESSORS: dict[str, dict[str, Any]] = {
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[11, 30, 8], 9.0], [[2, 8], 4.0]]},
    "biased, then repeated": {
        "sequence_bias": [[[4], 3.0], [[30, 9], -2.0]],
        "repetition_penalty": 1.7,
    },
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.6, "repetition_penalty": 1.2},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[6], [30, 10], [11, 30, 12], [3]]},
    "min_length": {"min_length": 12},
    "min_new_tokens": {"min_new_tokens": 5, "min_length": 1},
    "forced_bos_token_id": {"forced_bos_token_id": 15},
    "forced_eos_token_id": {"forced_eos_token_id": [3, 7]},
    "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [1]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [1, 1.6]},
    "suppress_tokens": {"suppress_tokens": [1, 50, -1, 10**6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [2, 51]},
    "begin after a forced token": {"begin_suppress_tokens": [2, 51], "forced_bos_token_id": 15},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark by itself": {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")
    },
    "renormalize_logits": {"renormalize_logits": True, "bad_words_ids": [[6]]},
}
WARPERS: dict[str, dict[str, Any]] = {
    "top_h": {"top_h": 0.4, "temperature": 1.5},
    "typical_p": {"typical_p": 0.6, "top_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, "top_k": 40},
    "eta_cutoff": {"eta_cutoff": 0.02, "min_p": 0.01},
    "all": {
        "top_h": 0.9, "typical_p": 0.8, "epsilon_cutoff": 0.001, "eta_cutoff": 0.002, "top_k": 50,
        "top_p": 0.95, "min_p": 0.001, "temperature": 1.3, "bad_words_ids": [[6]],
        "watermarking_config": WatermarkingConfig(), "renormalize_logits": True,
    },
}  # fmt: skip


def expected(config: Any, prompt: list[int], ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the scores [1, V] by the list that `generate` builds."""
    config.max_length = len(prompt) + MAX_TOKENS
    if config.min_new_tokens is not None:
        config.min_length = len(prompt) + config.min_new_tokens
    config._eos_token_tensor = torch.tensor(EOS)
    text_config = SimpleNamespace(vocab_size=VOCABULARY)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda: text_config),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    build: Any = GenerationMixin._get_logits_processor
    processors = build(model, config, len(prompt), torch.tensor([prompt]), device="cpu")
    scores: torch.Tensor = processors(torch.tensor([ids]), logits)
    return scores


def checkpoint_processors(config: Any) -> CheckpointProcessors:
    return CheckpointProcessors(config, VOCABULARY, EOS, torch.device("cpu"))


def params_of(config: Any, prompt: list[int], **more: Any) -> SamplingParams:
    values = {
        "temperature": (config.temperature or 1.0) if config.do_sample else 0.0,
        "top_p": config.top_p or 1.0,
        "top_k": config.top_k or 0,
        "min_p": config.min_p or 0.0,
        "repetition_penalty": config.repetition_penalty or 1.0,
        "min_tokens": config.min_new_tokens or max(0, (config.min_length or 0) - len(prompt)),
        "stop_token_ids": tuple(EOS),
    }
    processors = checkpoint_processors(config)
    return processors.extend(SamplingParams(**{**values, **more}), prompt, MAX_TOKENS, False)


def rows_of(params: SamplingParams, prompt: list[int], drafted: int) -> list[SamplingRow]:
    """A row for each position of the output, the last `drafted` of them as drafts."""
    rows = []
    for length in range(len(OUTPUT) + 1):
        state = SamplingState(params, 0, prompt).fork(1)
        accepted = max(0, length - drafted)
        for token in OUTPUT[:accepted]:
            state.accept(token)
        rows.append(SamplingRow(state, length, tuple(OUTPUT[accepted:length])))
    return rows


def scores_of(rows: list[SamplingRow], logits: torch.Tensor) -> torch.Tensor:
    raw = sampler.blocked(logits)
    return process_logits(raw, rows, VOCABULARY, None).flatten(1)[:, :VOCABULARY]


def logits_of(rows: int) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("prompt", [PROMPT, [4]])
@pytest.mark.parametrize("name", [*PROCESSORS, *WARPERS])
def test_scores_equal_those_of_generate(name: str, prompt: list[int]) -> None:
    samples = name in WARPERS
    fields = (PROCESSORS | WARPERS)[name]
    params = params_of(untyped(do_sample=samples, **fields), prompt)
    extends_any = checkpoint_processors(untyped(do_sample=samples, **fields)).extend_any()
    assert extends_any == bool(params.processors or params.warpers)
    for drafted in (0, 2):
        rows = rows_of(params, prompt, drafted)
        logits = logits_of(len(rows))
        scores = scores_of(rows, logits)
        changed = False
        for row, row_logits, row_scores in zip(rows, logits, scores, strict=True):
            ids = [*prompt, *OUTPUT[: row.position]]
            config = untyped(do_sample=samples, **fields)
            wanted = expected(config, prompt, ids, row_logits[None].clone())[0]
            torch.testing.assert_close(row_scores, wanted, rtol=1e-6, atol=1e-6)
            changed |= not torch.equal(wanted, row_logits)
        assert changed or (name == "forced_bos_token_id" and prompt == PROMPT)


def test_a_checkpoint_without_such_fields_extends_no_request() -> None:
    config = untyped(do_sample=True, top_k=3, top_p=0.8, temperature=0.7, repetition_penalty=1.2)
    assert not checkpoint_processors(config).extend_any()


def test_a_row_that_samples_through_warpers_has_no_other_filters() -> None:
    """They are among the warpers, in the order of `generate`."""
    config = untyped(do_sample=True, typical_p=0.5, top_k=3, top_p=0.8, min_p=0.1, temperature=0.7)
    params = params_of(config, PROMPT)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    greedy = params_of(config, PROMPT, temperature=0.0)
    assert greedy.warpers == ()
    logits = logits_of(1).expand(500, -1)
    rows = [SamplingRow(SamplingState(params, 0, PROMPT), n) for n in range(500)]
    tokens = {sampled.token for sampled in sampler.sample(logits, SamplingInputs(rows)).read()}
    kept = expected(config, PROMPT, PROMPT, logits[:1].clone())[0].isfinite().nonzero()[:, 0]
    assert tokens == set(kept.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_wins_over_the_checkpoint(temperature: float) -> None:
    """Processors that leave no token that the grammar allows have no effect on that token."""
    config = untyped(do_sample=True, suppress_tokens=[5, 6], typical_p=0.9, forced_eos_token_id=3)
    params = params_of(config, PROMPT, temperature=temperature)
    state = SamplingState(params, 0, PROMPT)
    rows = [SamplingRow(state, n) for n in (0, 0, MAX_TOKENS - 1)]
    logits = logits_of(3)
    logits[:, 6] = 50.0
    for allowed, wanted in ([5, 6], 6), ([5], 5), ([6, 8], 8):
        mask = torch.zeros(2, VOCABULARY, dtype=torch.bool)
        mask[:, allowed] = True
        inputs = SamplingInputs(rows)
        free, masked, last = sampler.sample(logits, inputs, TokenMask([1, 2], mask)).read()
        assert free.token not in (5, 6)
        assert (masked.token, last.token) == (wanted, wanted)


def test_without_a_grammar_processors_that_leave_no_token_have_no_effect() -> None:
    params = params_of(untyped(do_sample=False, suppress_tokens=list(range(VOCABULARY))), PROMPT)
    logits = logits_of(1)
    rows = [SamplingRow(SamplingState(params, 0, PROMPT), 0)]
    [sampled] = sampler.sample(logits, SamplingInputs(rows)).read()
    assert sampled.token == int(logits.argmax())


@pytest.mark.parametrize("fields", [{"top_h": 0.5}, {"eta_cutoff": 0.1}, {"bad_words_ids": [[2]]}])
def test_scores_that_are_not_numbers_stay_visible(fields: dict[str, Any]) -> None:
    params = params_of(untyped(do_sample=True, **fields), PROMPT)
    rows = [SamplingRow(SamplingState(params, 0, PROMPT), 0)] * 2
    logits = logits_of(2)
    logits[0, 5] = torch.nan
    broken, other = sampler.sample(logits, SamplingInputs(rows)).read()
    assert broken.token == -1
    assert other.token >= 0


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_repeated_ngrams_are_those_of_transformers(size: int) -> None:
    """In texts of few tokens, and in longer ones of one token."""
    generator = torch.Generator().manual_seed(size)
    texts = [torch.randint(0, 4, (1, n), generator=generator) for n in range(1, 60)]
    for ids in [*texts, torch.zeros(1, 3000, dtype=torch.long)]:
        scores = torch.randn(1, 4, generator=generator)
        wanted: Any = logits_process.NoRepeatNGramLogitsProcessor(size)
        assert torch.equal(NoRepeatedNgrams(size)(ids, scores), wanted(ids, scores))
