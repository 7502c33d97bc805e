"""Calls in every format of templates, generated with random weights: required calls match their
tools, and so do calls that the model starts itself."""

from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from tests.call_formats import HEAD, NAMES, TAIL, delimiters, loop
from tests.generating import load, serve
from tests.matrix import matrix
from tests.tiny import for_tokenizer, hf
from tests.tiny_chat import asking, calls_of, tokenizer
from worker.engines.generation.engine import GenerationEngine
from worker.messages.generation import Sampling, ToolCallPolicy

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "warm": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
TOOLS = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": "any", "parameters": PARAMETERS},
    }
    for name in ("weather", "travel")
)
# Those with delimiters, which may be tokens.
FORMS = [name for name in [*NAMES, "hermes"] if delimiters(name)]


@cache
def engine(name: str, special: bool) -> GenerationEngine:
    """`special`: delimiters are special tokens."""
    result = tokenizer(HEAD + loop(name) + TAIL, ["<think>", "</think>"])
    tokens = [hf.AddedToken(text, normalized=False, special=special) for text in delimiters(name)]
    result.add_tokens(tokens, special_tokens=special)
    return load(for_tokenizer(f"form-{name}-{special}", result))


def opening(result: GenerationEngine, name: str, seed: int) -> Sampling:
    """Bias the token that starts a call."""
    delimiter = "<call>" if name == "section" else delimiters(name)[0]
    token: Any = result.runner.language.tokenizer.convert_tokens_to_ids(delimiter)
    return Sampling(temperature=1.0, seed=seed, logit_bias={token: 20.0})


@pytest.mark.parametrize("special", matrix([False, True], True))
@pytest.mark.parametrize("name", FORMS)
def test_required_calls_are_in_the_models_format(name: str, special: bool) -> None:
    result = engine(name, special)
    assert result.input_processor.template.notes == []
    calls = ToolCallPolicy(("weather", "travel"), required=True)
    requests = [
        asking(
            sampling=Sampling(temperature=1.0, seed=seed),
            tools=TOOLS,
            tool_policy=calls,
            thinking_tokens=2,
        )
        for seed in range(4)
    ]
    ended = 0
    for served in serve(result, requests)[0]:
        [choice] = served.choices
        if choice.finish_reason == "length":
            continue
        ended += 1
        assert choice.finish_reason == "tool_calls"
        assert {part.kind for part in choice.parts} - {"reasoning"} == {"call"}
        for called_name, arguments in calls_of(choice):
            assert called_name in ("weather", "travel")
            assert jsonschema_rs.is_valid(PARAMETERS, arguments)
        text = result.text_model.decode(list(served.ids[0]))
        assert delimiters(name)[0] in text
    assert ended


@pytest.mark.parametrize("special", matrix([False, True], True))
@pytest.mark.parametrize("name", FORMS)
def test_call_that_the_model_starts_is_constrained_by_its_tool(name: str, special: bool) -> None:
    result = engine(name, special)
    requests = [
        asking(
            sampling=opening(result, name, seed),
            tools=TOOLS,
            tool_policy=ToolCallPolicy(("weather",), parallel=False),
        )
        for seed in range(5)
    ]
    matched = 0
    for served in serve(result, requests)[0]:
        [choice] = served.choices
        if choice.finish_reason == "length":
            continue
        [(called_name, arguments)] = calls_of(choice)
        assert called_name == "weather"
        assert jsonschema_rs.is_valid(PARAMETERS, arguments)
        matched += 1
    assert matched > 1
