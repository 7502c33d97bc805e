"""Requests in the form of Claude Code 2.1 and Codex 0.169, shortened: none may be refused.

`tests/process/test_agents.py` runs the programs, where they are installed.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.event_streams import CLIENT
from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving
from tests.unit.test_custom_input import APPLY_PATCH
from worker.messages.generation import Chat

CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"file_path": {"type": "string"}},
    "required": ["file_path"],
    "additionalProperties": False,
}
READ = {"type": "tool_use", "id": "call_1", "name": "Read", "input": {"file_path": "a"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "1\thello", **CACHED}
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>skills</system-reminder>"},
                {"type": "text", "text": "Read a", **CACHED},
            ],
        },
        {"role": "system", "content": "Available agent types"},
        {"role": "assistant", "content": [READ]},
        {"role": "user", "content": [RESULT]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "tools": [{"name": "Read", "description": "Reads a file", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"session_id":"1"}'},
    "max_tokens": 64000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
FUNCTION = {"type": "function", "name": "wait", "strict": False, "parameters": SCHEMA}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
SPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [FUNCTION]}
TOOLS: list[dict[str, Any]] = [
    FUNCTION,
    {"type": "custom", "name": "apply_patch", "description": "Edits", "format": GRAMMAR},
    SPACE,
    {"type": "tool_search", "execution": "client", "description": "", "parameters": SCHEMA},
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
]


def item(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


CODEX: dict[str, Any] = {
    "model": "gpt-5.5",
    "stream": True,
    "input": [
        item("developer", "You are a coding agent."),
        item("user", "<environment_context/>"),
        item("user", "Patch a"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "another's"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Success"},
        {"type": "function_call", "call_id": "2", "name": "wait", "namespace": "agents",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "done"}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "context": "all_turns", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20d80",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "1"},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    aliases = ("claude-*=demo", "gpt-*=demo")
    with serving(load_chat=lambda: generator, model_aliases=aliases) as started:
        yield started


def test_claude_code(server: Server, generator: FakeGenerator) -> None:
    headers = {"anthropic-beta": "claude-code-20250219,new-2030-01-01", "authorization": "Bearer x"}
    url = f"{server.url}/v1/messages?beta=true"
    response = CLIENT.post(url, json=CLAUDE_CODE, headers=headers)
    assert response.status_code == 200, response.text
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    roles = [message["role"] for message in prompt.messages]
    assert roles == ["system", "user", "system", "assistant", "tool"]
    assert prompt.messages[0]["content"] == "You are an agent."
    assert prompt.effort == "high"


def test_codex(server: Server, generator: FakeGenerator) -> None:
    response = CLIENT.post(f"{server.url}/v1/responses", json=CODEX)
    assert response.status_code == 200, response.text
    assert response.headers["x-dropped-tools"] == "tool_search, web_search"
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    names = [tool["function"]["name"] for tool in prompt.tools]
    assert names == ["wait", "apply_patch", "agents__wait"]
    assert prompt.messages[-1]["name"] == "agents__wait"


def test_codex_with_tools_in_its_input(server: Server, generator: FakeGenerator) -> None:
    tools = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": TOOLS[:3]}
    body = {**CODEX, "tools": None, "input": [tools, *CODEX["input"]], "parallel_tool_calls": False}
    response = CLIENT.post(f"{server.url}/v1/responses", json=body)
    assert response.status_code == 200, response.text
    policy = generator.payloads[-1].tool_policy
    assert policy is not None
    assert policy.names == ("wait", "apply_patch", "agents__wait")
    assert not policy.parallel
