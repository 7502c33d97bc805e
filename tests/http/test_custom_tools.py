"""The tools of coding agents: custom tools in both of OpenAI's APIs, namespaces, the local shell,
hosted tools that are dropped, and sealed reasoning."""

from typing import Any

import openai
import pytest

from server.apis.openai.custom_tools import CustomInputReader
from server.core.sealing import seal, unseal
from tests.fake_generator import FakeGenerator
from tests.response_events import respond, response_document
from tests.serving import Server
from worker.messages.generation import Chat, GenerationInput

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"type": "custom", "name": "patch", "description": "Patches", "format": LARK}
PLAIN = {"type": "custom", "name": "note"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [LOOK, PLAIN]}
SHELL = {"type": "local_shell"}
USER = {"role": "user", "content": "hi"}
Document = dict[str, Any]


def last_chat(generator: FakeGenerator) -> tuple[GenerationInput, Chat]:
    payload = generator.payloads[-1]
    assert isinstance(payload.prompt, Chat)
    return payload, payload.prompt


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
def test_an_input_with_odd_escapes_is_a_text(written: str, read: str) -> None:
    """Models write half a surrogate pair, and escapes that JSON does not have."""
    arguments = f'{{"input":"{written}"}}'
    reader = CustomInputReader()
    assert "".join(map(reader.push, arguments)) + reader.finish() == read


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


def test_compaction_is_refused_by_name(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="/v1/responses/compact is not implemented"):
        client.responses.compact(model="demo", input="hi")
