"""Questions about one input: the library's own probabilities, for the price of one prompt."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batching import scheduler
from batching.errors import InvalidInput, ItemFailed
from batching.request_queue import WorkItem
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.params import Names, decode
from server.token_stream import Usage
from tests import tiny_decisions
from tests.generating import Driver, Served, request
from tests.tiny import hf
from worker.decisions import DecisionInput, Question
from worker.generation import decisions
from worker.generation.engine import GenerationEngine
from worker.model.kv_cache import BLOCK
from worker.model.sampler import label_logprobs

STATE = "I was charged twice for my order, and the second parcel never came. " * 4
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


def read(questions: Any, state: Any = STATE) -> SystemOneRequest:
    body = json.dumps({"state": state, "questions": questions}).encode()
    return decode(body, SystemOneRequest, Names("tiny"))


def serve(generator: GenerationEngine, *asked: DecisionInput) -> tuple[list[Served], Driver]:
    driver = Driver(generator)
    served = [driver.add(WorkItem(each, float("inf"), 0.0)) for each in asked]
    driver.finish()
    return served, driver


def answers(generator: GenerationEngine, named: SystemOneRequest) -> dict[str, Any]:
    [served], _ = serve(generator, named.decision_input())
    found = [delta.probabilities for delta in served.choices]
    made: dict[str, Any] = named.document(found, Usage())["answers"]
    return made


def predicates(count: int, words: str = "the parcel") -> tuple[Question, ...]:
    return tuple(
        Question("predicate", f"Is {words} number {n}?", ("", ""), f"questions[{n}]")
        for n in range(count)
    )


def about(text: str, questions: Sequence[Question]) -> DecisionInput:
    return DecisionInput(({"role": "user", "content": text},), tuple(questions))


def probabilities(generator: GenerationEngine, asked: DecisionInput) -> list[list[float]]:
    [served], _ = serve(generator, asked)
    return [list(delta.probabilities) for delta in served.choices]


def library() -> Any:
    """transformers' own pipeline, as its server makes it: of a chat model."""
    path = tiny_decisions.folder()
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return hf.pipeline("decision", model=model, tokenizer=hf.AutoTokenizer.from_pretrained(path))


# ── the answers ──


@pytest.mark.parametrize("state", [STATE, "", {"order": [1, None, "é"], "paid": 2.50}, ["a", "b"]])
def test_they_are_those_of_the_librarys_pipeline(state: Any) -> None:
    pytest.importorskip("transformers.decision")
    expected = library()({"state": state, "questions": KINDS})
    found = answers(tiny_decisions.engine(), read(KINDS, state))
    assert list(found) == list(expected)
    for name, wanted in expected.items():
        assert_alike(found[name], wanted)
    spread = expected["letters"]["probabilities"].values()
    assert max(spread) - min(spread) > 0.1, "a model without opinions proves nothing"


def assert_alike(found: Any, wanted: Any) -> None:
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_alike(found[key], value)
    else:
        assert found == wanted


def test_probabilities_sum_to_one() -> None:
    for each in probabilities(tiny_decisions.engine(), read(KINDS).decision_input()):
        assert sum(each) == pytest.approx(1, abs=1e-6)


def test_more_options_than_letters_get_pairs_of_them() -> None:
    criteria = {f"option {n}": None for n in range(30)}
    named = read({"q": {"type": "choice", "criteria": criteria}})
    generator = tiny_decisions.engine()
    [found] = probabilities(generator, named.decision_input())
    assert len(found) == 30
    tokenizer = generator.language.tokenizer
    item = WorkItem(named.decision_input(), float("inf"), 0.0)
    generator.prepare(item)
    text = tokenizer.decode(item.prepared[0].prepared.ids)
    assert "\nZ. option 25\nAB. option 26\nAC. option 27\nBA. option 28\nCD. option 29\n" in text
    assert "Answer with the label of the option that fits best (A to CD) only." in text
    labels = tokenizer.convert_ids_to_tokens(item.prepared[0].prepared.labels)
    assert labels[24:] == ["Y", "Z", "AB", "AC", "BA", "CD"]


