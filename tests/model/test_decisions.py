"""Questions about one input: transformers' own probabilities, with the input run once."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batching import step_times
from batching.errors import ItemFailed
from batching.request_queue import WorkItem
from server.apis.openai.decisions.systemone import SystemOneRequest
from server.core.delta_stream import UsageCounts
from server.http.json import to_json
from tests import tiny_decisions
from tests.generating import Driver, Served, request
from tests.tiny import hf
from tests.tiny_decisions import STATE, about, predicates, prompts_of, read
from worker.engines.generation.decisions import LabelScores, label_logprobs
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem
from worker.messages.decisions import DecisionInput
from worker.model.attention.kv_cache import BLOCK

KINDS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is a refund requested?"},
    "angry": {
        "type": "noul",
        "instructions": "What is the tone?",
        "criteria": {"true": "An angry message", "false": None},
    },
    "silent": {"type": "noul"},
    "topic": {
        "type": "choice",
        "instructions": {"about": ["the topic", 1.5, "é"]},
        "criteria": {"billing": "Money: to and fro", "delivery": None, "other": {"any": None}},
    },
    "urgent": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["Can wait", "This week", ["to", "day"], "Now", "Too late"],
    },
    "alone": {"type": "choice", "criteria": {"only": None}},
    "letters": {"type": "choice", "criteria": {f"o{n}": None for n in range(26)}},
}


def serve(generator: GenerationEngine, *payloads: DecisionInput) -> tuple[list[Served], Driver]:
    driver = Driver(generator)
    served = [driver.add(WorkItem(request, float("inf"), 0.0)) for request in payloads]
    driver.finish()
    return served, driver


def answers(generator: GenerationEngine, named: SystemOneRequest) -> dict[str, Any]:
    [served], _ = serve(generator, named.decision_input())
    probabilities = [delta.probabilities for delta in served.choices]
    response: dict[str, Any] = json.loads(to_json(named.response(probabilities, UsageCounts())))
    decisions: dict[str, Any] = response["answers"]
    return decisions


def probabilities(generator: GenerationEngine, payload: DecisionInput) -> list[list[float]]:
    [served], _ = serve(generator, payload)
    return [list(delta.probabilities) for delta in served.choices]


def library() -> Any:
    """Return transformers' own pipeline, as its server creates it for a chat model."""
    path = tiny_decisions.folder()
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return hf.pipeline("decision", model=model, tokenizer=hf.AutoTokenizer.from_pretrained(path))


# ── probabilities ──


@pytest.mark.parametrize("state", [STATE, "", {"order": [1, None, "é"], "paid": 2.50}, ["a", "b"]])
def test_probabilities_equal_those_of_the_transformers_pipeline(state: Any) -> None:
    expected = library()({"state": state, "questions": KINDS})
    actual = answers(tiny_decisions.engine(), read(KINDS, state))
    assert list(actual) == list(expected)
    for name, wanted in expected.items():
        assert_close(actual[name], wanted)
    spread = expected["letters"]["probabilities"].values()
    assert max(spread) - min(spread) > 0.1, "equal probabilities prove nothing"


def assert_close(actual: Any, wanted: Any) -> None:
    if isinstance(wanted, float):
        assert actual == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, dict):
        assert list(actual) == list(wanted)
        for key, value in wanted.items():
            assert_close(actual[key], value)
    else:
        assert actual == wanted


def test_more_options_than_letters_get_pairs_of_them() -> None:
    criteria = {f"option {n}": None for n in range(30)}
    named = read({"q": {"type": "choice", "criteria": criteria}})
    generator = tiny_decisions.engine()
    [row] = probabilities(generator, named.decision_input())
    assert len(row) == 30
    tokenizer = generator.runner.language.tokenizer
    item: GenerationItem = WorkItem(named.decision_input(), float("inf"), 0.0)
    generator.prepare(item)
    text = tokenizer.decode([*item.prepared[0].prepared.ids])
    assert "\nZ. option 25\nAB. option 26\nAC. option 27\nBA. option 28\nCD. option 29\n" in text
    assert "Answer with the label of the option that fits best (A to CD) only." in text
    [scores, *_] = item.prepared
    assert isinstance(scores, LabelScores)
    labels = tokenizer.convert_ids_to_tokens([*scores.labels])
    assert labels[24:] == ["Y", "Z", "AB", "AC", "BA", "CD"]


def test_probabilities_do_not_depend_on_the_other_questions() -> None:
    questions = [*predicates(30), *read(KINDS).decision_input().questions]
    together = probabilities(tiny_decisions.engine(), about(STATE, questions))
    backwards = probabilities(tiny_decisions.engine(), about(STATE, questions[::-1]))
    for question, one, other in zip(questions, together, reversed(backwards), strict=True):
        [alone] = probabilities(tiny_decisions.engine(), about(STATE, [question]))
        assert one == pytest.approx(alone, abs=1e-5)
        assert other == pytest.approx(alone, abs=1e-5)


