"""The tools of coding agents: custom tools in both of OpenAI's APIs, namespaces, the local shell,
hosted tools that are dropped, and sealed reasoning."""

import json
from typing import Any

import openai
import pytest

from server.apis.openai.custom_tools import CustomInputReader
from server.core.sealing import seal, unseal
from tests.event_streams import CLIENT, post
from tests.fake_generator import FakeGenerator
from tests.http.test_pipeline_http import error_of
from tests.response_events import PATH, events, get_response, respond, response_document
from tests.serving import Server, wait_until
from worker.messages.generation import Chat, Constraint, GenerationInput

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"type": "custom", "name": "patch", "description": "Patches", "format": LARK}
PLAIN = {"type": "custom", "name": "note"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [LOOK, PLAIN]}
SHELL = {"type": "local_shell"}
USER = {"role": "user", "content": "hi"}
DEEP: Any = {}
for _ in range(400):
    DEEP = {"a": DEEP}
Document = dict[str, Any]


def last_chat(generator: FakeGenerator) -> tuple[GenerationInput, Chat]:
    payload = generator.payloads[-1]
    assert isinstance(payload.prompt, Chat)
    return payload, payload.prompt


# ── responses ──


def test_a_custom_tool_is_a_function_with_one_argument(
    server: Server, generator: FakeGenerator
) -> None:
    document = response_document(respond(server, tools=[PATCH, PLAIN]))
    assert document["tools"] == [PATCH, {**PLAIN, "description": None}]
    payload, chat = last_chat(generator)
    assert payload.tool_policy is not None
    assert payload.tool_policy.inputs == {
        "patch": Constraint("grammar", 'start: "a"+', "tools[0].format.definition"),
        "note": None,
    }
    patch, note = (tool["function"] for tool in chat.tools)
    assert patch["name"] == "patch"
    assert list(patch["parameters"]["properties"]) == ["input"]
    assert 'start: "a"+' in json.dumps(patch["parameters"]).replace("\\", "")
    assert note["parameters"]["required"] == ["input"]


def test_a_custom_call_is_an_item_with_its_input(server: Server) -> None:
    text = 'say !patch ={"in =put":\xa0"a\\ =n\\u00e =9\\ud83d =\\ude00\\" ="} !note ={"input":"x"}'
    stream = events(respond(server, text, tools=[PATCH, PLAIN], stream=True))
    added, *_ = [event for event in stream if event["type"] == "response.output_item.added"]
    assert (added["item"]["type"], added["item"]["input"]) == ("custom_tool_call", "")
    deltas = [
        event["delta"]
        for event in stream
        if event["type"] == "response.custom_tool_call_input.delta"
    ]
    assert "".join(deltas) == 'a\né😀"x'
    done, _ = [event for event in stream if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == 'a\né😀"'
    assert done["item_id"] == added["item"]["id"]
    output = stream[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["custom_tool_call"] * 2
    assert [(item["name"], item["input"]) for item in output] == [
        ("patch", 'a\né😀"'),
        ("note", "x"),
    ]
    assert output[0]["call_id"] == "call_patch:0"


def test_an_input_is_decoded_as_its_characters_are_generated() -> None:
    reader = CustomInputReader()
    parts = [reader.push(char) for char in r'{"input": "a\n\u00e9\ud83d\ude00\""}']
    assert [part for part in parts if part] == ["a", "\n", "é", "😀", '"']
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ude00x", "\ufffdx"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\\ud83d", r"\ud83d"),  # an escaped backslash
        (r"\\\ud83d\ude00", "\\😀"),
        (r"\d+", r"\d+"),
        (r"\u12G4", r"\u12G4"),
    ],
)
def test_an_input_with_odd_escapes_is_a_text(written: str, read: str, server: Server) -> None:
    """Models write half a surrogate pair, and escapes that JSON does not have."""
    arguments = f'{{"input":"{written}"}}'
    reader = CustomInputReader()
    assert "".join(map(reader.push, arguments)) + reader.finish() == read
    document = response_document(respond(server, f"say !note ={arguments}", tools=[PLAIN]))
    assert document["output"][0]["input"] == read


def test_arguments_of_another_form_are_the_input_as_they_are(server: Server) -> None:
    document = response_document(respond(server, 'say !note =["x"]', tools=[PLAIN]))
    assert document["output"][0]["input"] == '["x"]'


