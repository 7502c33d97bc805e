"""Servers, schemas and tools for tests with the official SDKs.

`demo` can use a weather tool. `tiny` has random weights and can reason; its output has a form only
where it is constrained.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import openai
import pytest
from pydantic import BaseModel, Field

from tests import tiny_chat
from tests.serving import serving

RESULT = json.dumps({"temperature": 18, "condition": "sunny"})
QUESTION = "What is the weather in Paris?"
THINK: dict[str, Any] = {"chat_template_kwargs": {"thinking_begun": True}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1}


class Near(BaseModel):
    name: str = Field(max_length=6)
    km: int = Field(ge=0, le=999)


class Place(BaseModel):
    city: str = Field(max_length=8)
    kind: Literal["capital", "town"]
    near: list[Near] = Field(max_length=2)
    twin: Near | None


class GetWeather(BaseModel):
    """Get the current weather in a city"""

    city: str = Field(description="The city", max_length=20)


class Clock(BaseModel):
    """Get the time"""

    zone: Literal["utc", "local"]


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
CLOCK = openai.pydantic_function_tool(Clock, name="clock")


def reports_weather(text: str) -> bool:
    """Return whether a text contains the weather tool's result."""
    return not {"18", "sunny", "Paris"} - set(re.findall(r"\w+", text))


class Sdk(NamedTuple):
    """A client of a server with one model."""

    client: openai.OpenAI
    model: str
    url: str


@contextmanager
def demo() -> Iterator[Sdk]:
    with connect(chat_model="demo") as sdk:
        yield sdk


@contextmanager
def tiny(template: str = tiny_chat.TEMPLATE) -> Iterator[Sdk]:
    folder = tiny_chat.folder(template=template)
    with connect(chat_model=str(folder), dtype="float32", kv_cache_gb=0.05) as sdk:
        yield sdk


@contextmanager
def connect(**settings: Any) -> Iterator[Sdk]:
    with serving(compile="off", **settings) as server:
        url = server.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            [model] = client.models.list()
            yield Sdk(client, model.id, url)


def run_node(script: str, **environment: str) -> Any:
    """Return the JSON that a script of tests/node prints. Skip the test without its packages."""
    node, folder = shutil.which("node"), Path(__file__).parent / "node"
    if node is None or not (folder / "node_modules" / "openai").is_dir():
        pytest.skip("no Node SDK here")
    environment = os.environ | environment
    done = subprocess.run(
        [node, folder / script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
