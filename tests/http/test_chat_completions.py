"""`POST /v1/chat/completions` over a real socket, with a fake generator."""

import re
import time
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from tests.event_streams import CLIENT, chat, chunks, post
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving
from worker.messages.generation import Chat, GenerationInput, Sampling, Stopping

PATH = "/v1/chat/completions"
WHOLE = "Hello there, wörld!"


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator, chat_model="org/model") as started:
        yield started


def submitted(generator: FakeGenerator, server: Server, **body: Any) -> GenerationInput:
    """Return the input that the worker receives."""
    answer = post(server, PATH, {"messages": [{"role": "user", "content": "hi"}], **body})
    assert answer.status_code == 200, answer.text
    return generator.payloads[-1]


def refused(server: Server, **body: Any) -> dict[str, str]:
    answer = post(server, PATH, {"messages": [{"role": "user", "content": "hi"}], **body})
    assert answer.status_code == 400, answer.text
    return error_of(answer)


# ── answers ──


def test_response_has_every_field_of_the_api(server: Server) -> None:
    started = int(time.time())
    answer = chat(server).json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", answer.pop("id"))
    assert started <= answer.pop("created") <= time.time()
    assert answer == {
        "object": "chat.completion",
        "model": "org/model",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": WHOLE, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_several_choices_are_in_order_and_count_the_prompt_once(server: Server) -> None:
    answer = chat(server, n=3, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["0:Hello", "1:Hello", "2:Hello"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 6


def test_stream_has_role_then_text_then_finish_reason(server: Server) -> None:
    got = chunks(chat(server, stream=True))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in got}) == 1
    assert got[0]["object"] == "chat.completion.chunk"
    assert got[0]["model"] == "org/model"
    assert not any("usage" in c for c in got)
    choices = [c["choices"][0] for c in got]
    fields = {"index", "delta", "logprobs", "finish_reason"}
    assert all(set(c) == fields for c in choices[:-1])
    assert set(choices[-1]) == {*fields, "stop_reason"}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["delta"]) == {"content"} and c["delta"]["content"] for c in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(c["delta"].get("content", "") for c in choices) == WHOLE


def test_stream_of_several_choices_starts_with_their_roles(server: Server) -> None:
    got = [c["choices"][0] for c in chunks(chat(server, stream=True, n=3))]
    assert [c["index"] for c in got[:3]] == [0, 1, 2]
    assert all(c["delta"] == {"role": "assistant", "content": ""} for c in got[:3])
    for index in range(3):
        own = [c for c in got if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in own) == f"{index}:" + WHOLE
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_stream_has_no_usage_by_default(server: Server, options: Any) -> None:
    got = chunks(chat(server, stream=True, stream_options=options))
    assert not any("usage" in c for c in got)
    assert all(c["choices"] for c in got)


def test_usage_is_in_one_extra_chunk_and_null_before(server: Server) -> None:
    got = chunks(chat(server, stream=True, stream_options={"include_usage": True}))
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in got[:-1])
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == chat(server).json()["usage"]


def test_continuous_usage_is_in_every_chunk(server: Server, generator: FakeGenerator) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(chat(server, stream=True, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in got]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert all(c["usage"]["prompt_tokens"] == 2 for c in got)
    lone = chunks(chat(server, stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in c for c in lone)  # as vLLM: it goes with include_usage


def test_tokens_of_logprobs_join_to_the_content_streamed_or_not(server: Server) -> None:
    whole = chat(server, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert "".join(token["token"] for token in whole["content"]) == WHOLE
    first = whole["content"][0]
    assert first["token"] == "Hello"
    assert first["bytes"] == list(b"Hello")
    assert first["logprob"] == -1.0
    assert first["top_logprobs"] == [
        {"token": "Hello", "logprob": -1.0, "bytes": list(b"0")},
        {"token": "Hello1", "logprob": -2.0, "bytes": list(b"1")},
    ]
    streamed: list[Any] = []
    for chunk in chunks(chat(server, stream=True, logprobs=True, top_logprobs=2)):
        choice = chunk["choices"][0]
        if choice["logprobs"]:
            text = "".join(token["token"] for token in choice["logprobs"]["content"])
            assert text == choice["delta"].get("content", "")
            streamed += choice["logprobs"]["content"]
    assert streamed == whole["content"]


def test_logprobs_without_alternatives(server: Server) -> None:
    content = chat(server, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in content)


# ── what the worker gets ──


def test_request_without_parameters_uses_the_defaults_of_the_checkpoint(
    server: Server, generator: FakeGenerator
) -> None:
    payload = submitted(generator, server)
    assert payload.sampling == Sampling()
    assert payload.stopping == Stopping()
    assert (payload.n, payload.first_choice, payload.echo, payload.param) == (
        1, 0, False, "messages",
    )  # fmt: skip
    assert payload.prompt == Chat(({"role": "user", "content": "hi"},))


def test_null_counts_as_absent(server: Server, generator: FakeGenerator) -> None:
    from server.openai.chat import ChatRequest

    nothing = dict.fromkeys(
        {*ChatRequest.__struct_fields__, *ChatRequest.unimplemented} - {"messages"}
    )
    payload = submitted(generator, server, **nothing)
    assert payload.sampling == Sampling()
    assert payload.stopping == Stopping()


def test_every_sampling_parameter_reaches_the_model(
    server: Server, generator: FakeGenerator
) -> None:
    payload = submitted(
        generator, server, temperature=0, top_p=1, top_k=-1, min_p=0.1, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=1.1, logit_bias={"7": -100, "8": 1.5}, seed=-3,
        logprobs=True, top_logprobs=20, max_tokens=9, max_completion_tokens=5, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2,
    )  # fmt: skip
    assert payload.sampling == Sampling(
        temperature=0, top_p=1, top_k=0, min_p=0.1, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.1, logit_bias={7: -100, 8: 1.5}, seed=-3, logprobs=20,
    )  # fmt: skip
    assert payload.stopping == Stopping(5, 2, ("a", "b"), (3,), True)
    assert payload.n == 2
    assert submitted(generator, server, stop="x", logprobs=True).stopping.stop == ("x",)
    assert submitted(generator, server, logprobs=True).sampling.logprobs == 0


def test_messages_are_converted_for_the_chat_template(
    server: Server, generator: FakeGenerator
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    cut = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, cut], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        {"role": "user", "content": "hi"},
    ]  # fmt: skip
    prompt = submitted(generator, server, messages=messages).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, cut]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "hi"},
    )