def test_an_unpaged_model_gives_the_same_probabilities() -> None:
    payload = about(STATE, predicates(5))
    paged = probabilities(tiny_decisions.engine(), payload)
    assert probabilities(tiny_decisions.cached(), payload) == [
        pytest.approx(row, abs=1e-4) for row in paged
    ]


def test_letters_are_the_labels_where_yes_and_no_are_not_single_tokens() -> None:
    from tests import tiny_chat

    item: GenerationItem = WorkItem(about("It rains.", predicates(1)), float("inf"), 0.0)
    generator = tiny_chat.engine()
    generator.prepare(item)
    [scores] = item.prepared
    assert isinstance(scores, LabelScores)
    text = generator.runner.language.tokenizer.decode([*scores.prepared.ids])
    assert "\nA: true\nB: false\nAnswer A or B only.</s>" in text
    labels = generator.runner.language.tokenizer.convert_ids_to_tokens([*scores.labels])
    assert labels == ["A", "B"]


# ── cost ──


def uncached(prompts: list[list[int]], earlier: Sequence[list[int]] = ()) -> list[int]:
    """Return each prompt's tokens behind the blocks that it shares with any before it."""
    cached = {tuple(ids[:end]) for ids in earlier for end in range(BLOCK, len(ids) + 1, BLOCK)}
    counts = []
    for prompt in prompts:
        ends = range(BLOCK, len(prompt), BLOCK)
        shared = [tuple(prompt[:end]) in cached for end in ends]
        counts.append(len(prompt) - [*shared, False].index(False) * BLOCK)
        cached |= {tuple(prompt[:end]) for end in ends}
    return counts


@pytest.mark.parametrize("budget", [64, 512])
def test_the_input_is_run_once_for_all_questions(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": budget})
    payload = about(STATE, predicates(100))
    prompts = prompts_of(payload)
    whole, *others = uncached(prompts)
    assert whole == len(prompts[0]) > 6 * BLOCK
    assert max(others) < 5 * BLOCK
    generator = tiny_decisions.engine(blocks=1200)
    [served], driver = serve(generator, payload)
    assert driver.total("prefill_tokens") == whole + sum(others)
    assert driver.total("decode_tokens") == 0
    pairs = zip(served.sequences, prompts, strict=True)
    assert all([*sequence.tokens] == [*prompt] for sequence, prompt in pairs)
    assert all(delta.tokens == 0 for delta in served.choices)


def test_a_cached_input_is_not_run_again() -> None:
    generator = tiny_decisions.engine(blocks=1200)
    first, again = about(STATE, predicates(10)), about(STATE, predicates(10, "another parcel"))
    serve(generator, first)
    prompts = prompts_of(again)
    counts = uncached(prompts, prompts_of(first))
    [served], driver = serve(generator, again)
    assert driver.total("prefill_tokens") == sum(counts)
    cached_tokens = served.choices[0].cached_tokens
    assert cached_tokens == len(prompts[0]) - counts[0] > 5 * BLOCK


def test_the_input_is_counted_once() -> None:
    [served], _ = serve(tiny_decisions.engine(), about(STATE, predicates(3)))
    prompts = prompts_of(about(STATE, predicates(3)))
    counted = [delta.prompt_tokens for delta in served.choices]
    assert counted[0] == len(prompts[0])
    assert counted[1] == counted[2] < counted[0] / 2
    assert served.choices[0].cached_tokens == 0
    # beyond the input, all three questions start alike
    assert served.choices[1].cached_tokens == served.choices[2].cached_tokens < BLOCK


def test_a_chat_does_not_wait_for_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 128})
    driver = Driver(tiny_decisions.engine(blocks=1200, max_running=16))
    many = driver.add(WorkItem(about(STATE, predicates(200)), float("inf"), 0.0))
    for _ in range(8):
        driver.step()
    assert 0 < len(many.deltas) < 100
    chat = driver.add(request([7, 8, 9], max_tokens=4))
    for _ in range(5):
        driver.step()
    assert chat.done
    assert not many.done
    driver.finish()
    assert len(many.choices) == 200


def test_probabilities_are_right_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 48})
    payloads = [about(STATE, predicates(20)), about(STATE[::-1], predicates(20))]
    wanted = [probabilities(tiny_decisions.engine(), one) for one in payloads]
    served, _ = serve(tiny_decisions.engine(blocks=40), *payloads)
    for result, expected in zip(served, wanted, strict=True):
        rows = [list(delta.probabilities) for delta in result.choices]
        assert rows == [pytest.approx(row, abs=1e-5) for row in expected]


def test_nan_and_infinity_fail_the_item() -> None:
    assert label_logprobs(torch.tensor([0.0, float("nan"), 1.0]), [0, 1])[0].token == -1
    assert label_logprobs(torch.tensor([0.0, float("inf"), 1.0]), [0, 1])[0].token == -1
    generator = tiny_decisions.engine()
    embedding: Any = generator.runner.language.model.get_input_embeddings()
    original = embedding.weight.data.clone()
    embedding.weight.data.fill_(float("nan"))
    try:
        [served], _ = serve(generator, about(STATE, predicates(3)))
    finally:
        embedding.weight.data.copy_(original)
    assert isinstance(served.error, ItemFailed)
