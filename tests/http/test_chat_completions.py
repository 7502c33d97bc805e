"""`POST /v1/chat/completions` over a real socket, with a fake generator."""

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


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"include_usage": None}, {"continuous_usage_stats": True}],
)
def test_stream_has_no_usage_by_default(server: Server, options: Any) -> None:
    got = chunks(chat(server, stream=True, stream_options=options))
    assert not any("usage" in c for c in got)
    assert all(c["choices"] for c in got)


# ── what the worker gets ──


def test_null_counts_as_absent(server: Server, generator: FakeGenerator) -> None:
    from server.apis.openai.chat import ChatRequest

    nothing = dict.fromkeys(
        {*ChatRequest.__struct_fields__, *ChatRequest.unimplemented} - {"messages"}
    )
    for fields in ({}, nothing):
        payload = submitted(generator, server, **fields)
        assert payload.prompt == Chat(({"role": "user", "content": "hi"},))
        assert payload.sampling == Sampling()
        assert payload.stopping == Stopping()
        assert (payload.n, payload.first_choice, payload.echo) == (1, 0, False)
        assert payload.param == "messages"


def test_every_sampling_parameter_reaches_the_model(
    server: Server, generator: FakeGenerator
) -> None:
    payload = submitted(
        generator, server, temperature=0, top_p=1, top_k=-1, min_p=0.1, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=1.1, logit_bias={"7": -100, "8": 1.5}, seed=-3,
        logprobs=True, top_logprobs=20, max_tokens=9, max_completion_tokens=5, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2, thinking_token_budget=7,
    )  # fmt: skip
    assert payload.sampling == Sampling(
        temperature=0, top_p=1, top_k=0, min_p=0.1, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.1, logit_bias={7: -100, 8: 1.5}, seed=-3, logprobs=20,
    )  # fmt: skip
    assert payload.stopping == Stopping(5, 2, ("a", "b"), (3,), True)
    assert (payload.n, payload.thinking_tokens) == (2, 7)
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
        {"role": "tool", "tool_call_id": "c1", "content": []},
        {"role": "assistant", "content": []},
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
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
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
    if "content" in thoughts:
        return
    alone = [{"role": "assistant", **thoughts, "content": None}, MESSAGE]  # as vLLM writes it
    prompt = submitted(generator, server, messages=alone).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[0] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


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
        {"store": True, "prediction": {"type": "content", "content": "x"}},
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
USER_PART = "messages[0].content[0]"
FORMAT, OUTPUTS, OPTIONS = "response_format", "structured_outputs", "stream_options"
CONTINUE = "continue_final_message"
BOTH = {"schema": {"a": 1}, "value": {"a": 1}}
JSON_OBJECT, JSON_SCHEMA = {"type": "json_object"}, {"type": "json_schema"}
DIFFERING = {"reasoning": "a", "reasoning_content": "b"}


def sent(*parts: Any) -> dict[str, Any]:
    """A message of the user with these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


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
        (sent({"type": "image_url"}), f"{USER_PART}.image_url", "is required"),
        (sent({"type": "smell_url", "text": "a"}), f"{USER_PART}.type", "not 'smell_url'"),
        (sent({"type": "text"}), f"{USER_PART}.text", "is required"),
        (sent("x"), USER_PART, "expected object"),
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
        ({"stream": True, OPTIONS: {"include_usage": 1}}, f"{OPTIONS}.include_usage", "bool"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be json_object or"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": "text"}, "response_format", "expected object"),
        ({FORMAT: JSON_SCHEMA}, f"{FORMAT}.json_schema.schema", "is required"),
        (
            {FORMAT: JSON_SCHEMA | {"json_schema": {"schema": []}}},
            f"{FORMAT}.json_schema.schema",
            "expected object",
        ),
        ({FORMAT: JSON_OBJECT | BOTH}, f"{FORMAT}.value", "cannot be combined with schema"),
        ({FORMAT: JSON_OBJECT | {"schema": "{}"}}, f"{FORMAT}.schema", "expected object"),
        ({"messages": [MESSAGE | DIFFERING]}, "messages[0].reasoning", "differs from reasoning_"),
        ({"messages": [{**MESSAGE, "reasoning": []}]}, "messages[0].reasoning", "expected str"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "needs one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "not be empty"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "not be empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not valid JSON"),
        ({OUTPUTS: {"json": "[]"}}, f"{OUTPUTS}.json", "must be a JSON object"),
        ({OUTPUTS: {"structural_tag": "x"}}, f"{OUTPUTS}.structural_tag", "not implemented"),
        ({OUTPUTS: {"regex": "a"}, FORMAT: JSON_OBJECT}, OUTPUTS, "cannot be combined with"),
        ({"reasoning_effort": "hard"}, "reasoning_effort", "must be high or"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", ">= 0"),
        ({"tools": [{"type": "x"}], "tool_choice": "none"}, "tools[0].type", "function"),
        ({"tools": [{}] * 129}, "tools", "<= 128"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "<= 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "<= 1024"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "expected object"),
        ({"add_generation_prompt": True, CONTINUE: True}, CONTINUE, "cannot be combined with"),
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
        ("prompt_cache_retention", "24h"),
        ("web_search_options", {}),
    ],
)
def test_error_names_the_unimplemented_parameter(server: Server, name: str, value: Any) -> None:
    error = refused(server, **{name: value})
    assert error["param"] == name
    assert "not implemented" in error["message"]


def test_every_parameter_of_the_api_is_implemented_accepted_or_refused() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    from server.apis.openai.chat import ChatRequest
    from server.apis.openai.request_fields import known_fields

    known = set(get_type_hints(CompletionCreateParamsStreaming))
    assert {"messages", "stream"} <= known
    assert known - known_fields(ChatRequest) == {"verbosity"}  # named in X-Ignored-Fields


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
