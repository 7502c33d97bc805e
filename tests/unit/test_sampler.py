"""A sampled token depends on its row, parameters and counter, and follows the distribution."""

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

from worker.model import sampler
from worker.model.logit_changes import process_logits
from worker.model.logprobs import prompt_logprobs
from worker.model.sampler import (
    AHEAD,
    BLOCK,
    VECTORIZED,
    SampledToken,
    SamplingInputs,
    SamplingParams,
    SamplingRow,
    SamplingState,
    TokenMask,
    uniform,
    uniforms,
)

WIDE = 20_000  # needs blocks of candidates, two widenings and a full sort
INF, NAN = float("inf"), float("nan")


def row(
    position: int = 0, choice: int = 0, prompt: Sequence[int] = (), **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingState(SamplingParams(**params), choice, prompt), position)


def after(output: Sequence[int], prompt: Sequence[int] = (), **params: Any) -> SamplingRow:
    state = SamplingState(SamplingParams(**params), 0, prompt)
    for token in output:
        state.accept(token)
    return SamplingRow(state, len(output))


def normal(rows: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator)


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], mask: TokenMask | None = None
) -> list[SampledToken]:
    return sampler.sample(logits, SamplingInputs(rows), mask).read()


def tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    return [choice.token for choice in sample(logits, rows)]


def reference(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Return probabilities [V] in float64, by a full sort and one filter after the other."""
    scores = logits.double().clone()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.repetition_penalty != 1.0 and (prompt or output):
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = processor(torch.tensor([[*prompt, *output]]), scores[None])[0]
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -INF
    if params.temperature == 0:
        return torch.zeros_like(scores).scatter_(0, scores.argmax(0, keepdim=True), 1.0)
    p = (scores / params.temperature).softmax(0)
    p = torch.where(p < params.min_p * p.max(), 0.0, p)
    p, order = p.sort(descending=True, stable=True)
    if params.top_k:
        p[p < p[min(params.top_k, len(p)) - 1]] = 0.0
    p /= p.sum()
    before = p.cumsum(0) - p
    p = torch.where(before < params.top_p, p, 0.0)
    return torch.zeros_like(p).scatter_(0, order, p / p.sum())


def inverse(p: torch.Tensor, u: float) -> int:
    return min(int((p.cumsum(0) <= u).sum()), int(p.nonzero().max()))


def random_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    def maybe(likely: float, value: Any, default: Any) -> Any:
        return value if rng.random() < likely else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        top_p=maybe(0.5, rng.choice([1e-6, 0.3, 0.8, 0.9, 0.95, 0.999]), 1.0),
        top_k=maybe(0.3, rng.choice([1, 5, 50, 64, 65, 1000]), 0),
        min_p=maybe(0.3, rng.choice([0.001, 0.05, 0.5, 1.0]), 0.0),
        presence_penalty=maybe(0.3, rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(0.3, rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(0.3, rng.uniform(0.7, 1.8), 1.0),
        logit_bias=maybe(0.3, tuple((rng.randrange(vocabulary), 5.0) for _ in range(1)), ()),
        seed=rng.getrandbits(64),
        min_tokens=maybe(0.3, rng.randrange(8), 0),
        stop_token_ids=(rng.randrange(vocabulary), rng.randrange(vocabulary)),
    )


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What samples rows that had too few candidates."""
    if request.param == "native":
        request.getfixturevalue("native")
    else:
        monkeypatch.setattr(torch.ops.onequeue, "sample_filtered", sampler._sample_filtered)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("vocabulary", "count", "scale", "dtype"),
    [
        (7, 200, 2.0, torch.float32),
        (128, 100, 3.0, torch.float32),
        (1000, 100, 3.0, torch.float32),
        (WIDE, 80, 3.0, torch.float32),
        (WIDE, 60, 3.0, torch.bfloat16),  # many equal logits
        (WIDE, 30, 0.3, torch.float32),
    ],
)
def test_tokens_equal_a_full_sort_in_float64(
    vocabulary: int, count: int, scale: float, dtype: torch.dtype
) -> None:
    rng = random.Random(vocabulary)
    logits = normal(count, vocabulary, scale).to(dtype)
    rows, accepted = [], []
    for row_logits in logits:
        params = random_params(rng, vocabulary)
        likely = row_logits.topk(5).indices.tolist()
        prompt = [*likely[:3], *rng.choices(range(vocabulary), k=rng.randrange(20))]
        output = rng.choices([*likely, *range(min(vocabulary, 50))], k=rng.randrange(10))
        choice = rng.randrange(4)
        drafted = rng.randrange(len(output) + 1)
        state = SamplingState(params, choice, prompt)
        for token in output[drafted:]:
            state.accept(token)
        rows.append(SamplingRow(state, len(output), tuple(output[:drafted])))
        u = uniform(params.seed, choice, len(output))
        either = [  # the same, except where rounding decides
            reference(row_logits, replace(params, top_p=top_p), prompt, output)
            for top_p in (params.top_p, min(params.top_p * (1 + 1e-6), 1.0))
        ]
        accepted.append({inverse(p, u + slack) for p in either for slack in (-1e-6, 0.0, 1e-6)})
    sampled = tokens(logits, rows)
    wrong = [(i, sampled[i], ids) for i, ids in enumerate(accepted) if sampled[i] not in ids]
    assert not wrong
    assert sum(len(ids) == 1 for ids in accepted) > 0.95 * count


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"temperature": 0.6, "logprobs": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.99},
    {"top_k": 20, "top_p": 0.8, "logprobs": 20},
    {"top_k": 1000},
    {"min_p": 0.02},
    {"min_p": 0.0001, "top_p": 0.9},
    {"logit_bias": ((5, 4.0),), "min_tokens": 9, "stop_token_ids": (6,)},
    {"repetition_penalty": 1.2, "top_p": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 50},
]