def test_the_tools_of_a_namespace_have_longer_names(
    server: Server, generator: FakeGenerator
) -> None:
    text = 'say !files__look ={} !files__note ={"input":"x"}'
    document = response_document(respond(server, text, tools=[SPACE, LOOK]))
    _, chat = last_chat(generator)
    names = [tool["function"]["name"] for tool in chat.tools]
    assert names == ["files__look", "files__note", "look"]
    look, note = document["output"]
    assert (look["type"], look["name"], look["namespace"]) == ("function_call", "look", "files")
    assert (note["type"], note["name"], note["namespace"]) == ("custom_tool_call", "note", "files")
    again = [USER, look, {"type": "function_call_output", "call_id": look["call_id"], "output": ""}]
    response_document(respond(server, again, tools=[SPACE]))
    _, chat = last_chat(generator)
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "files__look"
    assert chat.messages[2]["name"] == "files__look"


def test_a_local_shell_without_an_object_has_no_command(server: Server) -> None:
    document = response_document(respond(server, "say !local_shell =[1]", tools=[SHELL]))
    assert document["output"][0]["action"] == {"type": "exec", "env": {}, "command": []}


def test_the_local_shell_is_a_function(server: Server, generator: FakeGenerator) -> None:
    action = {"command": ["ls", "-l"], "timeout_ms": 1000}
    stream = events(
        respond(
            server,
            f"say !local_shell ={json.dumps(action).replace(' ', '')}",
            tools=[SHELL],
            stream=True,
        )
    )
    [item] = stream[-1]["response"]["output"]
    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "env": {}, **action}
    assert not [event for event in stream if "arguments" in event["type"]]
    output = {"type": "local_shell_call_output", "id": item["call_id"], "output": "a.txt"}
    response_document(respond(server, [USER, item, output], tools=[SHELL]))
    _, chat = last_chat(generator)
    function = chat.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "local_shell", "arguments": {"env": {}, **action}}
    assert chat.messages[2]["content"] == "a.txt"


def test_hosted_tools_are_dropped_and_named(server: Server, generator: FakeGenerator) -> None:
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    for stream in (False, True):
        response = respond(server, tools=[LOOK, *hosted], stream=stream)
        assert response.status_code == 200, response.text
        assert response.headers["x-dropped-tools"] == "web_search, image_generation"
    _, chat = last_chat(generator)
    assert [tool["function"]["name"] for tool in chat.tools] == ["look"]
    assert "x-dropped-tools" not in respond(server, tools=[LOOK]).headers
    background = respond(server, tools=hosted, background=True)
    assert background.headers["x-dropped-tools"] == "web_search, image_generation"
    id = response_document(background)["id"]
    wait_until(lambda: get_response(server, id).json()["status"] == "completed")


def test_additional_tools_come_with_the_input(server: Server, generator: FakeGenerator) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [SPACE, PATCH]}
    first = response_document(respond(server, [item, USER], tools=[LOOK]))
    payload, chat = last_chat(generator)
    assert payload.tool_policy is not None
    assert payload.tool_policy.names == ("look", "files__look", "files__note", "patch")
    assert len(chat.messages) == 1
    response_document(respond(server, [USER], previous_response_id=first["id"]))
    payload, chat = last_chat(generator)
    assert payload.tool_policy is not None
    assert payload.tool_policy.names == ("files__look", "files__note", "patch")


def test_sealed_reasoning_comes_back(server: Server, generator: FakeGenerator) -> None:
    include = ["reasoning.encrypted_content"]
    first = response_document(respond(server, "say *why so", include=include, store=False))
    reasoning, message = first["output"]
    assert unseal(reasoning["encrypted_content"]) == "why "
    bare = {**reasoning, "content": None}
    response_document(respond(server, [USER, bare, message, USER], store=False))
    _, chat = last_chat(generator)
    assert chat.messages[1]["reasoning_content"] == "why "
    foreign = {**bare, "encrypted_content": seal("x")[:-8] + "AAAAAAA="}
    response_document(respond(server, [USER, foreign, message, USER]))
    _, chat = last_chat(generator)
    assert "reasoning_content" not in chat.messages[1]
    plain = response_document(respond(server, "say *why so"))
    assert "encrypted_content" not in plain["output"][0]


def test_images_of_outputs_are_in_a_message_of_the_user(
    server: Server, generator: FakeGenerator
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    output = [{"type": "input_text", "text": "a"}, image]
    items = [USER, call, {"type": "function_call_output", "call_id": "1", "output": output}]
    generator.refused_media, refused = {}, generator.refused_media
    try:
        response_document(respond(server, items, tools=[LOOK]))
    finally:
        generator.refused_media = refused
    _, chat = last_chat(generator)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "user"]
    assert chat.messages[2]["content"] == "a"
    assert chat.messages[3]["content"] == [{"type": "image"}]


