"""`POST /v1/decisions` and `/v1/systemone`: the SDK's types, errors and time limits."""

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.decision import (
    AnswerAnswerResourceChoice,
    AnswerAnswerResourcePredicate,
    AnswerAnswerResourceScore,
    Decision,
)

from tests import tiny_decisions
from tests.event_streams import assert_refused, open_stream, post
from tests.http.test_generation_http import serving_fake
from tests.serving import Server, serving, wait_until

PATH, SYSTEMONE = "/v1/decisions", "/v1/systemone"
TEXT = "I was charged twice for my order, and the second parcel never came. " * 3
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is a refund requested?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "name": "paid",
    "instructions": [
        {"type": "input_text", "text": "Is it paid?"},
        {"type": "input_json", "data": {"since": [2024, None]}},
    ],
    "choices": [
        {"value": "true", "description": "So it is said"},
        {"value": True},
        {"value": False},
    ],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent is it?",
    "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "Today"}],
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "input_text", "text": "What is it like outside?"}]},
    {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "b", "name": "run", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "nothing"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
    {"role": "user", "content": [{"type": "input_json", "data": [{"thanks": True}]}]},
]
PNG = {"type": "image", "format": "png", "data_base64": "cG5n"}
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is a refund requested?"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = str(tiny_decisions.folder())
    with serving(chat_model=folder, dtype="float32", kv_cache_gb=0.05, compile="off") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as connected:
        yield connected


def ask(client: openai.OpenAI, questions: list[Any], text: Any = TEXT) -> Decision:
    answer = client.decisions.create(model="tiny", input=text, questions=questions)
    return Decision.model_validate(answer.model_dump(), strict=True)


# ── what it answers ──


def test_each_kind_is_answered_in_the_sdks_types(client: openai.OpenAI) -> None:
    decision = ask(client, [PREDICATE, CHOICE, SCORE])
    predicate, choice, score = decision.answers
    assert isinstance(predicate, AnswerAnswerResourcePredicate)
    assert predicate.name is None
    assert 0 < predicate.probability < 1
    assert isinstance(choice, AnswerAnswerResourceChoice)
    assert choice.name == "paid"
    assert [(type(p.value), p.value) for p in choice.probabilities] == [
        (str, "true"), (bool, True), (bool, False)
    ]  # fmt: skip
    best = max(choice.probabilities, key=lambda p: p.probability)
    assert (type(choice.choice), choice.choice) == (type(best.value), best.value)
    assert choice.confidence == pytest.approx((best.probability - 1 / 3) / (2 / 3))
    assert isinstance(score, AnswerAnswerResourceScore)
    assert [(p.value, p.label) for p in score.probabilities] == [
        (0, "low"), (1, "middle"), (2, "high")
    ]  # fmt: skip
    assert score.score == pytest.approx(sum(p.value * p.probability for p in score.probabilities))
    assert 0 <= score.confidence <= 1
    for answer in (choice, score):
        assert sum(p.probability for p in answer.probabilities) == pytest.approx(1, abs=1e-4)
    usage = decision.usage
    assert usage.output_tokens == usage.output_tokens_details.reasoning_tokens == 0
    assert usage.input_tokens == usage.total_tokens > 50


def test_four_hundred_questions_are_answered_in_order(client: openai.OpenAI) -> None:
    questions = [PREDICATE | {"name": f"q{n}", "instructions": f"Is it {n}?"} for n in range(400)]
    decision = ask(client, questions, "It is 7.")
    assert [answer.name for answer in decision.answers] == [f"q{n}" for n in range(400)]


def test_input_can_be_a_conversation(client: openai.OpenAI) -> None:
    conversations = (CONVERSATION, CONVERSATION, CONVERSATION[:-1])
    one, same, other = (
        scores(ask(client, [PREDICATE, SCORE], conversation)) for conversation in conversations
    )
    assert one == pytest.approx(same, abs=1e-5)
    assert one != pytest.approx(other, abs=1e-3)


def scores(decision: Decision) -> list[float]:
    predicate, score = decision.answers
    assert isinstance(predicate, AnswerAnswerResourcePredicate)
    assert isinstance(score, AnswerAnswerResourceScore)
    return [predicate.probability, score.score]