def mixed(count: int) -> list[SamplingRow]:
    kinds = [MIXED[i % len(MIXED)] for i in range(count)]
    return [row(i % 5, i % 3, range(50), seed=i, **kind) for i, kind in enumerate(kinds)]


def test_a_row_is_independent_of_the_other_rows_and_their_order() -> None:
    logits, rows = normal(32, WIDE), mixed(32)
    together = sample(logits, rows)
    order = random.Random(1).sample(range(32), 32)
    shuffled = sample(logits[order], [rows[i] for i in order])
    for at, i in enumerate(order):
        alone = sample(logits[i : i + 1], rows[i : i + 1])[0]
        for other in (together[i], shuffled[at]):
            assert other.token == alone.token
            assert other.logprob == pytest.approx(alone.logprob, abs=1e-5)
            assert [token for token, _ in other.top] == [token for token, _ in alone.top]


def test_logits_that_differ_by_rounding_rarely_change_a_token() -> None:
    """Two nearly equal candidates swap ranks; the sampled tokens must not swap with them."""
    logits = torch.full((1, WIDE), -20.0)
    logits[0, [3, 9000]] = 5.0
    swapped = logits.clone()
    logits[0, 3] += 1e-6
    swapped[0, 9000] += 1e-6
    rows = [row(i, top_p=0.95) for i in range(100)]
    assert tokens(logits.expand(100, -1), rows) == tokens(swapped.expand(100, -1), rows)


