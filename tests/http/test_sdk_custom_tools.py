"""Custom tools with a real engine: their input is constrained token by token, in both APIs."""

import re
from typing import Any

import pytest

from tests.sdk import Sdk
from tests.unit.test_custom_input import APPLY_PATCH

# A short grammar with characters that JSON escapes.
QUOTED = 'start: "\\"" WORD "\\"" LF\nWORD: /[ab"]{2,4}/\n%import common.LF'
MATCH = re.compile(r'"[ab"]{2,4}"\n')


def custom(definition: str, syntax: str = "lark") -> Any:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "format": grammar}


@pytest.mark.parametrize(
    ("tool", "pattern"), [(custom(QUOTED), MATCH), (custom("[ab]{3}", "regex"), r"[ab]{3}")]
)
def test_the_input_of_a_named_custom_tool_matches_its_grammar(
    tiny: Sdk, tool: Any, pattern: Any
) -> None:
    response = tiny.client.responses.create(
        model=tiny.model,
        input="Patch it",
        tools=[tool],
        tool_choice={"type": "custom", "name": "patch"},
        temperature=1.0,
        extra_body={"seed": 3},
    )
    [item] = response.output
    assert item.type == "custom_tool_call"
    assert re.fullmatch(pattern, item.input), item.input


def test_the_grammar_of_apply_patch_is_applied(tiny: Sdk) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 1}}
    choices: list[Any] = ["auto", "required"]
    for choice in choices:
        response = tiny.client.responses.create(
            model=tiny.model,
            input="Patch it",
            tools=[custom(APPLY_PATCH)],
            tool_choice=choice,
            max_output_tokens=60,
            **sampled,
        )
    [item] = response.output
    assert item.type == "custom_tool_call"
    assert item.input.startswith("*** Begin Patch\n*** ")
