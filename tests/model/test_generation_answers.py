"""Outputs as requested: log-probabilities, seeds, choices, stop conditions and token counts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from batching import step_times
from batching.scheduler import MAX_SCORED_TOKENS
from tests.generating import (
    GREEDY,
    ORDINARY,
    Driver,
    Served,
    assert_greedy,
    engine,
    greedy,
    prepare,
    prompts,
    raw_logits,
    request,
    serve,
)
from worker.engines.generation.engine import MAX_WRITTEN
from worker.messages.deltas import MAX_UNREAD, Delta, TokenLogprob
from worker.messages.generation import Sampling

pytestmark = pytest.mark.usefixtures("steps")
SAMPLED = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=11)
BUSY = Sampling(
    temperature=1.7,
    top_p=0.9,
    top_k=40,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.3,
    logit_bias={7: 5.0, 8: -100.0},
    seed=3,
    logprobs=4,
)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(ORDINARY, k=length)


def alone(prompt: Sequence[int], sampling: Sampling, n: int = 1, spec: str = "off") -> Served:
    [served], _ = serve(engine("llama", speculation=spec), [request(prompt, sampling, n=n)])
    return served


# ── log-probabilities ──


def assert_scored(
    entries: Sequence[TokenLogprob], ids: Sequence[int], first: int, top: int, model: str = "llama"
) -> None:
    """Check that `entries` score ids[first:] by the model's raw distribution."""
    expected = torch.log_softmax(raw_logits(model, ids), -1)
    assert [entry.token_id for entry in entries] == list(ids[first:])
    for index, entry in enumerate(entries, first):
        if index == 0:
            assert entry.logprob is None
            continue
        row = expected[index - 1]
        assert entry.logprob == pytest.approx(float(row[ids[index]]), abs=1e-3)
        best = row.topk(top)
        assert [token.logprob for token in entry.top] == pytest.approx(
            best.values.tolist(), abs=1e-3
        )
        assert [token.token_id for token in entry.top] == best.indices.tolist()


def test_logprobs_are_of_the_raw_distribution() -> None:
    items = [request(prompt, BUSY) for prompt in prompts(5, (1, 9, 40))]
    served, _ = serve(engine("llama"), items, seed=5)
    for one in served:
        assert_scored(one.choices[0].logprobs, [*one.prompt, *one.ids[0]], len(one.prompt), 4)


def test_logprobs_beside_a_draft_are_the_same() -> None:
    prompt = prompt_of(4) * 2
    sampling = replace(GREEDY, logprobs=2, logit_bias=dict.fromkeys(prompt, 30.0))
    [served], driver = serve(engine("llama"), [request(prompt, sampling, 40)])
    assert_scored(served.choices[0].logprobs, [*prompt, *served.ids[0]], len(prompt), 2)
    assert 0 < driver.total("accepted") < driver.total("drafted")


@pytest.mark.parametrize(
    "length", [1, 2, MAX_SCORED_TOKENS, MAX_SCORED_TOKENS + 1, MAX_SCORED_TOKENS + 72]
)
def test_an_echoed_prompt_is_scored_whole_without_the_prefix_cache(length: int) -> None:
    generator = engine("llama")
    prompt = prompt_of(length)
    for _ in range(2):
        [served], driver = serve(generator, [request(prompt, BUSY, echo=True)])
        choice = served.choices[0]
        assert_scored(choice.logprobs, [*prompt, *served.ids[0]], 0, 4)
        assert choice.cached_tokens == driver.total("cached_tokens") == 0
        assert driver.total("prefill_tokens") == length
        assert driver.partial == (length - 1) // MAX_SCORED_TOKENS
        assert "".join(entry.text for entry in choice.logprobs) == choice.text


