"""Twelve turns of an agent over HTTP: each computes its new tokens and at most a block.

Counted by the usage of each API, and by the metrics of the engine."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests import tiny_chat
from tests.event_streams import CLIENT
from tests.serving import Server, metric, serving
from tests.tiny import for_tokenizer
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions

TURNS = 12
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
Document = dict[str, Any]


class Chats:
    """A conversation in the form of chat completions. `messages`: what the client sends."""

    path = "/v1/chat/completions"
    # <think>\n\n</think>\n\n, since thinking is off: the next prompt does not have it there
    header = 14

    def __init__(self) -> None:
        self.messages: list[Document] = [{"role": "user", "content": "Count the files."}]

    def body(self) -> Document:
        function = {"name": "look", "parameters": PARAMETERS, "strict": True}
        return {
            "messages": self.messages,
            "max_tokens": 40,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "reasoning_effort": "none",
        }

    def add(self, response: Document, result: str) -> None:
        message = response["choices"][0]["message"]
        [call] = message["tool_calls"]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": result}
        self.messages += [message, answer]

    def usage(self, response: Document) -> tuple[int, int]:
        """Return the tokens of the prompt, and of them the cached ones."""
        usage = response["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Messages(Chats):
    path = "/v1/messages"

    def body(self) -> Document:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        tool = {"name": "look", "input_schema": PARAMETERS, "strict": True}
        fields = {"messages": self.messages, "max_tokens": 40}
        return {**fields, "model": "demo", "tools": [tool], "tool_choice": choice}

    def add(self, response: Document, result: str) -> None:
        [call] = response["content"]
        answer = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
        self.messages.append({"role": "assistant", "content": [call]})
        self.messages.append({"role": "user", "content": [answer]})

    def usage(self, response: Document) -> tuple[int, int]:
        usage = response["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached


class Responses(Chats):
    path = "/v1/responses"

    def body(self) -> Document:
        tool = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}
        fields: Document = {"input": self.messages, "max_output_tokens": 40, "tools": [tool]}
        fields["reasoning"] = {"effort": "none"}
        return {**fields, "tool_choice": "required", "parallel_tool_calls": False, "store": False}

    def add(self, response: Document, result: str) -> None:
        [call] = response["output"]
        id = call["call_id"]
        self.messages += [call, {"type": "function_call_output", "call_id": id, "output": result}]

    def usage(self, response: Document) -> tuple[int, int]:
        usage = response["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@cache
def engine_of(kind: str) -> GenerationEngine:
    """Return a tiny model: with attention alone, or with short convolutions too."""
    path = tiny_chat.folder()
    if kind == "hybrid":
        layers = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
        path = for_tokenizer("turns", tiny_chat.tokenizer(), "Lfm2Config", **layers)
    options = GeneratorOptions(str(path), dtype="float32", device="cpu", kv_cache_gb=0.01)
    engine = load_generator(options)
    assert engine.info.batching == "continuous", engine.info.why
    return engine


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[Server]:
    with serving(load_chat=lambda: engine_of(kind)) as started:
        yield started


@pytest.mark.parametrize("api", [Chats, Messages, Responses])
def test_a_turn_computes_its_new_tokens_and_a_block(
    server: Server, kind: str, api: type[Chats]
) -> None:
    conversation, before = api(), 0
    conversation.messages[0]["content"] += f" Ask by {api.path}."
    computed_before = metric(server, 'onequeue_tokens_total{kind="prompt"}')
    computed = 0
    for turn in range(TURNS):
        response = CLIENT.post(server.url + conversation.path, json=conversation.body())
        assert response.status_code == 200, response.text
        document = response.json()
        prompt, cached = conversation.usage(document)
        assert before - cached <= api.header + BLOCK, (turn, prompt, cached)
        computed += prompt - cached
        before = prompt
        conversation.add(document, f"{turn} files are in it.")
    assert before > 4 * (computed / TURNS)  # most of a prompt is not computed
    name = 'onequeue_tokens_total{kind="prompt"}'
    assert metric(server, name) - computed_before == computed
