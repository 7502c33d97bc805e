"""Error texts of request fields: the field, the accepted values and the given value."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct, inspect

from batching.errors import InvalidInput
from server.apis.openai.adapters import LoadAdapterRequest
from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.decisions.request import DecisionRequest
from server.apis.openai.embedding.embeddings import EmbeddingRequest
from server.apis.openai.embedding.rerank import RerankRequest
from server.apis.openai.infill import InfillRequest
from server.apis.openai.request_fields import convert, decode
from server.apis.openai.responses.items import convert_foreign, to_documents, to_messages
from server.apis.openai.responses.request import ResponseRequest
from worker.messages.generation import Chat


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: expected float <= 2.0, not 3"),
        ({"stop": ["a"] * 17}, "stop: expected array of length <= 16, not 17"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]: expected int >= 0, not -1"),
        ({"stop": ["a", 1]}, "stop[1]: expected str, got int"),
        ({"cache_salt": "x" * 300}, "cache_salt: expected str of length <= 256, not 300"),
        ({"logit_bias": {"1": 500}}, "logit_bias: expected float <= 100.0"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{}]}, "messages[0].role: is required"),
    ],
)
def test_error_names_the_field_the_accepted_and_the_given_value(
    fields: dict[str, Any], message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(InvalidInput) as caught:
        convert(body, ChatRequest)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [({"k": "v" * 600}, "length <= 512"), ({"k" * 65: ""}, "length <= 64")],
)
def test_error_within_an_object_has_no_length_of_the_object(
    metadata: dict[str, str], accepted: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert({"input": "x", "metadata": metadata}, ResponseRequest)
    assert str(caught.value) == f"metadata: expected str of {accepted}"


def test_whole_numbers_may_be_written_as_floats() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5.0, "temperature": 1.0}
    request = decode(body, ChatRequest, lambda name: "demo", {})
    assert (request.max_tokens, request.temperature) == (5, 1.0)
    for value, message in (
        (5.5, "expected int, got float"),
        (1e300, "the integer 1e.300 has more than 64 bits"),
        (-2.0, "max_tokens: expected int >= -1, not -2"),
    ):
        with pytest.raises(InvalidInput, match=message):
            decode({**body, "max_tokens": value}, ChatRequest, lambda name: "demo", {})


BODIES = (
    ChatRequest, CompletionRequest, ResponseRequest, InfillRequest, EmbeddingRequest, RerankRequest,
    DecisionRequest, LoadAdapterRequest,
)  # fmt: skip


def not_nullable(node: Any, path: str, parents: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield the optional fields, also of objects within fields, that do not accept null."""
    match node:
        case inspect.Metadata():
            yield from not_nullable(node.type, path, parents)
        case inspect.UnionType():
            for member in node.types:
                yield from not_nullable(member, path, parents)
        case inspect.ListType() | inspect.VarTupleType():
            yield from not_nullable(node.item_type, f"{path}[]", parents)
        case inspect.StructType() if node.cls not in parents:
            for field in node.fields:
                type_ = getattr(field.type, "type", field.type)  # of Metadata
                types = getattr(type_, "types", (type_,))
                nullable = any(isinstance(t, inspect.NoneType | inspect.AnyType) for t in types)
                if not (field.required or nullable):
                    yield f"{path}.{field.encode_name}"
                name = f"{path}.{field.encode_name}"
                yield from not_nullable(field.type, name, (*parents, node.cls))


@pytest.mark.parametrize("kind", BODIES)
def test_null_counts_as_absent_also_within_fields(kind: type[Struct]) -> None:
    """As clients in Java, C# and Go send unset fields."""
    assert [*not_nullable(inspect.type_info(kind), "")] == []


def prompt_of(*messages: dict[str, Any]) -> Chat:
    request = decode({"messages": [*messages]}, ChatRequest, lambda name: "demo", {})
    prompt = request.generation_inputs(1)[0].prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_a_text_may_stand_for_a_part() -> None:
    """As LangChain sends the parts of a message."""
    parts = ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]
    [message] = prompt_of({"role": "user", "content": parts}).messages
    assert message["content"] == "a\nb\nc"
    with pytest.raises(InvalidInput, match=r"content\[0\].text: is required"):
        prompt_of({"role": "user", "content": [{"type": "output_text"}]})


@pytest.mark.parametrize(("value", "logprobs"), [(True, 1), (False, None), (2, 2)])
def test_logprobs_of_completions_may_be_a_boolean(value: int, logprobs: int | None) -> None:
    """As clients of chats send it."""
    body = {"prompt": "x", "logprobs": value}
    request = decode(body, CompletionRequest, lambda name: "demo", {})
    [generation_input] = request.generation_inputs(1)
    assert generation_input.sampling.logprobs == logprobs
    assert not isinstance(generation_input.sampling.logprobs, bool)


def test_items_that_another_server_ran_are_calls_or_ignored() -> None:
    """As an agent sends them that has used OpenAI's tools before."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "b"}},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "t"}]},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{}",
         "output": "c"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "d"}]},
        {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "completed"},
        {"type": "mcp_call", "id": "f", "server_label": "s", "name": "t", "arguments": "{}",
         "output": None, "error": {"code": 401}},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    convert_foreign(items)
    request = convert({"input": items}, ResponseRequest)
    messages = [
        message for _, message in to_messages((), to_documents(request.input, lambda _: {}))
    ]
    calls = [(c.function.name, c.function.arguments) for m in messages for c in m.tool_calls or ()
             if c.function]  # fmt: skip
    assert calls == [
        ("s__t", "{}"), ("shell", '{"commands":["ls"]}'), ("apply_patch", '{"type":"delete_file"}'),
        ("s__t", "{}"),
    ]  # fmt: skip
    texts = [(m.role, m.content) for m in messages if not m.tool_calls]
    assert texts == [
        ("user", "a"), ("tool", "c"), ("tool", '[{"stdout":"d"}]'), ("tool", "completed"),
        ("tool", '{"code":401}'), ("user", "e"),
    ]  # fmt: skip


def test_a_call_without_type_and_arguments_and_its_empty_result() -> None:
    """go-openai omits empty fields."""
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": None}}
    result = {"role": "tool", "tool_call_id": "c"}
    calling, answer = prompt_of({"role": "assistant", "tool_calls": [call]}, result).messages
    function = {"name": "f", "arguments": ""}
    assert calling["tool_calls"] == [{"function": function, "id": "c", "type": "function"}]
    assert answer["content"] == ""


def test_images_of_a_tool_result_follow_it_as_those_of_a_user() -> None:
    """As Zed and LangChain send them; templates take images of users only."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "a"}, image, "b"]
    prompt = prompt_of({"role": "tool", "tool_call_id": "c", "content": content})
    result, shown = prompt.messages
    assert (result["content"], result["tool_call_id"]) == ("a\nb", "c")
    assert shown == {"role": "user", "content": [{"type": "image"}]}
    assert len(prompt.media) == 1
    with pytest.raises(InvalidInput, match=r"content\[0\].type: images, recordings and videos"):
        prompt_of({"role": "assistant", "content": [image]})
