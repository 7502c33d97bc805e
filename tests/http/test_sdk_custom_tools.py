"""Custom tools with a real engine: their input is constrained token by token, in both APIs."""

import re
from typing import Any

import openai
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


def test_chat_completions_constrain_custom_tools(tiny: Sdk) -> None:
    grammar = {"syntax": "lark", "definition": QUOTED}
    format = {"type": "grammar", "grammar": grammar}
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": format}}]
    completion = tiny.client.chat.completions.create(
        model=tiny.model,
        messages=[{"role": "user", "content": "Patch it"}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        extra_body={"seed": 3},
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert MATCH.fullmatch(call.custom.input)


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


def test_a_grammar_that_cannot_be_applied_is_refused(tiny: Sdk) -> None:
    for definition in ("start: /a(?=b)/", "start: <think>", "start: other", "start: ("):
        with pytest.raises(openai.BadRequestError) as error:
            tiny.client.responses.create(
                model=tiny.model, input="Patch it", tools=[custom(definition)]
            )
        assert error.value.param == "tools[0].format.definition"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
        tiny.client.responses.create(
            model=tiny.model, input="Patch it", tools=[custom("a(?=b)", "regex")]
        )