def test_an_answer_does_not_depend_on_the_other_questions() -> None:
    asked = [*predicates(30), *read(KINDS).decision_input().questions]
    together = probabilities(tiny_decisions.engine(), about(STATE, asked))
    backwards = probabilities(tiny_decisions.engine(), about(STATE, asked[::-1]))
    for question, one, other in zip(asked, together, reversed(backwards), strict=True):
        [alone] = probabilities(tiny_decisions.engine(), about(STATE, [question]))
        assert one == pytest.approx(alone, abs=1e-5)
        assert other == pytest.approx(alone, abs=1e-5)


def test_a_model_that_is_not_paged_answers_the_same() -> None:
    asked = about(STATE, predicates(5))
    paged = probabilities(tiny_decisions.engine(), asked)
    assert probabilities(tiny_decisions.cached(), asked) == [
        pytest.approx(each, abs=1e-4) for each in paged
    ]


def test_where_yes_and_no_are_no_tokens_the_letters_answer() -> None:
    from tests import tiny_chat

    item = WorkItem(about("It rains.", predicates(1)), float("inf"), 0.0)
    generator = tiny_chat.engine()
    generator.prepare(item)
    [verdict] = item.prepared
    text = generator.language.tokenizer.decode(verdict.prepared.ids)
    assert "\nA: true\nB: false\nAnswer A or B only.</s>" in text
    labels = generator.language.tokenizer.convert_ids_to_tokens(verdict.prepared.labels)
    assert labels == ["A", "B"]


# ── what they cost ──


def prompts_of(asked: DecisionInput) -> list[list[int]]:
    item = WorkItem(asked, float("inf"), 0.0)
    tiny_decisions.engine().prepare(item)
    return [verdict.prepared.ids for verdict in item.prepared]


def to_run(prompts: list[list[int]], known: Sequence[list[int]] = ()) -> list[int]:
    """Of each, the tokens behind the blocks that it shares with any before."""
    begun = {tuple(each[:end]) for each in known for end in range(BLOCK, len(each) + 1, BLOCK)}
    counts = []
    for prompt in prompts:
        ends = range(BLOCK, len(prompt), BLOCK)
        shared = [tuple(prompt[:end]) in begun for end in ends]
        counts.append(len(prompt) - [*shared, False].index(False) * BLOCK)
        begun |= {tuple(prompt[:end]) for end in ends}
    return counts


@pytest.mark.parametrize("budget", [64, 512])
def test_the_input_is_run_once_and_each_question_behind_it(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST", {"cpu": budget})
    asked = about(STATE, predicates(100))
    prompts = prompts_of(asked)
    whole, *others = to_run(prompts)
    assert whole == len(prompts[0]) > 6 * BLOCK
    assert max(others) < 5 * BLOCK
    generator = tiny_decisions.engine(blocks=1200)
    [served], driver = serve(generator, asked)
    assert driver.total("prefill_tokens") == whole + sum(others)
    assert driver.total("decode_tokens") == 0
    assert all(sequence.tokens == p for sequence, p in zip(served.sequences, prompts, strict=True))
    assert all(delta.tokens == 0 for delta in served.choices)


def test_an_input_that_is_known_is_not_run_again() -> None:
    generator = tiny_decisions.engine(blocks=1200)
    first, again = about(STATE, predicates(10)), about(STATE, predicates(10, "another parcel"))
    serve(generator, first)
    prompts = prompts_of(again)
    counts = to_run(prompts, prompts_of(first))
    [served], driver = serve(generator, again)
    assert driver.total("prefill_tokens") == sum(counts)
    known = served.choices[0].cached_tokens
    assert known == len(prompts[0]) - counts[0] > 5 * BLOCK


def test_the_input_counts_once() -> None:
    [served], _ = serve(tiny_decisions.engine(), about(STATE, predicates(3)))
    prompts = prompts_of(about(STATE, predicates(3)))
    counted = [delta.prompt_tokens for delta in served.choices]
    assert counted[0] == len(prompts[0])
    assert counted[1] == counted[2] < counted[0] / 2
    assert served.choices[0].cached_tokens == 0
    # beyond the input, it is known how all three begin
    assert served.choices[1].cached_tokens == served.choices[2].cached_tokens < BLOCK


def test_a_chat_does_not_wait_for_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MOST", {"cpu": 128})
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


def test_they_are_right_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MOST", {"cpu": 48})
    asked = [about(STATE, predicates(20)), about(STATE[::-1], predicates(20))]
    wanted = [probabilities(tiny_decisions.engine(), each) for each in asked]
    served, _ = serve(tiny_decisions.engine(blocks=40), *asked)
    for each, expected in zip(served, wanted, strict=True):
        found = [list(delta.probabilities) for delta in each.choices]
        assert found == [pytest.approx(one, abs=1e-5) for one in expected]


# ── the prompts ──


@pytest.mark.parametrize(
    "text",
    [
        STATE,
        "one",
        "ends with spaces   ",
        "no\nspaces\nat\nall",
        "3 4 5 6",
        "日本語のテキスト",
        "a b",
        "mixed… “marks” — and é ü ñ, x_y z",
    ],
)
def test_the_tokens_are_those_of_each_prompt_as_a_whole(text: str) -> None:
    asked = about(text, predicates(3))
    tokenizer = tiny_decisions.engine().language.tokenizer
    for question, ids in zip(asked.questions, prompts_of(asked), strict=True):
        content = f"{text}\n\n{question.asked(['Yes', 'No'])}"
        whole: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=True,
        )
        assert ids == whole["input_ids"]