def test_rows_that_continue_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other rows leave and join, each is sampled as alone."""
    computed = 0

    def counted(rows: Sequence[SamplingRow], count: int) -> Any:
        nonlocal computed
        computed += len(rows) * count
        return uniforms(rows, count)

    monkeypatch.setattr(sampler, "uniforms", counted)
    rows, inputs = mixed(26), SamplingInputs([])
    joined = 26
    for step in range(3 * AHEAD):
        if step in (20, 21, 50):  # one leaves, one joins, and they are in another order
            joined += 1
            rows = [row(seed=joined), *rows[:3:-1], *rows[:3]]
            inputs = SamplingInputs(rows, inputs)
        elif step == 70:  # of which a row is not sampled
            rows = [*rows[:5], SamplingRow(rows[5].state, rows[5].position - 1), *rows[6:]]
            inputs = SamplingInputs(rows, inputs)
        elif step:
            inputs = inputs.following()
        else:
            inputs = SamplingInputs(rows)
        assert inputs.rows == rows
        logits = normal(26, 700)
        before, expected = computed, sample(logits, rows)
        computed = before
        assert sampler.sample(logits, inputs).read() == expected
        rows = [SamplingRow(row.state, row.position + 1) for row in rows]
    assert computed <= 26 * (1 + 4 * AHEAD) + 4 * VECTORIZED


def test_penalties_of_a_long_output_are_not_counted_again_for_each_draft() -> None:
    """17 rows take less time than adding up the counts of 8 in Python."""
    output = [*range(20_000)]
    state = after(output, temperature=0.0, frequency_penalty=0.5).state
    rows = [SamplingRow(state, len(output) + n, (7,) * n) for n in range(17)]
    raw, counted = sampler.blocked(normal(17, WIDE)), Counter(output)

    def cpu_s(run: Callable[[], object]) -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    rows_s = min(cpu_s(lambda: process_logits(raw, rows, WIDE, None)) for _ in range(5))
    counter_s = min(cpu_s(lambda: counted + Counter((7,))) for _ in range(5))
    assert rows_s < 8 * counter_s


def test_ids_out_of_range_change_no_other_row() -> None:
    logits = normal(3, 256)
    logits[:, 0] = 9.0
    odd = row(
        prompt=[256, 300, -1, 256 + 255],
        temperature=0.0,
        repetition_penalty=3.0,
        logit_bias=((256, 100.0), (257, -100.0), (-1, 100.0)),
    )
    greedy = row(temperature=0.0)
    assert tokens(logits, [greedy, odd, greedy]) == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("kernel")
def test_all_logits_equal_to_the_last_of_top_k_are_kept() -> None:
    """As `generate` and vLLM do; many rows in bfloat16 have such ties."""
    few = normal(1, WIDE)
    ties = [19_000, 77, 15_000, 300, 12_000, 4]
    few[0, ties] = 20.0
    for params in ({"top_k": 3}, {"top_k": 3, "min_p": 0.5}, {"top_k": 3, "top_p": 0.99}):
        sampled = tokens(few.expand(100, -1), [row(i, **params) for i in range(100)])
        assert set(sampled) == {*ties}
    few[0, 5] = 22.0
    halved = tokens(few.expand(100, -1), [row(i, top_k=2, top_p=0.5) for i in range(100)])
    assert set(halved) == {5}
    logits = torch.zeros(1, WIDE)  # more ties than candidates
    logits[0, 12_345] = 9.0
    sampled = tokens(logits.expand(400, -1), [row(i, top_k=4) for i in range(400)])
    assert 12_345 in sampled
    assert len(set(sampled)) > 100


@pytest.mark.parametrize("vocabulary", [10, 1000, WIDE])
def test_greedy_takes_the_first_of_equal_logits(vocabulary: int) -> None:
    logits = torch.zeros(3, vocabulary)
    logits[1, [4, vocabulary - 1]] = 2.0
    logits[2, -3:] = 1.0
    assert tokens(logits, [row(temperature=0.0)] * 3) == [0, 4, vocabulary - 3]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(params: dict[str, Any], temperature: float) -> None:
    logits = torch.cat((normal(20, 700, 10.0), torch.tensor([3e38, -3e38]).repeat(1, 350)))
    rows = [row(i, temperature=temperature, **params) for i in range(20)]
    assert tokens(logits[:20], rows) == logits[:20].argmax(-1).tolist()
    assert tokens(logits[20:], rows[:1])[0] % 2 == 0


@pytest.mark.parametrize("vocabulary", [100, 256, WIDE])
@pytest.mark.parametrize(
    "edits", [{}, {"logit_bias": ((3, 50.0),), "temperature": 0.3, "repetition_penalty": 2.0}]
)
def test_logprobs_are_of_the_raw_distribution(vocabulary: int, edits: dict[str, Any]) -> None:
    logits = normal(20, vocabulary)
    raw = logits.double().log_softmax(-1)
    counts = [None, 0, 1, 5, 20, 80]
    rows = [row(i, prompt=range(60), logprobs=counts[i % 6], **edits) for i in range(20)]
    for i, choice in enumerate(sample(logits, rows)):
        count = counts[i % 6]
        if count is None:
            assert (choice.logprob, choice.top) == (None, ())
            continue
        assert choice.logprob == pytest.approx(float(raw[i, choice.token]), abs=1e-5)
        best = raw[i].topk(count)
        assert [token for token, _ in choice.top] == best.indices.tolist()
        assert [p for _, p in choice.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_top_logprobs_omit_impossible_tokens() -> None:
    logits = torch.full((1, 40), -INF)
    logits[0, [30, 2]] = torch.tensor([1.0, 0.0])
    choice = sample(logits, [row(temperature=0.0, logprobs=20)])[0]
    assert [token for token, _ in choice.top] == [30, 2]
    flat = sample(torch.zeros(1, 5), [row(temperature=0.0, logprobs=20)])[0]
    assert [token for token, _ in flat.top] == [0, 1, 2, 3, 4]


def test_the_greedy_token_leads_its_top_logprobs_beside_any_row() -> None:
    rng = random.Random(5)
    logits = normal(60, WIDE)
    for row_logits in logits:
        row_logits[rng.sample(range(WIDE), 4)] = 20.0
    rows = [row(temperature=0.0, logprobs=count) for count in [1, 3] * 30]
    for at, choice in enumerate(sample(logits, rows)):
        assert choice.top[0][0] == choice.token
        assert choice.top == sample(logits[at : at + 1], [rows[at]])[0].top


def test_prompt_logprobs_score_the_targets() -> None:
    logits = normal(30, WIDE)
    logits[4, 7] = NAN
    targets = [(i * 977) % WIDE for i in range(30)]
    raw = logits.double().log_softmax(-1)
    for top in (0, 5):
        scored = prompt_logprobs(logits, targets, top)
        assert scored.pop(4) == SampledToken(-1, None, ())
        for choice, i in zip(scored, [i for i in range(30) if i != 4], strict=True):
            assert choice.token == targets[i]
            assert choice.logprob == pytest.approx(float(raw[i, targets[i]]), abs=1e-5)
            assert [token for token, _ in choice.top] == raw[i].topk(top).indices.tolist()
            assert choice.rank == 1 + int((logits[i] > logits[i, targets[i]]).sum())
    assert prompt_logprobs(logits[:0], [], 5) == []
    [beyond] = prompt_logprobs(torch.zeros(1, BLOCK), [BLOCK], 1)  # such as ids of images
    assert (beyond.token, beyond.logprob) == (BLOCK, -INF)


def broken(kind: str, vocabulary: int) -> torch.Tensor:
    values = normal(1, vocabulary)[0]
    if kind == "one NaN":
        values[vocabulary - 2] = NAN
    elif kind == "all NaN":
        values[:] = NAN
    elif kind == "+inf":
        values[5] = INF
    else:
        values[:] = -INF
    return values


@pytest.mark.parametrize("kind", ["one NaN", "all NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("vocabulary", [300, WIDE])
def test_unusable_rows_are_marked_and_others_unchanged(kind: str, vocabulary: int) -> None:
    count = 2 * len(MIXED)
    logits, rows = normal(count, vocabulary), mixed(count)
    whole = sample(logits, rows)
    logits[1::2] = broken(kind, vocabulary)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled = sample(logits, rows)
    assert sampled[1::2] == [SampledToken(-1, None, ())] * len(MIXED)
    assert [c.token for c in sampled[::2]] == [c.token for c in whole[::2]]
    assert [c.top for c in sampled[::2]] == [c.top for c in whole[::2]]


@pytest.mark.parametrize("value", [NAN, INF])
def test_banning_a_token_with_nan_or_inf_does_not_hide_it(value: float) -> None:
    logits = normal(1, 300)
    logits[0, 9] = value
    assert tokens(logits, [row(min_tokens=1, stop_token_ids=(9,))]) == [-1]


def test_banning_every_possible_token_gives_an_unusable_row() -> None:
    logits = torch.full((1, 300), -INF)
    logits[0, 9] = 1.0
    assert tokens(logits, [row(min_tokens=1, stop_token_ids=(9,), logprobs=2)]) == [-1]
    assert tokens(logits, [row(top_p=0.9)]) == [9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocabulary", [256, 300, WIDE])
def test_any_float_dtype_gives_float32s_tokens(dtype: torch.dtype, vocabulary: int) -> None:
    logits = normal(26, vocabulary).to(dtype)
    assert sample(logits, mixed(26)) == sample(logits.float(), mixed(26))


@pytest.mark.parametrize("vocabulary", [256, 300])
def test_the_callers_logits_are_not_changed(vocabulary: int) -> None:
    whole = normal(2 * len(MIXED), 2 * vocabulary)
    logits = whole[::2, :vocabulary]  # a non-contiguous view
    before = whole.clone()
    sampled = sample(logits, mixed(len(MIXED)))
    prompt_logprobs(logits, [1] * len(MIXED), 3)
    assert torch.equal(whole, before)
    assert sampled == sample(logits.clone(), mixed(len(MIXED)))


def test_uniform_is_philox_2x64_10() -> None:
    """Known answers of Random123, the authors' library: the upper 53 bits of the first word."""
    pi = (0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
    ones = (2**64 - 1,) * 3
    known = {(0, 0, 0): 0xCA00A0459843D731, ones: 0x65B021D60CD8310F, pi: 0x0A5E742C2997341C}
    for arguments, word in known.items():
        assert uniform(*arguments) == (word >> 11) / 2**53


# ── token masks ──


def mask_of(rows: list[int], *allowed: list[int]) -> TokenMask:
    tokens = torch.zeros(len(rows), 300, dtype=torch.bool)
    for row_tokens, ids in zip(tokens, allowed, strict=True):
        row_tokens[ids] = True
    return TokenMask(rows, tokens)


def test_a_mask_limits_its_rows_and_changes_no_others_and_no_log_probability() -> None:
    logits = normal(4, 300, 1.0)
    rows = [row(temperature=t, seed=n, logprobs=3) for n, t in enumerate([0, 1, 1, 0])]
    free = sample(logits, rows)
    masked = sample(logits, rows, mask_of([1, 3], [7, 9], [299]))
    assert (masked[0], masked[2]) == (free[0], free[2])
    assert masked[1].token in (7, 9)
    assert masked[3].token == 299
    raw = torch.log_softmax(logits.double(), -1)[3]
    assert masked[3].logprob == pytest.approx(float(raw[299]), abs=1e-5)
    assert [token for token, _ in masked[3].top] == raw.topk(3).indices.tolist()


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_mask_does_not_hide_an_unusable_row(broken: float) -> None:
    logits = torch.zeros(1, 300)
    logits[0, 11] = broken
    [choice] = sample(logits, [row()], mask_of([0], [11]))
    assert choice.token == -1


class CountedOperations(TorchDispatchMode):
    """Counts operations but views: on a GPU each is a launch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        ([{"temperature": 0.0}], 10),
        ([{}, {"temperature": 0.0}], 32),
        ([{"top_k": 20}, {"temperature": 0.0}], 55),
        ([{"top_k": 20}, {"temperature": 0.0}, {"top_p": 0.9}, {}], 80),
    ],
)
def test_a_mixed_step_takes_few_operations(kinds: list[dict[str, Any]], most: int) -> None:
    logits = normal(16, 64 * BLOCK)
    rows = [row(seed=n, **kinds[n % len(kinds)]) for n in range(16)]
    with CountedOperations() as operations:  # type: ignore[no-untyped-call]
        sampler.sample(logits, SamplingInputs(rows))
    assert operations.count <= most


def test_a_greedy_row_beside_filtered_ones_takes_the_first_of_equal_logits() -> None:
    """More logits are equal than are looked at first."""
    for width in (200, WIDE):
        logits = normal(2, width)
        logits[0, 50:] = 100.0
        assert tokens(logits, [row(temperature=0.0), row(top_k=5)])[0] == 50


def test_allowed_tokens_are_all_that_is_sampled() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 300)
    allowed = (7, 250, 299)
    rows = [
        row(temperature=temperature, allowed_token_ids=allowed, seed=seed)
        for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
    ]
    tokens = [token.token for token in sample(logits, [*rows, row(temperature=0.0)])]
    assert {*tokens[:3]} <= {*allowed}
    assert tokens[0] == max(allowed, key=lambda n: logits[0, n])
    assert tokens[3] == logits[3].argmax()


def test_given_tokens_are_scored_in_place_of_the_best() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    rows = [
        row(temperature=0.0, logprobs=0, logprob_token_ids=(9, 3)),
        row(temperature=0.0, logprobs=4),
        row(temperature=0.0),
    ]
    given, best, unscored = sample(logits, rows)
    wanted = logits.log_softmax(-1)
    assert [token for token, _ in given.top] == [9, 3]
    assert [score for _, score in given.top] == pytest.approx(wanted[0, [9, 3]].tolist(), abs=1e-5)
    assert [token for token, _ in best.top] == wanted[1].topk(4).indices.tolist()
    assert unscored.logprob is None