TEXT_PART = {"type": "text", "text": "yes"}


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": ""},
        {"reasoning": None, "reasoning_content": "hm"},
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT_PART]},
    ],
)
def test_reasoning_is_accepted_under_both_names(
    server: Server, generator: FakeGenerator, thoughts: dict[str, Any]
) -> None:
    earlier = {"role": "assistant", "content": "yes"}
    messages = [earlier | thoughts, {"role": "user", "content": "hi"}]
    prompt = submitted(generator, server, messages=messages).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[0] == earlier | {"reasoning_content": "hm"}


def test_template_arguments_reach_the_model(server: Server, generator: FakeGenerator) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    kwargs = {"enable_thinking": False}
    prompt = submitted(
        generator, server, tools=[tool], reasoning_effort="low", chat_template_kwargs=kwargs
    ).prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools == (tool,)
    assert prompt.template_kwargs == kwargs
    assert prompt.effort == "low"
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)
    continued = submitted(generator, server, continue_final_message=True).prompt
    assert isinstance(continued, Chat)
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    bare = submitted(generator, server, add_generation_prompt=False).prompt
    assert isinstance(bare, Chat)
    assert (bare.add_generation_prompt, bare.continue_final_message) == (False, False)


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"store": False, "service_tier": "auto", "verbosity": "low"},
        {"modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "none"},
        {"response_format": {"type": "text"}, "function_call": "none"},
        {"generation_config": "{}", "whatever": [1], "guided_decoding": None},
        {"model": ""},
        {"model": "dummy"},
        {"model": "tgi"},
        {"model": "org/model"},
        {"n": 1, "stop": []},
    ],
)
def test_unimplemented_parameters_with_default_values_are_accepted(
    server: Server, body: dict[str, Any]
) -> None:
    answer = chat(server, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "org/model"


# ── refusals ──


MESSAGE = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"messages": None}, "messages", "expected array"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": {}}, "messages", "got object"),
        ({"messages": ["hi"]}, "messages[0]", "expected object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'function'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got int"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "messages[0].content",
            "is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            "is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "text": "a"}]}]},
            "messages[0].content[0].type",
            "takes text, not 'video_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "is required",
        ),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content[0]",
            "expected object",
        ),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "expected float"),
        ({"temperature": True}, "temperature", "got bool"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.1}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 1.5}, "min_p", "<= 1"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", ">= 0.01"),
        ({"repetition_penalty": 1e300}, "repetition_penalty", "<= 100"),
        ({"presence_penalty": 2.5}, "presence_penalty", "<= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": True}, "n", "got bool"),
        ({"n": 1.5}, "n", "got float"),
        ({"seed": 10**30}, "seed", "the integer 1e+30 has more than 64 bits"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "got str"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "exceeds max_tokens"),
        ({"stop": 3}, "stop", "got int"),
        ({"stop": ["a", 1]}, "stop[1]", "got int"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
        ({"stop": ["a"] * 17}, "stop", "<= 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "is not a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "expected float"),
        ({"logit_bias": [1]}, "logit_bias", "expected object"),
        ({"logprobs": 3}, "logprobs", "expected bool"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"stream": "yes"}, "stream", "expected bool"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "expected bool",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": "text"}, "response_format", "expected object"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be json_object or",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "expected object",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}, "value": {"a": 1}}},
            "response_format.value",
            "cannot be combined with schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": "{}"}},
            "response_format.schema",
            "expected object",
        ),
        (
            {"messages": [{**MESSAGE, "reasoning": "a", "reasoning_content": "b"}]},
            "messages[0].reasoning",
            "differs from reasoning_content",
        ),
        ({"messages": [{**MESSAGE, "reasoning": []}]}, "messages[0].reasoning", "expected str"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "needs one of",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "not be empty"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "not be empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not valid JSON"),
        (
            {"structured_outputs": {"json": "[]"}},
            "structured_outputs.json",
            "must be a JSON object",
        ),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not implemented",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "cannot be combined with",
        ),
        ({"reasoning_effort": "hard"}, "reasoning_effort", "must be high or"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", ">= 0"),
        ({"tools": [{"type": "x"}], "tool_choice": "none"}, "tools[0].type", "function"),
        (
            {"tools": [{"type": "function", "function": {}}], "tool_choice": "none"},
            "tools[0].function.name",
            "is required",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [{}] * 129}, "tools", "<= 128"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "<= 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "<= 1024"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "expected object"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot be combined with",
        ),
        ({"model": 3}, "model", "expected str"),
        ({"messages": [{"role": "user", "content": "refused"}]}, "messages", "is refused"),
    ],
)
def test_error_names_the_invalid_field(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    error = refused(server, **body)
    assert error["param"] == param
    assert reason in error["message"]
    assert param in error["message"]  # clients often show the message alone
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"voice": "a"}),
        ("function_call", {"name": "f"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("moderation", {}),
        ("prediction", {"type": "content", "content": "x"}),
        ("prompt_cache_retention", "24h"),
        ("store", True),
        ("store", 0),
        ("web_search_options", {}),
    ],
)
def test_error_names_the_unimplemented_parameter(server: Server, name: str, value: Any) -> None:
    error = refused(server, **{name: value})
    assert error["param"] == name
    assert "not implemented" in error["message"]


