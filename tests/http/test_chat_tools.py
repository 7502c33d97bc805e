"""Tools, reasoning and output formats in Chat Completions, with scripted output."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.event_streams import CLIENT, chat, chunks
from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving
from worker.messages.generation import Chat, Constraint, GenerationInput, ToolCallPolicy

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASKED = 'say *hm Well !get_weather ={"city": ="Oslo"} !clock ={}'


def function(definition: Any) -> dict[str, Any]:
    return {"type": "function", "function": definition}


def allowed(tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": tools}


def choosing(choice: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": choice}


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator, chat_model="org/model") as started:
        yield started


def submitted(generator: FakeGenerator, server: Server, **fields: Any) -> GenerationInput:
    answer = chat(server, **fields)
    assert answer.status_code == 200, answer.text
    return generator.payloads[-1]


def test_call_ids_are_the_generators_and_count_earlier_calls(server: Server) -> None:
    function = {"name": "clock", "arguments": "{}"}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(2)]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": ASKED},
    ]
    fields: dict[str, Any] = {"messages": messages, "tools": TOOLS, "n": 2}
    for choice in chat(server, **fields).json()["choices"]:
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert ids == ["call_get_weather:2", "call_clock:3"]
    streamed = [c["choices"][0] for c in chunks(chat(server, stream=True, **fields))]
    for index in (0, 1):
        deltas = [choice["delta"] for choice in streamed if choice["index"] == index]
        begun = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        assert [call["id"] for call in begun] == ["call_get_weather:2", "call_clock:3"]
        assert [call["index"] for call in begun] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, ToolCallPolicy(("get_weather", "clock"))),
        ({"tool_choice": "auto"}, ToolCallPolicy(("get_weather", "clock"))),
        ({"tool_choice": {"type": "auto"}}, ToolCallPolicy(("get_weather", "clock"))),
        ({"tool_choice": "required"}, ToolCallPolicy(("get_weather", "clock"), required=True)),
        (
            {"tool_choice": {"type": "required"}},
            ToolCallPolicy(("get_weather", "clock"), required=True),
        ),
        (
            {"tool_choice": function({"name": "clock"}), "parallel_tool_calls": True},
            ToolCallPolicy(("clock",), required=True, parallel=False),
        ),
        ({"parallel_tool_calls": False}, ToolCallPolicy(("get_weather", "clock"), parallel=False)),
        ({"tool_choice": allowed({"mode": "auto", "tools": [CLOCK]})}, ToolCallPolicy(("clock",))),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": {"type": "none"}}, None),
        ({"tools": []}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": None, "tool_choice": "auto"}, None),
    ],
)
def test_tool_choice_reaches_the_model(
    generator: FakeGenerator, server: Server, fields: dict[str, Any], calls: ToolCallPolicy | None
) -> None:
    payload = submitted(generator, server, **{"tools": TOOLS, **fields})
    assert payload.tool_policy == calls
    assert isinstance(payload.prompt, Chat)
    # tools that may not be called are not in the prompt
    assert payload.prompt.tools == (tuple(TOOLS) if calls else ())


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Constraint("json_schema", {"type": "object"}, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            Constraint("json_schema", SCHEMA, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Constraint("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}, "value": None}},
            Constraint("json_schema", {"type": "object"}, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            Constraint("json_schema", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            Constraint("json_schema", SCHEMA, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            Constraint("regex", "a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Constraint("choice", ["a", "b"], "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Constraint("grammar", 'start: "a"', "structured_outputs.grammar"),
        ),
    ],
)
def test_output_format_reaches_the_model(
    generator: FakeGenerator, server: Server, fields: dict[str, Any], constraint: Constraint | None
) -> None:
    assert submitted(generator, server, **fields).constraint == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function({})]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [function({"name": 'a"b'})]}, "tools[0].function.name"),
        ({"tools": [function({"name": "a" * 129})]}, "tools[0].function.name"),
        ({"tools": [function({"name": "f", "parameters": [1]})]}, "tools[0].function.parameters"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (choosing("any"), "tool_choice"),
        (choosing(3), "tool_choice"),
        (choosing({"type": "any"}), "tool_choice.type"),
        (choosing({"type": "function"}), "tool_choice.function"),
        (choosing(function({"name": "g"})), "tool_choice.function.name"),
        (choosing({"type": "allowed_tools"}), "tool_choice.allowed_tools"),
        (choosing(allowed({"mode": "auto"})), "tool_choice.allowed_tools.tools"),
        (
            choosing(allowed({"mode": "auto", "tools": [{"function": {"name": "g"}}]})),
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_error_names_the_invalid_tool_field(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    answer = chat(server, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("depth", [300, 980, 1010])
def test_deeply_nested_arguments_are_no_internal_error(server: Server, depth: int) -> None:
    arguments = b'{"a":' * depth + b"1" + b"}" * depth
    body = (
        b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": '
        b'[{"id": "c", "type": "function", "function": {"name": "f", "arguments": %b}}]}, '
        b'{"role": "tool", "tool_call_id": "c", "content": "x"}]}' % arguments
    )
    for path in ("/v1/chat/completions", "/tokenize"):
        assert CLIENT.post(server.url + path, content=body).status_code in (200, 400)