@pytest.mark.parametrize("choice", ["look", "patch"])
def test_a_named_tool_is_called_exactly_once(
    server: Server, generator: FakeGenerator, choice: str
) -> None:
    kind = "custom" if choice == "patch" else "function"
    fields: Document = {"tool_choice": {"type": kind, "name": choice}, "tools": [LOOK, PATCH]}
    document = response_document(respond(server, **fields))
    assert document["tool_choice"] == fields["tool_choice"]
    payload, _ = last_chat(generator)
    assert payload.tool_policy is not None
    assert payload.tool_policy.names == (choice,)
    assert payload.tool_policy.required
    assert not payload.tool_policy.parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**PLAIN, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{**PLAIN, "format": {**LARK, "syntax": "x"}}]}, "tools[0].format.syntax"),
        (
            {"tools": [{**PLAIN, "format": {**LARK, "definition": ""}}]},
            "tools[0].format.definition",
        ),
        ({"tools": [SPACE, SPACE]}, "tools[1].tools[0].name"),
        ({"tools": [{**SPACE, "tools": [SHELL]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "a"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "1"}]}, "input[0].action"),
        ({"input": [{"type": "additional_tools"}]}, "input[0].tools"),
        ({"input": [{"type": "additional_tools", "tools": [LOOK]}]}, "input"),
        (
            {"input": [{"type": "local_shell_call", "call_id": "1", "action": DEEP}]},
            "input[0].action",
        ),
        (
            {"input": [{"type": "additional_tools", "tools": [{**LOOK, "parameters": DEEP}]}]},
            "input[0].tools[0].parameters",
        ),
    ],
)
def test_error_names_the_invalid_field(server: Server, fields: Document, param: str) -> None:
    response = respond(server, **fields)
    assert error_of(response)["param"] == param


def test_input_tokens_are_counted(server: Server, generator: FakeGenerator) -> None:
    fields: Document = {"input": "say a", "tools": [PATCH]}
    counted = CLIENT.post(f"{server.url}{PATH}/input_tokens", json=fields).json()
    document = response_document(respond(server, fields["input"], tools=[PATCH]))
    _, chat = last_chat(generator)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": len(generator.encode(chat)),
    }
    assert document["usage"]["input_tokens"] == len("say a")


def test_compaction_is_refused_by_name(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="/v1/responses/compact is not implemented"):
        client.responses.compact(model="demo", input="hi")


# ── chat completions ──

CHAT_PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
    },
}


def complete(server: Server, text: str = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return post(server, "/v1/chat/completions", {"messages": messages, **fields})


def test_chat_completions_have_custom_tools(server: Server, generator: FakeGenerator) -> None:
    text = 'say !patch ={"input": =\xa0"a\\" ="}'
    document = complete(server, text, tools=[CHAT_PATCH]).json()
    [call] = document["choices"][0]["message"]["tool_calls"]
    custom = {"name": "patch", "input": 'a"'}
    assert call == {"id": "call_patch:0", "type": "custom", "custom": custom}
    payload, _ = last_chat(generator)
    assert payload.tool_policy is not None
    constraint = Constraint("regex", "a+", "tools[0].custom.format.grammar.definition")
    assert payload.tool_policy.inputs == {"patch": constraint}
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
    tools: Any = [CHAT_PATCH]
    messages: Any = [{"role": "user", "content": text}]
    choice: Any = {"type": "custom", "custom": {"name": "patch"}}
    with client.chat.completions.create(
        model="demo", messages=messages, tools=tools, tool_choice=choice, stream=True
    ) as stream:
        calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    documents = [call.model_dump()["custom"] for call in calls]
    assert calls[0].id == "call_patch:0"
    assert documents[0] == {"name": "patch", "input": ""}
    assert "".join(document["input"] for document in documents) == 'a"'
    payload, _ = last_chat(generator)
    assert payload.tool_policy is not None
    assert not payload.tool_policy.parallel
    history = [*messages, {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": call["id"], "content": "done"}, *messages]
    assert post(server, "/v1/chat/completions", {"messages": history}).status_code == 200
    _, chat = last_chat(generator)
    function = chat.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "patch", "arguments": {"input": 'a"'}}


def test_chat_names_the_invalid_field(server: Server) -> None:
    bad = {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {}}}}
    assert error_of(complete(server, tools=[bad]))["param"].startswith("tools[0].custom.format")
    assert error_of(complete(server, tools=[{"type": "custom"}]))["param"] == "tools[0].custom"
