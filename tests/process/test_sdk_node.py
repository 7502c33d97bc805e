"""OpenAI's Node SDK: tests/node asks two real models, and what it got is looked at here."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import sdk
from tests.sdk import Place

FOLDER = Path(__file__).parents[1] / "node"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.matrix,  # the default check has the Python SDK
    pytest.mark.skipif(NODE is None, reason="there is no node here"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "openai").is_dir(),
        reason="scripts/install dev has not installed tests/node's packages",
    ),
]

Got = dict[str, dict[str, Any]]
both = pytest.mark.parametrize("side", ["demo", "tiny"])
apis = pytest.mark.parametrize("api", ["chat", "responses"])


class Checks:
    """The results of each script's checks; a script runs once, at the first access."""

    def __init__(self, demo: str, tiny: str) -> None:
        self.environment = os.environ | {"DEMO_URL": demo, "TINY_URL": tiny}

    @cache  # noqa: B019  # one object, of this module
    def of(self, api: str) -> Got:
        assert NODE is not None
        done = subprocess.run(
            [NODE, FOLDER / f"{api}.mjs"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {line.pop("check"): line for line in lines}


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    with sdk.demo() as demo, sdk.tiny() as tiny:
        yield Checks(demo.url, tiny.url)


def got(checks: Checks, api: str, name: str) -> dict[str, Any]:
    found = checks.of(api)[name]
    assert "error" not in found, found
    return found


@both
@apis
def test_an_answer_is_parsed(checks: Checks, api: str, side: str) -> None:
    answer = got(checks, api, f"parse {side}")
    assert Place(**answer["parsed"]).model_dump() == json.loads(answer["content"])
    if api == "chat":
        assert answer["tokens"] == answer["content"]


@both
@apis
def test_a_streamed_answer_is_parsed(checks: Checks, api: str, side: str) -> None:
    answer = got(checks, api, f"stream {side}")
    assert answer["deltas"] > 1
    assert answer["text"] == answer["content"]
    assert Place(**answer["parsed"]).model_dump() == json.loads(answer["content"])
    if api == "chat":
        assert answer["done"] == answer["parsed"]
    else:
        assert answer["types"][0] == "response.created"
        assert answer["types"][-1] == "response.completed"


@both
def test_a_streamed_call_is_parsed(checks: Checks, side: str) -> None:
    call = got(checks, "chat", f"stream of a call {side}")
    assert call["name"] == call["done"]["name"] == "get_weather"
    assert call["text"] == call["done"]["arguments"]
    assert call["parsed"] == call["done"]["parsed_arguments"] == json.loads(call["text"])
    assert call["parsed"].keys() == {"city"}
    assert call["content"] is None
    assert call["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("api", "name"),
    [
        ("chat", "runTools false"),
        ("chat", "runTools true"),
        ("responses", "tools true"),
        ("responses", "tools false"),
    ],
)
def test_result_of_a_tool_is_in_the_response(checks: Checks, api: str, name: str) -> None:
    answer = got(checks, api, name)
    assert answer["called"] == [{"city": "Paris"}]
    assert sdk.reports_weather(answer["content"]), answer["content"]


@apis
def test_thoughts_come_before_the_answer(checks: Checks, api: str) -> None:
    answer = got(checks, api, "reasoning")
    assert answer["reasoning"]
    assert answer["told"] == answer["reasoning"]
    assert 6 <= answer["tokens"] <= 7
    Place(**answer["parsed"])
    if api == "responses":
        assert answer["types"] == ["reasoning", "message"]


def test_responses_are_kept_and_built_upon(checks: Checks) -> None:
    answer = got(checks, "responses", "create")
    france, japan = "The capital of France is Paris.", "The capital of Japan is Tokyo."
    assert answer["texts"] == [france, japan, france]
    assert answer["gone"] == 404


def test_what_runs_in_the_background_is_polled_or_cancelled(checks: Checks) -> None:
    polled = got(checks, "responses", "background")
    assert (polled["begun"], polled["ended"]) == ("queued", "completed")
    assert polled["content"] == "The capital of France is Paris."
    assert got(checks, "responses", "cancelled")["status"] == ["cancelled", "cancelled"]
