"""`/v1/responses` requests: fields that reach the worker, and errors by field."""

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseIncludable
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from server.apis.openai.responses.request import ResponseRequest
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.response_events import get_response, respond, response_document
from tests.serving import Server
from worker.messages.generation import (
    Chat,
    Constraint,
    GenerationInput,
    Sampling,
    Stopping,
    ToolCallPolicy,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g", "description": "goes", "strict": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TOLD = {"type": "function_call_output", "call_id": "c1", "output": "say 3"}


@pytest.fixture
def submit(generator: FakeGenerator, server: Server) -> Any:
    """Return the input that the worker receives."""

    def ask(input: Any = "hi", **fields: Any) -> GenerationInput:
        response_document(respond(server, input, **fields))
        return generator.payloads[-1]

    return ask


def messages(payload: GenerationInput) -> list[Any]:
    assert isinstance(payload.prompt, Chat)
    return list(payload.prompt.messages)


# ── what the worker gets ──

BARE = Chat(({"role": "user", "content": "hi"},))


def test_null_counts_as_absent(submit: Any) -> None:
    nothing = dict.fromkeys(
        {*ResponseRequest.__struct_fields__, *ResponseRequest.unimplemented} - {"input"}
    )
    for payload in (submit(), submit(**nothing)):
        assert payload.prompt == BARE
        assert payload.sampling == Sampling()
        assert payload.stopping == Stopping()
        assert (payload.n, payload.constraint, payload.tool_policy) == (1, None, None)


def test_fields_of_this_api_alone_reach_the_model(submit: Any) -> None:
    include = ["message.output_text.logprobs"]
    payload = submit(max_output_tokens=5, top_logprobs=4, include=include)
    assert payload.stopping == Stopping(5)
    assert payload.sampling == Sampling(logprobs=4)
    assert submit(include=include).sampling.logprobs == 0


def test_effort_and_template_arguments_reach_the_model(submit: Any) -> None:
    prompt = submit(reasoning={"effort": "low"}, chat_template_kwargs={"a": 1}).prompt
    assert prompt.effort == "low"
    assert prompt.template_kwargs == {"a": 1}
    assert submit(thinking_token_budget=0).thinking_tokens == 0
    assert submit(reasoning={"summary": "auto"}).prompt.effort is None


def test_instructions_are_the_first_message(submit: Any) -> None:
    system = {"role": "system", "content": "be brief"}
    assert messages(submit([USER], instructions="be brief")) == [system, USER]


def test_messages_are_converted_for_the_chat_template(submit: Any) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "yes", "annotations": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "hi"},
    ]  # fmt: skip
    assert messages(submit(items)) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "hi"},
    ]


def test_content_part_as_an_item_is_a_message_of_the_user(submit: Any) -> None:
    part = {"type": "input_text", "text": "hi"}
    assert messages(submit([part])) == [USER]
    earlier = {"role": "assistant", "content": "yes"}
    assert messages(submit([part, earlier, part])) == [USER, earlier, USER]
    assert messages(submit([{**part, "role": "system"}, USER])) == [
        {**USER, "role": "system"},
        USER,
    ]


def test_items_of_the_assistant_become_one_message(submit: Any) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    cut = {**CALL, "call_id": "c2", "arguments": '{"a": '}
    earlier = {"role": "assistant", "content": "well"}
    parts = {"type": "function_call_output", "call_id": "c2", "output": [
        {"type": "input_text", "text": "say 4"}]}  # fmt: skip

    def called(*calls: dict[str, Any]) -> list[Any]:
        return [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": "f", "arguments": call["arguments"]},
            }
            for call in calls
        ]

    def heard(call_id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "name": "f", "tool_call_id": call_id, "content": text}

    got = messages(submit([USER, thought, earlier, CALL, cut, TOLD, parts]))
    assert got == [
        USER,
        {
            "role": "assistant",
            "content": "well",
            "reasoning_content": "hm",
            "tool_calls": called(CALL, cut),
        },
        heard("c1", "say 3"),
        heard("c2", "say 4"),
    ]
    got = messages(submit([USER, CALL, TOLD, summed, cut, parts]))
    assert got == [
        USER,
        {"role": "assistant", "content": None, "tool_calls": called(CALL)},
        heard("c1", "say 3"),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": called(cut),
        },
        heard("c2", "say 4"),
    ]
    got = messages(submit([thought, {"role": "assistant", "content": "a"}, thought, USER]))
    assert got == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        USER,
    ]


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, ToolCallPolicy(("f", "g"))),
        ({"tool_choice": "auto"}, ToolCallPolicy(("f", "g"))),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": {"type": "none"}}, None),
        ({"tool_choice": "required"}, ToolCallPolicy(("f", "g"), required=True)),
        (
            {"tool_choice": {"type": "function", "name": "g"}},
            ToolCallPolicy(("g",), required=True, parallel=False),
        ),
        ({"parallel_tool_calls": False}, ToolCallPolicy(("f", "g"), parallel=False)),
        ({"parallel_tool_calls": True}, ToolCallPolicy(("f", "g"))),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}},
            ToolCallPolicy(("f",)),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [OTHER, TOOL]}},
            ToolCallPolicy(("g", "f"), required=True),
        ),
        ({"tools": []}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": None, "tool_choice": "none"}, None),
    ],
)
def test_tool_choice_determines_the_callable_tools(
    submit: Any, fields: dict[str, Any], calls: ToolCallPolicy | None
) -> None:
    payload = submit(**{"tools": [TOOL, OTHER], **fields})
    assert payload.tool_policy == calls
    nested = {"name": "g", "description": "goes", "strict": False}
    functions = [{"name": "f", "parameters": {"type": "object"}}, nested]
    offered = [{"type": "function", "function": function} for function in functions]
    # what may not be called is not offered
    assert list(payload.prompt.tools) == (offered if calls else [])


