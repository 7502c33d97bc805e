"""`return_token_ids` and `prompt_logprobs`, with vLLM's names."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests import sdk, tiny_chat
from tests.event_streams import chunks, post
from tests.matrix import matrix
from tests.sdk import Sdk
from tests.serving import Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 24, "seed": 1},
    COMPLETIONS: {"prompt": "Hello ä 🐱", "max_tokens": 24, "seed": 1},
}


@pytest.fixture(scope="module", params=["demo", "tiny"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    settings: dict[str, Any] = {"chat_model": "demo"}
    if request.param == "tiny":
        settings = {"chat_model": str(tiny_chat.folder()), "dtype": "float32"}
    with serving(compile="off", kv_cache_gb=0.05, **settings) as running:
        yield running


def answered(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    response = post(server, path, {**BODIES[path], "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def streamed(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODIES[path], "return_token_ids": True, "stream": True, **fields}
    return chunks(post(server, path, body))


def text_of(server: Server, ids: list[int]) -> str:
    text: str = post(server, "/detokenize", {"tokens": ids}).json()["prompt"]
    return text


def ids_of(server: Server, **prompt: Any) -> list[int]:
    ids: list[int] = post(server, "/tokenize", prompt).json()["tokens"]
    return ids


def test_a_chat_response_has_its_token_ids_and_those_of_the_prompt(server: Server) -> None:
    for fields in ({}, {"n": 3}, {"stop": ["e"]}, {"tools": [sdk.WEATHER]}):
        response = answered(server, CHAT, **fields)
        prompt = {"messages": MESSAGES, "tools": fields.get("tools")}
        assert response["prompt_token_ids"] == ids_of(server, **prompt)
        assert len(response["prompt_token_ids"]) == response["usage"]["prompt_tokens"]
        tokens = [choice["token_ids"] for choice in response["choices"]]
        assert sum(map(len, tokens)) == response["usage"]["completion_tokens"] > 0
        for choice in response["choices"]:
            text = text_of(server, choice["token_ids"])
            assert (choice["message"]["content"] or "").strip() in text
            for call in choice["message"].get("tool_calls", ()):
                assert call["function"]["name"] in text


def test_a_chats_prompt_is_rendered_and_counted_without_a_response(server: Server) -> None:
    for fields in ({}, {"tools": [sdk.WEATHER]}, {"add_generation_prompt": False}):
        body: dict[str, Any] = {"messages": MESSAGES, "stream": True, **fields}
        ids = ids_of(server, **{"messages": MESSAGES, **fields})
        counted = post(server, f"{CHAT}/input_tokens", body).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": len(ids)}
        rendered = post(server, "/apply-template", body).json()
        assert rendered == {"prompt": text_of(server, ids)}
    refused: list[dict[str, Any]] = [{"messages": []}, {"messages": MESSAGES, "max_tokens": 0}]
    for body in refused:
        for path in (f"{CHAT}/input_tokens", "/apply-template"):
            assert post(server, path, body).status_code == 400
    long = {"messages": [{"role": "user", "content": "word " * 50_000}]}
    assert "maximum context length is" in post(server, "/apply-template", long).text
    counts: dict[str, dict[str, Any]] = {
        f"{CHAT}/input_tokens": long,
        "/v1/responses/input_tokens": {"input": "word " * 50_000},
    }
    for path, body in counts.items():
        error, name = post(server, path, body).json()["error"], next(iter(body))
        assert (error["param"], error["message"].partition(":")[0]) == (name, name)
        assert error["code"] == "context_length_exceeded"


def test_a_completion_has_token_ids_in_each_choice(server: Server) -> None:
    prompts = ["Hello", [*ids_of(server, prompt="What is ä?")]]
    for prompt in prompts:
        response = answered(server, COMPLETIONS, prompt=prompt, n=2)
        prompt_ids = ids_of(server, prompt=prompt) if isinstance(prompt, str) else prompt
        for choice in response["choices"]:
            assert choice["prompt_token_ids"] == prompt_ids
            assert choice["text"] in text_of(server, choice["token_ids"])
    response = answered(server, COMPLETIONS, prompt=["one", "two"], echo=True, logprobs=1)
    for choice, prompt in zip(response["choices"], ["one", "two"], strict=True):
        assert choice["prompt_token_ids"] == ids_of(server, prompt=prompt)
        tokens = choice["logprobs"]["tokens"]
        assert len(choice["prompt_token_ids"]) + len(choice["token_ids"]) >= len(tokens)
    alone = answered(server, COMPLETIONS, echo=True, max_tokens=0)["choices"][0]
    assert alone["token_ids"] == []
    assert alone["prompt_token_ids"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    matrix(
        [
            {},
            {"n": 3},
            {"logprobs": 1},
            {"stop": ["e"]},
            {"stream_options": {"include_usage": True}},
            {"ignore_eos": True, "max_tokens": 60},
            {"response_format": {"type": "json_object"}},
        ],
        {},
        {"n": 3},
        {"stop": ["e"]},
    ),
)
def test_streamed_token_ids_join_to_those_of_the_whole_response(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True}
    stream_only = {name: fields[name] for name in fields if name == "stream_options"}
    fields = {name: fields[name] for name in fields if name not in stream_only}
    whole = answered(server, path, **fields)
    stream = streamed(server, path, **fields, **stream_only)
    joined: dict[int, list[int]] = defaultdict(list)
    prompts: dict[int, list[list[int]]] = defaultdict(list)
    for chunk in stream:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice.get("token_ids", ())  # none with a role
            if "prompt_token_ids" in choice:
                prompts[choice["index"]].append(choice["prompt_token_ids"])
    for choice in whole["choices"]:
        assert joined[choice["index"]] == choice["token_ids"]
        if path == COMPLETIONS:
            assert prompts[choice["index"]] == [choice["prompt_token_ids"]]
    if path == CHAT:  # in the first chunk alone
        assert stream[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in stream[1:])


def test_reasoning_tokens_are_included(tiny: Sdk) -> None:
    fields: dict[str, Any] = {"model": tiny.model, "messages": MESSAGES, "max_tokens": 40}
    extra = {**sdk.THINK, "thinking_token_budget": 8, "return_token_ids": True}
    response = tiny.client.chat.completions.create(**fields, **sdk.SAMPLED, extra_body=extra)
    choice: Any = response.choices[0]
    assert response.usage is not None
    assert len(choice.token_ids) == response.usage.completion_tokens
    stream = tiny.client.chat.completions.create(
        **fields, **sdk.SAMPLED, extra_body=extra, stream=True
    )
    parts: list[Any] = [chunk.choices[0] for chunk in stream]
    assert [id for part in parts for id in getattr(part, "token_ids", ())] == choice.token_ids
    reasoning = [part.delta.reasoning for part in parts if hasattr(part.delta, "reasoning")]
    assert "".join(reasoning) == choice.message.reasoning == choice.message.reasoning_content


# ── the prompt's log-probabilities ──


def test_prompt_logprobs_equal_those_of_an_echo(server: Server) -> None:
    fields = {"logprobs": 3, "echo": True, "max_tokens": 0}
    echoed = answered(server, COMPLETIONS, **fields)["choices"][0]["logprobs"]
    for more in ({"prompt_logprobs": 3}, {"prompt_logprobs": 3, **fields}):
        choice = answered(server, COMPLETIONS, **more)["choices"][0]
        first, *scores = choice["prompt_logprobs"]
        assert first is None
        assert len(scores) == len(choice["prompt_token_ids"]) - 1
        for n, (score, token) in enumerate(
            zip(scores, choice["prompt_token_ids"][1:], strict=True), start=1
        ):
            assert score[str(token)]["logprob"] == pytest.approx(echoed["token_logprobs"][n])
            assert 3 <= len(score) <= 4
            ranks = [entry["rank"] for entry in score.values()]
            assert ranks[:3] == [1, 2, 3]
            assert score[str(token)]["rank"] > 3 or len(score) == 3
            best = sorted((entry["logprob"] for entry in score.values()), reverse=True)
            assert best[0] == score[next(iter(score))]["logprob"]
            assert {type(entry["decoded_token"]) for entry in score.values()} == {str}


def test_prompt_logprobs_of_a_chat_come_with_its_response(server: Server) -> None:
    plain = answered(server, CHAT, logprobs=True)
    response = answered(server, CHAT, prompt_logprobs=0, logprobs=True, top_logprobs=2)
    scores = response["prompt_logprobs"]
    assert [None if score is None else [*score] for score in scores] == [
        None,
        *([str(token)] for token in response["prompt_token_ids"][1:]),
    ]
    assert all(score is None or len(score) == 1 for score in scores)
    choice = response["choices"][0]
    assert choice["token_ids"] == plain["choices"][0]["token_ids"]
    assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
    without = answered(server, CHAT, prompt_logprobs=1, return_token_ids=None)
    assert without["choices"][0]["logprobs"] is None
    assert len(without["prompt_logprobs"]) == len(scores)
    assert "prompt_token_ids" not in without


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_responses_have_the_time_per_stage(server: Server, path: str, stream: bool) -> None:
    response = post(server, path, {**BODIES[path], "stream": stream})
    stages = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(stages) == ["queue", "batch", "model"]
    assert float(stages["model"]) > 0
    assert all(float(duration) >= 0 for duration in stages.values())