def test_an_echoed_prompt_is_scored_once_when_it_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 24})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", 24)
    older, younger = request(prompt_of(14), BUSY, 20), request(prompt_of(110, 1), BUSY, echo=True)
    # the older needs its second block while the younger is in prefill
    served, driver = serve(engine("llama", blocks=8), [older, younger])
    assert [report.preempted for report in driver.reports[:4]] == [0, 0, 0, 1]
    assert_scored(served[1].choices[0].logprobs, [*served[1].prompt, *served[1].ids[0]], 0, 4)
    # and after the prefill
    items = [request(p, BUSY, 30, echo=True) for p in prompts(6, (30, 50, 70), count=3)]
    served, driver = serve(engine("llama", blocks=12), items)
    assert driver.total("preempted") > 0
    for one in served:
        assert_scored(one.choices[0].logprobs, [*one.prompt, *one.ids[0]], 0, 4)


def test_a_prompt_can_be_scored_without_an_output() -> None:
    prompt = prompt_of(MAX_SCORED_TOKENS + 30)
    scoring = replace(GREEDY, logprobs=1)
    [served, plain], driver = serve(
        engine("llama"),
        [
            request(prompt, scoring, max_tokens=0, echo=True),
            request(prompt, max_tokens=0, echo=True),
        ],
    )
    assert_scored(served.choices[0].logprobs, prompt, 0, 1)
    for choice in (served.choices[0], plain.choices[0]):
        assert choice.text == engine("llama").input_processor.vocabulary.decode(prompt)
        assert choice.finish_reason == "length"
        assert (choice.prompt_tokens, choice.tokens) == (len(prompt), 0)
    assert plain.choices[0].logprobs == []
    assert driver.total("decode_tokens") == 0


# ── seeds and choices ──


def test_a_seed_gives_the_same_output_beside_other_traffic() -> None:
    prompt = prompt_of(30)
    expected = alone(prompt, SAMPLED).ids
    traffic = [request(p, replace(SAMPLED, seed=n)) for n, p in enumerate(prompts(7, (3, 30, 60)))]
    for speculation in ("auto", "off"):
        mine = [request(prompt, SAMPLED) for _ in range(3)]
        mixed: list[Any] = [*traffic[:4], mine[0], *traffic[4:8], mine[1], *traffic[8:], mine[2]]
        items = [request(i.payload.prompt, i.payload.sampling) for i in mixed]
        generator = engine("llama", blocks=16, speculation=speculation)
        served, driver = serve(generator, items, seed=7)
        assert [one.ids for one in served if list(one.prompt) == prompt] == [expected] * 3
        assert driver.total("preempted") > 0


def test_a_seed_gives_the_same_output_with_speculation() -> None:
    prompt = prompt_of(4) * 2
    few = replace(SAMPLED, logit_bias=dict.fromkeys(prompt, 40.0))  # so that tokens repeat
    accepted = 0
    for seed in range(3):
        items = [request(prompt, replace(few, seed=seed), 40) for _ in range(2)]
        [plain], _ = serve(engine("llama", speculation="off"), items[:1])
        [drafted], driver = serve(engine("llama"), items[1:])
        assert drafted.ids == plain.ids
        assert driver.total("drafted") > driver.total("accepted")
        accepted += driver.total("accepted")
    assert accepted > 0


def test_seeds_make_the_difference() -> None:
    prompt = prompt_of(30)
    outputs = {tuple(alone(prompt, replace(SAMPLED, seed=n)).ids[0]) for n in range(8)}
    assert len(outputs) == 8
    unseeded = replace(SAMPLED, seed=None)
    assert alone(prompt, unseeded).ids != alone(prompt, unseeded).ids


def test_choices_differ_and_are_reproducible() -> None:
    prompt = prompt_of(30)
    first, second = alone(prompt, SAMPLED, n=4), alone(prompt, SAMPLED, n=4, spec="auto")
    assert first.ids == second.ids
    assert len({tuple(ids) for ids in first.ids}) == 4
    assert alone(prompt, SAMPLED, n=2).ids == first.ids[:2]
    assert alone(prompt, SAMPLED).ids == first.ids[:1]