def test_format_constrains_the_text(submit: Any) -> None:
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    constraint = submit(text={"format": schema}).constraint
    assert constraint == Constraint("json_schema", SCHEMA, "text.format.schema")
    constraint = submit(text={"format": {"type": "json_object"}}).constraint
    assert constraint == Constraint("json_schema", {"type": "object"}, "text.format")
    schema = {"type": "json_object", "schema": SCHEMA}
    constraint = submit(text={"format": schema}).constraint
    assert constraint == Constraint("json_schema", SCHEMA, "text.format.schema")
    constraint = submit(structured_outputs={"regex": "a+"}).constraint
    assert constraint == Constraint("regex", "a+", "structured_outputs.regex")
    assert submit(text={"format": {"type": "text"}, "verbosity": "low"}).constraint is None


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"service_tier": "auto", "truncation": "disabled", "store": False, "n": 1},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"reasoning": {"generate_summary": "auto", "mode": "standard", "context": "auto"}},
        {"top_logprobs": 0, "prompt_cache_retention": "in_memory"},
        {"model": "", "whatever": [1]},
        {"model": "tgi"},
    ],
)
def test_unimplemented_parameters_with_default_values_are_accepted(
    server: Server, fields: dict[str, Any]
) -> None:
    answer = respond(server, **fields)
    assert answer.status_code == 200, answer.text


def test_megabytes_of_input_are_accepted(submit: Any, server: Server) -> None:
    long = "x" * 5_000_000
    messages = [{"role": "user", "content": long}, {"role": "user", "content": "say fine"}]
    answer = response_document(respond(server, messages))
    items = get_response(server, answer["id"], "/input_items", order="asc").json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": long}]


def test_every_parameter_of_the_api_is_implemented_accepted_or_refused() -> None:
    known = set(get_type_hints(ResponseCreateParamsStreaming))
    assert {"input", "stream"} <= known
    assert known <= {*ResponseRequest.__struct_fields__, *ResponseRequest.unimplemented}


# ── refusals ──