def test_systemone_returns_the_same_probabilities(server: Server, client: openai.OpenAI) -> None:
    named = {"refund": NOUL, "urgency": {"type": "score", "criteria": ["low", "high"]}}
    answer = post(server, SYSTEMONE, {"state": TEXT, "questions": named}).json()
    levels = SCORE | {"instructions": "", "levels": [{"label": "low"}, {"label": "high"}]}
    probability, score = scores(ask(client, [PREDICATE, levels]))
    assert answer["model"] == "tiny"
    assert answer["answers"]["refund"]["noul"] == pytest.approx(probability, abs=1e-5)
    found = answer["answers"]["urgency"]
    assert found["score"] == pytest.approx(score, abs=1e-5)
    assert found["legend"] == {"0": "low", "1": "high"}
    assert set(found["probabilities"]) == {"0", "1"}
    assert answer["usage"]["output_tokens"] == 0
    assert answer["usage"]["input_tokens"] > 50


# ── what it refuses ──


def choices(count: int) -> dict[str, Any]:
    return CHOICE | {"choices": [{"value": f"v{n}"} for n in range(count)]}


IMAGE = {
    "type": "input_image",
    "image_url": "data:image/png;base64," + base64.b64encode(b"png").decode(),
}


def user(*parts: Any) -> dict[str, Any]:
    """A request with a message of the user that has these parts."""
    return {"input": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": None}, "questions"),
        ({"questions": [{"type": "essay", "instructions": "Why?"}]}, "questions[0].type"),
        ({"questions": [{"instructions": "Why?"}]}, "questions[0].type"),
        ({"questions": [PREDICATE, {"type": "predicate"}]}, "questions[1].instructions"),
        ({"questions": [PREDICATE | {"instructions": []}]}, "questions[0].instructions"),
        ({"questions": [choices(0)]}, "questions[0].choices"),
        ({"questions": [choices(1)]}, "questions[0].choices"),
        ({"questions": [choices(256)]}, "questions[0].choices"),
        ({"questions": [choices(31)]}, "questions[0]"),  # of a model with so few labels
        ({"questions": [CHOICE | {"choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        (
            {"questions": [CHOICE | {"choices": [{"value": 1}] * 2}]},
            "questions[0].choices[0].value",
        ),
        ({"questions": [SCORE | {"levels": [{"label": "a"}]}]}, "questions[0].levels"),
        (
            {"questions": [PREDICATE | {"instructions": [IMAGE]}]},
            "questions[0].instructions[0].type",
        ),
        ({"questions": [PREDICATE | {"instructions": "word " * 2000}]}, "questions[0]"),
        ({"input": "word " * 2000}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        (user(IMAGE), "input[0].content[0].type"),
        (user({"type": "input_audio"}), "input[0].content[0].type"),
        ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [CONVERSATION[3]]}, "input[0].call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0].input"),
        (user({"type": "input_json"}), "input[0].content[0].data"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_error_names_the_invalid_field(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"input": TEXT, "questions": [PREDICATE], **fields}
    assert_refused(post(server, PATH, body), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {f"q{n}": NOUL for n in range(65)}}, "questions"),
        ({"questions": {"q": {"type": "predicate"}}}, "questions[...].type"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions[...].criteria"),
        ({"questions": {"q": {"type": "score"}}}, "questions.criteria"),
        (
            {"questions": {"q": {"type": "noul", "criteria": {"yes": "a"}}}},
            "questions[...].criteria",
        ),
        ({"state": 5}, "state"),
        ({"state": "word " * 2000}, "state"),
        ({"assets": {"img-1": PNG}}, "assets"),  # of a model of texts
        ({"assets": {f"img-{n}": PNG for n in range(5)}}, "assets"),
        ({"assets": {"": PNG}}, "assets"),
        ({"assets": {"img-1": {**PNG, "type": "audio"}}}, "assets[...].type"),
        ({"assets": {"img-1": {"type": "image"}}}, "assets.data_base64"),
        ({"assets": {"img-1": {**PNG, "data_base64": "http://a/b.png"}}}, "assets.img-1"),
    ],
)
def test_systemone_error_names_the_invalid_field(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    body = {"state": TEXT, "questions": {"q": NOUL}, **fields}
    assert_refused(post(server, SYSTEMONE, body), param)


# ── time limits and disconnects ──


def test_request_has_one_slot_and_a_time_limit() -> None:
    body = {"input": "hang", "questions": [PREDICATE] * 3}
    with serving_fake() as (server, generator):
        assert post(server, PATH, body | {"input": "bad"}).status_code == 500
        answer = post(server, PATH, body, **{"X-Request-Timeout-Ms": "200"})
        assert answer.status_code == 504
        wait_until(lambda: generator.dropped == ["hang"])
        assert server.worker_client.queue.pending == 0


def test_disconnect_aborts_the_request() -> None:
    body = {"input": "hang", "questions": [PREDICATE]}
    with serving_fake() as (server, generator):
        with open_stream(server, PATH, body):
            wait_until(lambda: len(generator.running) == 1)
            assert server.worker_client.queue.pending == 1
        wait_until(lambda: generator.dropped == ["hang"])