def test_choices_share_the_blocks_of_their_prompt() -> None:
    generator = engine("llama", speculation="off")
    prompt = prompt_of(40)
    [served], driver = serve(generator, [request(prompt, SAMPLED, n=3)])
    assert driver.total("prefill_tokens") == 40 + 8 + 8
    assert driver.total("cached_tokens") == 2 * 32
    assert driver.total("admitted") == 3
    assert max(report.blocks_used for report in driver.reports) == 2 + 3 * 2
    assert [choice.prompt_tokens for choice in served.choices] == [40, 0, 0]
    assert [choice.cached_tokens for choice in served.choices] == [0, 0, 0]
    [again], _ = serve(generator, [request(prompt, SAMPLED, n=3)])
    assert [choice.cached_tokens for choice in again.choices] == [32, 0, 0]
    assert again.ids == served.ids


def test_a_step_reports_few_of_the_choices_that_have_filled_together() -> None:
    generator, written = engine("llama", speculation="off"), list[int]()
    item = request(prompt_of(20), max_tokens=MAX_UNREAD + 9, n=MAX_WRITTEN + 3)
    prepare(generator, item)
    generator.add(item)
    while generator.busy:
        choices = [choice for _, choice in generator.step().deltas]
        full = [c for c in choices if not c.finished and c.unread >= MAX_UNREAD]
        written += [len(full)] * bool(full)
        for choice in full:
            choice.take_delta()
    assert written == [1, MAX_WRITTEN, 2]  # the first choice alone computes the prompt


# ── stop conditions ──


def greedy_choice(prompt: Sequence[int], max_tokens: int, **stopping: Any) -> tuple[Served, Delta]:
    sampling = replace(GREEDY, logprobs=0)
    generator = engine("llama")
    [served], _ = serve(generator, [request(prompt, sampling, max_tokens, **stopping)])
    choice = served.choices[0]
    assert "".join(entry.text for entry in choice.logprobs) == choice.text
    return served, choice


def test_a_stop_string_may_span_tokens_and_is_cut_off() -> None:
    scored = replace(GREEDY, logprobs=0)
    cut = 0
    for seed in range(3):
        prompt = prompt_of(8, seed)
        _, whole = greedy_choice(prompt, 24)
        text = whole.text
        stops = {
            text[at : at + length] for at in range(2, len(text) - 4, 5) for length in (1, 2, 4)
        }
        items = [request(prompt, scored, 24, stop=("\x00", stop)) for stop in sorted(stops)]
        for served, stop in zip(serve(engine("llama"), items)[0], sorted(stops), strict=True):
            choice = served.choices[0]
            assert choice.text == text[: text.find(stop)]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            texts = [entry.text for entry in choice.logprobs]
            assert "".join(texts) == choice.text
            cut += texts != [entry.text for entry in whole.logprobs[: len(texts)]]
    assert cut > 5


def first_at(ids: Sequence[int], at: int) -> int:
    """Return the first index from `at` on whose token does not occur before it."""
    return next(i for i in range(at, len(ids)) if ids[i] not in ids[:i])