def deep(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


def user(*parts: Any) -> dict[str, Any]:
    """A request with a message of the user that has these parts."""
    return {"input": [{"role": "user", "content": [*parts]}]}


def choosing(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


def formatted(text_format: Any) -> dict[str, Any]:
    return {"text": {"format": text_format}}


PICTURE = {"type": "input_image", "image_url": "data:;base64,"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"input": None}, "input", "expected"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": {}}, "input", "got object"),
        ({"input": ["hi"]}, "input[0]", "expected object"),
        ({"input": [{"content": "hi"}]}, "input[0].role", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        ({"input": [{"type": "input_text"}]}, "input[0].text", "is required"),
        ({"input": [{"type": "input_text", "text": 3}]}, "input[0].text", "expected str"),
        ({"input": [{"type": "input_text", "text": "a", "role": "x"}]}, "input[0].role", "'x'"),
        ({"input": [{"type": "input_image"}]}, "input[0].image_url", "is required"),
        ({"input": [PICTURE]}, "input[0].content[0].image_url", "takes text, no images"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "got int"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty"),
        (
            user({"type": "input_text", "text": "a"}, PICTURE),
            "input[0].content[1].image_url",
            "takes text, no images",
        ),
        (
            {"input": [USER, {"role": "user", "content": [{"type": "input_text"}]}]},
            "input[1].content[0].text",
            "is required",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}]},
            "input[0].content[0].refusal",
            "is required",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call'"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "is required"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name", "is required"),
        ({"input": [{**CALL, "arguments": None}]}, "input[0].arguments", "is required"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "expected str"),
        ({"input": [CALL, {**TOLD, "output": None}]}, "input[1].output", "is required"),
        (
            {"input": [CALL, {**TOLD, "output": [{"type": "input_file"}]}]},
            "input[1].output[0].type",
            "'input_file'",
        ),
        ({"input": [USER, TOLD]}, "input[1].call_id", "no function_call"),
        ({"input": [TOLD, CALL]}, "input[0].call_id", "no function_call"),
        (
            {"input": [{"type": "reasoning", "summary": [{"type": "x", "text": "a"}]}]},
            "input[0].summary[0].type",
            "'x'",
        ),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "is required"),
        ({"input": [USER | {"id": "a\0b"}]}, "input[0].id", "match"),
        ({"input": [USER | {"id": "x" * 513}]}, "input[0].id", "512"),
        ({"instructions": 3}, "instructions", "expected str"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": 2.1, "stream": True}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["everything"]}, "include[0]", "'everything'"),
        ({"include": "logprobs"}, "include", "expected array"),
        ({"metadata": {"a": 1}}, "metadata", "expected str"),
        ({"store": "yes"}, "store", "expected bool"),
        ({"background": True, "store": False}, "background", "store: false"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge'"),
        ({"reasoning": {"summary": "x"}}, "reasoning.summary", "'x'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not implemented"),
        ({"text": {"verbosity": "x"}}, "text.verbosity", "'x'"),
        (formatted({}), "text.format.type", "is required"),
        (formatted({"type": "grammar"}), "text.format.type", "'grammar'"),
        (formatted({"type": "json_schema", "name": "n"}), "text.format.schema", "is required"),
        (formatted({"type": "json_schema", "schema": {}}), "text.format.name", "is required"),
        (
            formatted({"type": "json_schema", "name": "n", "schema": []}),
            "text.format.schema",
            "expected object",
        ),
        (
            formatted({"type": "json_schema", "name": "n", "schema": deep(250)}),
            "text.format.schema",
            "nested too deeply",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "cannot be combined with text.format",
        ),
        ({"tools": [{}]}, "tools[0].type", "is required"),
        ({"tools": [TOOL, {"type": "mcp"}]}, "tools[1].type", "'mcp'"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "{1,128}"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "before it"),
        ({"tools": [{**TOOL, "parameters": 3}]}, "tools[0].parameters", "expected object"),
        ({"tools": [{**TOOL, "parameters": deep(250)}]}, "tools[0].parameters", "nested"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
        (choosing("any"), "tool_choice", "'any'"),
        (choosing(3), "tool_choice", "got int"),
        (choosing({"type": "function"}), "tool_choice.name", "required"),
        (choosing({"type": "function", "name": "g"}), "tool_choice.name", "no tool 'g'"),
        (choosing({"type": "mcp"}), "tool_choice.type", "'mcp'"),
        ({"tools": [OTHER], "tool_choice": ALLOWED}, "tool_choice.tools[0].name", "no tool 'f'"),
        (
            {"tool_choice": {"type": "function", "name": "g" * 51}},
            "tool_choice.name",
            f"there is no tool {'g' * 50!r}",
        ),
        (choosing({**ALLOWED, "mode": None}), "tool_choice.mode", "got null"),
        (choosing({**ALLOWED, "tools": []}), "tool_choice.tools", "must not be empty"),
        (choosing({**ALLOWED, "tools": [{"type": "mcp"}]}), "tool_choice.tools[0].type", "'mcp'"),
        ({"tools": [TOOL] * 129}, "tools", "<= 128"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "<= 16"),
        ({"metadata": {"a" * 65: ""}}, "metadata", "<= 64"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "<= 512"),
        (choosing({**ALLOWED, "tools": [TOOL] * 129}), "tool_choice.tools", "<= 128"),
    ],
)
def test_error_names_the_invalid_field(
    server: Server, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = respond(server, **{"input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("access_programs", {}),
        ("context_management", []),
        ("image", {}),
        ("max_tokens", 5),
        ("moderation", {}),
        ("n", 2),
        ("prompt", {"id": "p"}),
        ("prompt_cache_retention", "24h"),
        ("response_format", {"type": "text"}),
    ],
)
def test_error_names_the_unimplemented_parameter(server: Server, name: str, value: Any) -> None:
    answer = respond(server, **{name: value})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == name
    assert "not implemented" in error["message"]


def test_defaults_of_the_api_are_accepted(server: Server) -> None:
    defaults = {
        "prompt_cache_options": {"mode": "explicit", "ttl": "12h", "prewarm": True},
        "background_options": {"completion_window": "soonest"},
        "image": {"context_compression": "auto"},
    }
    assert respond(server, **defaults).status_code == 200
    assert respond(server, include=get_args(ResponseIncludable)).status_code == 200
    refused = respond(server, prompt_cache_options={"mode": "never"})
    assert error_of(refused)["param"] == "prompt_cache_options.mode"


def test_unknown_model_is_404_before_other_errors(server: Server) -> None:
    answer = respond(server, model="gpt-4o", truncation="auto")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"
