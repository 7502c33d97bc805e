"""Prompts of an agent's conversation only grow: a turn computes its new tokens and at most a block,
and what the chat template itself rewrites of the turn before.

Chat templates of real checkpoints render twelve turns with tools, where they are present. The
prefix cache keeps whole blocks of the last prompt and of the output after it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

import pytest

from tests.matrix import matrix
from tests.unit.test_history import chat
from tests.unit.test_template_outputs import KINDS, LOOKUP, PATHS, reader

pytestmark = pytest.mark.skipif(not PATHS, reason="no templates of real checkpoints here")
BLOCK = 16
QUESTIONS, OUTPUTS = 3, 4  # outputs for each question: calls and an answer
NO_TOOLS = {"google-gemma-2-2b-it"}
NO_SYSTEM = {"tool_chat_template_granite_20b_fc"}  # it refuses them everywhere, also the first
NAMES = sorted({*PATHS} - NO_TOOLS)
# They write the tools before the last user's message.
MOVING_TOOLS = {"mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"}
# They write outputs otherwise than their prompt begins them, or drop the reasoning of an output, or
# of a question's outputs with the next question.
REWRITING = {
    "Apertus-8B-Instruct", "Apriel-1.6-15b-Thinker-fixed",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GLM-4.6", "LFM2.5-8B-A1B", "MiniMax-M2",
    "NVIDIA-Nemotron-Nano-v2", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-QwQ-32B",
    "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.2",
    "google-gemma-4-31B-it", "llama-cpp-deepseek-r1", "openai-gpt-oss-120b",
    "tool_chat_template_granite_20b_fc", "tool_chat_template_toolace", "unsloth-Apriel-1.5",
}  # fmt: skip


class Turn(NamedTuple):
    """Numbers of tokens. `lost`: those of the last prompt and output that the prompt does not
    repeat; `computed`: those of the prompt that the cache does not have; `output`: those of the
    last output; `since_question`: those of the outputs and results since the last question."""

    is_question: bool
    prompt: int
    computed: int
    lost: int
    output: int
    since_question: int


def conversation(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield each request's messages, and the output that follows."""
    system = name not in NO_SYSTEM
    messages: list[Any] = [{"role": "system", "content": "You repair programs."}] if system else []
    numbers = iter(range(1, QUESTIONS * OUTPUTS + 1))
    for question in range(QUESTIONS):
        if question and system:
            clock = {"role": "system", "content": f"It is {question} o'clock."}
            messages = [*messages, clock]
        messages = [*messages, {"role": "user", "content": f"Repair the file number {question}."}]
        for number in (next(numbers) for _ in range(OUTPUTS - 1)):
            arguments = json.dumps({"word": f"part {number}", "times": number})
            call = {"function": {"name": "lookup", "arguments": arguments}, "type": "function"}
            call["id"] = f"call{number:05}"
            output = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield messages, output | reasoning(name, number)
            result = {"role": "tool", "tool_call_id": call["id"]}
            result["content"] = f"The text of part {number}."
            messages = [*messages, output | reasoning(name, number), result]
        number = next(numbers)
        output = {"role": "assistant", "content": f"File {question} is repaired."}
        yield messages, output | reasoning(name, number)
        messages = [*messages, output | reasoning(name, number)]


def reasoning(name: str, number: int) -> dict[str, str]:
    """Return the reasoning of an output as the parser returns it; none if the prompt closes it."""
    template = reader(name).template
    prompt = template.render(chat([{"role": "user", "content": "?"}], tools=[LOOKUP])[1]).text
    output_format = template.output_format
    if output_format.reasoning and prompt.rstrip().endswith(output_format.reasoning[1].strip()):
        return {}
    text = f"{output_format.lead_in}\n" if output_format.lead_in else ""
    return {"reasoning_content": f"{text}Part {number} may be wrong."}


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def token_ids(name: str, messages: list[Any], **fields: Any) -> list[int]:
    _, prompt = chat(messages, tools=[LOOKUP], **fields)
    encode: Any = reader(name).tokenizer
    ids: list[int] = encode(reader(name).template.render(prompt).text)["input_ids"]
    return ids


@cache
def replay(name: str) -> list[Turn]:
    turns: list[Turn] = []
    cached: list[int] = []  # the last prompt and output
    output = asked = 0
    for messages, message in conversation(name):
        prompt, is_question = token_ids(name, messages), messages[-1]["role"] != "tool"
        if cached:
            same, since = common(prompt, cached), len(cached) - asked
            computed = len(prompt) - same // BLOCK * BLOCK
            lost = len(cached) - same
            turns.append(Turn(is_question, len(prompt), computed, lost, output, since))
        asked = len(prompt) if is_question else asked
        whole = token_ids(name, [*messages, message], add_generation_prompt=False)
        written = whole[common(whole, prompt) :]
        cached, output = prompt + written, len(written)
    return turns


@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_only_the_last_turn_is_computed_again(name: str) -> None:
    turns, encode = replay(name), reader(name).tokenizer.encode
    assert len(turns) == QUESTIONS * OUTPUTS - 1
    moved = len(encode(json.dumps(LOOKUP))) + 4 * BLOCK if name in MOVING_TOOLS else 0
    for turn in turns:
        rewritten = turn.since_question if turn.is_question else turn.output
        header = 2 * BLOCK  # the end of the prompt, which begins an output
        assert turn.lost <= rewritten + header + moved, turn


@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_turn_computes_its_new_tokens_and_a_block(name: str) -> None:
    # White space at the end of an output may be lost.
    keeps_all = all(turn.lost <= 1 for turn in replay(name))
    assert keeps_all == (name not in REWRITING | MOVING_TOOLS)


@pytest.mark.parametrize("effort", [None, "none", "high"])
@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_the_part_that_the_next_prompt_repeats_is_known(name: str, effort: str | None) -> None:
    """States of recurrent layers are kept at its end."""
    if name in MOVING_TOOLS:
        pytest.skip("its prompts are written anew")
    template, encode = reader(name).template, reader(name).tokenizer.encode
    before, history_len = list[int](), 0
    for messages, _ in conversation(name):
        rendered = template.render(replace(chat(messages, tools=[LOOKUP])[1], effort=effort))
        ids = encode(rendered.text, add_special_tokens=False)
        if messages[-1]["role"] == "tool" or name not in REWRITING:
            assert common(before, ids) >= history_len
        before, history_len = ids, template.history_len(rendered, ids)
        assert len(ids) - history_len <= 2 * BLOCK