def test_a_stop_token_ends_the_choice_and_adds_no_text() -> None:
    prompt = prompt_of(8)
    whole, _ = greedy_choice(prompt, 24)
    at = first_at(whole.ids[0], 6)
    token = whole.ids[0][at]
    _, before = greedy_choice(prompt, at)
    served, choice = greedy_choice(prompt, 24, stop_token_ids=(token,))
    assert served.ids[0] == whole.ids[0][: at + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    assert (choice.text, choice.tokens) == (before.text, at + 1)


def test_what_ends_a_choice_is_part_of_its_text_on_request() -> None:
    prompt = prompt_of(8)
    served, whole = greedy_choice(prompt, 24)
    for length in (1, 3):
        stop = whole.text[6 : 6 + length]
        _, choice = greedy_choice(prompt, 24, stop=(stop,), includes_stop=True)
        assert choice.text == whole.text[: whole.text.find(stop) + length]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    at = first_at(served.ids[0], 6)
    token = served.ids[0][at]
    _, after = greedy_choice(prompt, at + 1)
    _, choice = greedy_choice(prompt, 24, stop_token_ids=(token,), includes_stop=True)
    assert (choice.text, choice.stop_reason) == (after.text, token)


def test_special_tokens_are_text_on_request() -> None:
    generator, prompt = engine("llama"), prompt_of(8)
    special = next(i for i in range(2, ORDINARY[0]) if generator.input_processor.token(i))
    sampling = replace(GREEDY, logit_bias={special: 100.0})
    shown, hidden = request(prompt, sampling, 3), request(prompt, sampling, 3)
    shown.payload = replace(shown.payload, skips_special=False)
    with_text, without = serve(generator, [shown, hidden])[0]
    assert with_text.ids == without.ids == [[special] * 3]
    assert with_text.choices[0].text == 3 * generator.input_processor.token(special)
    assert without.choices[0].text == ""


def test_the_end_token_ends_a_choice_unless_ignored() -> None:
    prompt = prompt_of(8)
    toward_end = replace(GREEDY, logit_bias={1: 100.0})
    items = [
        request(prompt, toward_end, ignore_eos=False),
        request(prompt, toward_end, ignore_eos=True),
        request(prompt, toward_end, ignore_eos=False, min_tokens=5),
        request(prompt, toward_end, ignore_eos=True, min_tokens=5),
    ]
    ended, ignored, later, last = serve(engine("llama"), items)[0]
    assert ended.ids == [[1]]
    assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", None)
    assert (ended.choices[0].text, ended.choices[0].tokens) == ("", 1)
    assert ignored.ids == [[1] * 12]
    assert ignored.choices[0].finish_reason == "length"
    assert later.ids[0][:5] == greedy("llama", [prompt], 5)[0]
    assert later.ids[0][5:] == [1]
    assert last.ids[0] == [*later.ids[0], *[1] * 6]


def test_a_further_end_token_is_the_stop_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM: the tokenizer's own end token is none."""
    generator, prompt = engine("llama"), prompt_of(8)
    monkeypatch.setattr(generator.input_processor, "eos_token_ids", (1, ORDINARY[9]))
    for token, reason in ((1, None), (ORDINARY[9], ORDINARY[9])):
        toward_end = replace(GREEDY, logit_bias={token: 100.0})
        [served], _ = serve(generator, [request(prompt, toward_end, ignore_eos=False)])
        assert served.ids == [[token]]
        choice = served.choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)


def test_nothing_ends_a_choice_before_min_tokens() -> None:
    prompt = prompt_of(8)
    whole, full = greedy_choice(prompt, 24)
    at = first_at(whole.ids[0], 3)
    served, _ = greedy_choice(prompt, 24, stop_token_ids=(whole.ids[0][at],), min_tokens=at + 3)
    assert served.ids[0][:at] == whole.ids[0][:at]
    assert whole.ids[0][at] not in served.ids[0][: at + 3]
    assert len(served.ids[0]) >= at + 3
    stop = full.text[0]
    _, choice = greedy_choice(prompt, 24, stop=(stop,), min_tokens=6)
    assert choice.tokens > 6
    assert choice.text.startswith("".join(entry.text for entry in full.logprobs[:6]))


@pytest.mark.parametrize(("length", "hit"), [(50, 48), (49, 48), (48, 32), (16, 0), (17, 16)])
def test_prompt_output_and_cached_tokens_are_counted(length: int, hit: int) -> None:
    generator = engine("llama")
    prompt = prompt_of(length)
    for cached in (0, hit):
        driver = Driver(generator)
        served = driver.add(request(prompt, max_tokens=9))
        driver.finish()
        choice = served.choices[0]
        assert (choice.prompt_tokens, choice.tokens, choice.cached_tokens) == (length, 9, cached)
        assert driver.total("cached_tokens") == cached
        assert driver.total("prefill_tokens") == length - cached
        assert driver.total("decode_tokens") == 9
        assert_greedy("llama", [served], 9)


def test_without_a_limit_the_context_is_filled() -> None:
    generator = engine("llama")
    [served], _ = serve(generator, [request(prompt_of(200), max_tokens=None)])
    choice = served.choices[0]
    assert (choice.tokens, choice.finish_reason) == (56, "length")