def test_every_parameter_of_the_api_is_implemented_accepted_or_refused() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    from server.openai.chat import ChatRequest

    without_effect = {
        "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user", "verbosity",
    }  # fmt: skip
    known = set(get_type_hints(CompletionCreateParamsStreaming))
    assert {"messages", "stream"} <= known
    assert known - {*ChatRequest.__struct_fields__, *ChatRequest.unimplemented} == without_effect


def test_unknown_model_is_404(server: Server) -> None:
    for stream in (False, True):
        answer = chat(server, model="gpt-4o", stream=stream)
        assert answer.status_code == 404
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "org/model" in error["message"]


USER = b'{"messages": [{"role": "user", "content": '


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"messages"', None),
        (USER + b'"\xff"}]}', None),
        (USER + b'"x"}], "extra": "\xff"}', None),
        (USER + b'"\\ud800"}]}', "messages[0].content"),
        (USER + b'"x\\udc00y"}]}', "messages[0].content"),
        (USER + b'"x"}], "stop": ["a", "\\ud83d"]}', "stop[1]"),
        (USER + b'"x"}], "user": {"\\udfff": 1}}', "user"),
        (USER + b'"x"}], "user": {"\\udfff": "\\ud800"}}', "user"),
        (USER + b'"x"}], "temperature": NaN}', None),
        (USER + b'"x"}], "temperature": Infinity}', None),
        (USER + b'"x"}], "temperature": 1e999}', None),
        (USER + b'"x"}], "n": ' + b"9" * 5000 + b"}", None),
        (USER + b'"x"}], "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (USER + b'"x"}], "chat_template_kwargs": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", None),
    ],
)
def test_body_that_is_not_json_is_400(server: Server, body: bytes, param: str | None) -> None:
    for media in ("application/json", "text/plain"):
        answer = CLIENT.post(server.url + PATH, content=body, headers={"content-type": media})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


def test_surrogate_pair_and_repeated_key_are_accepted(server: Server) -> None:
    body = b'{"n": 2, "n": 1, ' + USER[1:] + b'"say \\ud83d\\ude00"}]}'
    answer = CLIENT.post(server.url + PATH, content=body)
    assert answer.json()["choices"][0]["message"]["content"] == "😀"
    assert len(answer.json()["choices"]) == 1


def test_large_body_is_parsed_off_the_loop_with_the_same_response(server: Server) -> None:
    extra = ["x" * 100] * 5000
    assert chat(server, extra=extra).json()["choices"][0]["message"]["content"] == WHOLE
    assert refused(server, extra=extra, n=0)["param"] == "n"


def test_very_long_key_does_not_make_a_long_error(server: Server) -> None:
    key = "k" * 200_000
    body = USER + b'"x"}], "' + key.encode() + b'": {"x": "\\ud800"}}'
    answer = CLIENT.post(server.url + PATH, content=body)
    assert answer.status_code == 400
    error_of(answer)
    assert len(refused(server, logit_bias={key: 1})["message"]) < 4100
