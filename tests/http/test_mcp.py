"""A client's loop between an MCP server's tools and our calls of them: by chat and by responses."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.sdk import QUESTION, Sdk, reports_weather

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters
from mcp_types import TextContent, Tool

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")

@server.tool()
def get_weather(city: str) -> str:
    '''Get the current weather in a city'''
    return '{"temperature": 18, "condition": "sunny"}' if city == "Paris" else "unknown"

server.run()
"""
MOST_TURNS = 4

Call = tuple[str, dict[str, Any]]


async def by_chat(
    client: openai.AsyncOpenAI, model: str, mcp: Client, tool_calls: list[Call]
) -> str:
    tools: list[Any] = [{"type": "function", "function": tool} for tool in await offered(mcp)]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            result = await called(mcp, call.function.name, call.function.arguments, tool_calls)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("it went on calling")


async def by_responses(
    client: openai.AsyncOpenAI, model: str, mcp: Client, tool_calls: list[Call]
) -> str:
    tools: list[Any] = [
        {"type": "function", "strict": False, **tool} for tool in await offered(mcp)
    ]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: str | None = None
    for _ in range(MOST_TURNS):
        answer = await client.responses.create(
            model=model, input=items, tools=tools, previous_response_id=previous
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items, previous = [], answer.id
        for call in calls:
            output = await called(mcp, call.name, call.arguments, tool_calls)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            items.append(result)
    raise AssertionError("it went on calling")


async def offered(mcp: Client) -> list[dict[str, Any]]:
    """The server's tools, as functions."""
    tools: list[Tool] = (await mcp.list_tools()).tools
    return [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in tools
    ]


async def called(mcp: Client, name: str, arguments: str, tool_calls: list[Call]) -> str:
    """Return a tool's result as text."""
    values = json.loads(arguments)
    tool_calls.append((name, values))
    result = await mcp.call_tool(name, values)
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


@pytest.mark.parametrize("loop", [by_chat, by_responses])
def test_an_mcp_servers_tool_is_called_and_its_result_is_used(
    demo: Sdk, loop: Callable[..., Awaitable[str]]
) -> None:
    tool_calls: list[Call] = []

    async def run() -> str:
        server = StdioServerParameters(command=sys.executable, args=["-c", SERVER])
        async with (
            Client(server) as mcp,
            openai.AsyncOpenAI(base_url=demo.url, api_key="-", max_retries=0) as client,
        ):
            return await loop(client, demo.model, mcp, tool_calls)

    text = asyncio.run(run())
    assert tool_calls == [("get_weather", {"city": "Paris"})]
    assert reports_weather(text)