def test_the_users_last_words_go_on_with_the_question() -> None:
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
    assert decisions.with_question([assistant, user], "Q") == (
        assistant,
        {"role": "user", "content": "Hi\n\nQ"},
    )
    asked = {"role": "user", "content": "Q"}
    assert decisions.with_question([user, assistant], "Q") == (user, assistant, asked)


# ── what is refused ──


def refused(asked: DecisionInput) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        tiny_decisions.engine().prepare(WorkItem(asked, float("inf"), 0.0))
    return caught.value


def test_too_long_an_input_is_refused_by_name() -> None:
    for text in ("word " * 2000, "word " * 200_000):
        error = refused(about(text, predicates(1)))
        assert error.param == "input"
        assert "context holds 1024" in str(error)


def test_too_long_a_question_is_refused_by_name() -> None:
    error = refused(about(STATE, [*predicates(2), *predicates(3, "word " * 1000)[2:]]))
    assert error.param == "questions[2]"
    assert "context holds 1024" in str(error)


def test_what_all_questions_take_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = about(STATE, predicates(10))
    prompts = prompts_of(asked)
    whole = sum(map(len, prompts))
    for name, most in (("MOST_OWN", 300), ("MOST_SEEN", whole - 1)):
        monkeypatch.setattr(decisions, name, most)
        error = refused(asked)
        assert str(error.param).startswith("questions[")
        monkeypatch.undo()
    monkeypatch.setattr(decisions, "MOST_SEEN", whole)
    assert len(prompts_of(asked)) == 10


def test_more_options_than_the_model_has_labels_are_refused() -> None:
    criteria = {f"option {n}": None for n in range(31)}
    named = read({"q": {"type": "choice", "criteria": criteria}})
    error = refused(named.decision_input())
    assert error.param == "questions.q"
    assert "31 options" in str(error)
    assert "30 apart" in str(error)


def test_a_template_that_does_not_show_the_input_is_no_basis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = tiny_decisions.engine()
    monkeypatch.setattr(generator.template, "render", lambda chat: "always the same")
    with pytest.raises(InvalidInput, match="does not show"):
        generator.prepare(WorkItem(about(STATE, predicates(1)), float("inf"), 0.0))


def test_numbers_that_are_none_fail_the_item() -> None:
    assert label_logprobs(torch.tensor([0.0, float("nan"), 1.0]), [0, 1])[0].token == -1
    assert label_logprobs(torch.tensor([0.0, float("inf"), 1.0]), [0, 1])[0].token == -1
    generator = tiny_decisions.engine()
    embedding: Any = generator.language.model.get_input_embeddings()
    was = embedding.weight.data.clone()
    embedding.weight.data.fill_(float("nan"))
    try:
        [served], _ = serve(generator, about(STATE, predicates(3)))
    finally:
        embedding.weight.data.copy_(was)
    assert isinstance(served.error, ItemFailed)
