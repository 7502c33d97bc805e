"""Chat templates of real checkpoints, where they are present: outputs of such models are parsed as
intended, whatever the chunks, and their calls are rendered into the next prompt.

KNOWN_FAILURES lists the cases that are parsed differently, each with its reason.
"""

import json
import random
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from server.commands.template import end_of_turn
from tests.matrix import matrix
from tests.unit.test_history import answered, chat, results, tool
from worker.engines.generation.input_processor import response_parser, response_prefix
from worker.engines.generation.response_reader import (
    ParsedResponse,
    ResponseReader,
    parsed_response,
    sample_request,
)
from worker.messages.deltas import Delta, DeltaPart
from worker.messages.generation import Chat
from worker.text.chat_template.byte_tokenizer import byte_tokenizer
from worker.text.chat_template.template import RenderedPrompt
from worker.text.detokenizer import TextSpan
from worker.text.parser import OutputParser

REAL = Path(__file__).parents[3] / "shared" / "templates"
PATHS = {path.stem: path for path in sorted(REAL.rglob("*.jinja"))}
NAMES = sorted(PATHS)
pytestmark = pytest.mark.skipif(not NAMES, reason="no templates of real checkpoints here")

# ── outputs ──

AMBIGUOUS = "another case expects the opposite for the same text"
UNDELIMITED = "text without delimiters is content, though the model reasons by default"
# template: {the number of a case of the template: the reason}
KNOWN_FAILURES: dict[str, dict[int, str]] = {
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": {2: AMBIGUOUS},
    "GLM-4.6": {7: AMBIGUOUS},
    "google-gemma-4-31B-it": dict.fromkeys((24, 26, 34), AMBIGUOUS),
    "Cohere2MoE": {1: AMBIGUOUS},
    "Qwen-Qwen3-0.6B": dict.fromkeys((5, 6, 11, 12), UNDELIMITED),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": dict.fromkeys((5, 6), UNDELIMITED),
}


@cache
def cases() -> dict[str, list[dict[str, Any]]]:
    """Return the cases by template."""
    actual: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(REAL.rglob("cases.jsonl")):
        for line in path.read_text().splitlines():
            case = json.loads(line)
            actual.setdefault(case["template"], []).append(case)
    return actual


NUMBERED = [(name, number) for name, own in cases().items() for number in range(len(own))]
# One template of each kind of format; the default check reads the others' first cases too.
KINDS = [
    name
    for name in (
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GLM-4.6", "Kimi-K3", "LFM2.5-8B-A1B",
        "MiniMax-M3", "Mistral-Small-3.2-24B-Instruct-2506", "Qwen-Qwen3-0.6B", "Qwen3-Coder",
        "google-gemma-4-31B-it", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b",
    )
    if name in PATHS
]  # fmt: skip
KEPT = [(name, number) for name, number in NUMBERED if number < 1 + 3 * (name in KINDS)]


@cache
def reader(name: str, special: bool = False) -> ResponseReader:
    """`special`: delimiters are special tokens, else plain added ones."""
    return ResponseReader(byte_tokenizer(PATHS[name].read_text(), special), ())


def tools_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in case["tools"]]


def read_in_pieces(case: dict[str, Any], cuts: list[int]) -> ParsedResponse:
    template = reader(case["template"]).template
    request = sample_request(tools_of(case), case["thinking"])
    assert isinstance(request.prompt, Chat)
    prompt = template.render(request.prompt, request.tool_policy)
    prefix = response_prefix(request.prompt, prompt)
    parser = response_parser(request, prompt.output_format, prefix)
    text = case["output"]
    if parser is None:
        return ParsedResponse(text, "", [])
    chunks = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return parsed_response(parse(parser, chunks))


def parse(parser: OutputParser, chunks: Iterable[str]) -> Delta:
    delta = Delta(0)
    events = [event for span in chunks for event in parser.feed(TextSpan(span))]
    for kind, span, call in events + parser.finish():
        if kind == "reasoning_end":
            delta.end_reasoning()
        else:
            delta.add(kind, span.text, call)
    return delta


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def compared(actual: ParsedResponse, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the actual and the expected output, without surrounding white space, and without
    arguments that the case leaves open."""
    is_open = [arguments is None for _, arguments in case["calls"]]
    is_open += [False] * len(actual.calls)
    calls = [
        [name, None if unknown else parsed(arguments)]
        for (name, arguments), unknown in zip(actual.calls, is_open, strict=False)
    ]
    expected = [[name, arguments and parsed(arguments)] for name, arguments in case["calls"]]
    return (
        {"content": actual.content.strip(), "reasoning": actual.reasoning.strip(), "calls": calls},
        {key: case[key].strip() for key in ("content", "reasoning")} | {"calls": expected},
    )


def all_ways(case: dict[str, Any]) -> dict[str, ParsedResponse]:
    """Parse it whole, in random chunks, and byte by byte with delimiters of both kinds."""
    output, tools, thinking = case["output"], tools_of(case), case["thinking"]
    actual = {"whole": read_in_pieces(case, [])}
    rng = random.Random(0)
    for number in range(20):
        most = min(len(output), 12)
        cuts = sorted(rng.sample(range(len(output)), k=rng.randint(0, most)))
        actual[f"cut {number}"] = read_in_pieces(case, cuts)
    for kind, special in (("plain", False), ("special", True)):
        actual[f"{kind} marks"] = reader(case["template"], special).read(output, tools, thinking)
    return actual


@pytest.mark.parametrize(("name", "number"), matrix(NUMBERED, *KEPT))
def test_recorded_outputs_are_parsed_as_intended(name: str, number: int) -> None:
    case = cases()[name][number]
    why = KNOWN_FAILURES.get(name, {}).get(number)
    wrong = {}
    for way, actual in all_ways(case).items():
        was, expected = compared(actual, case)
        if was != expected:
            wrong[way] = was
    if why is None:
        assert not wrong, (case["output"], expected)
    else:
        assert wrong, "it is read as it is meant: take it out of KNOWN_FAILURES"


# ── calls rendered back ──

PLACE = {"city": {"type": "string"}, "floor": {"type": "integer"}}
LOOKUP = tool(
    "lookup",
    word={"type": "string", "description": "What"},
    times={"type": "integer", "description": "How often"},
    ratio={"type": "number", "description": "How much"},
    exact={"type": "boolean", "description": "Whether"},
    names={"type": "array", "items": {"type": "string"}, "description": "Who"},
    place={"type": "object", "properties": PLACE, "description": "Where"},
)
ASKED = {"role": "user", "content": "Well?"}
TYPED = {
    "word": 'Zürich "old" <town>\nO\'Hara x\\y',
    "times": 3,
    "ratio": 0.5,
    "exact": True,
    "names": ["a", "b c"],
    "place": {"city": "Łódź", "floor": -2},
}


def call(**arguments: Any) -> DeltaPart:
    return DeltaPart("call", json.dumps(arguments, ensure_ascii=False), "lookup")


ANSWERS: dict[str, list[DeltaPart]] = {
    "one call": [call(word="sun")],
    "typed arguments": [call(**TYPED)],
    "no arguments": [call()],
    "two calls": [call(word="sun", times=1), call(word="moon")],
    "text and a call": [DeltaPart("content", "Let me see."), call(word="sun")],
    "thoughts": [DeltaPart("reasoning", "They want the sun."), call(word="sun")],
}
# The end of a message with calls, where it differs from that of other messages.
ENDS = {
    "Cohere2MoE": "<|END_OF_TURN_TOKEN|>",
    "Kimi-K3": "<|end_of_msg|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|END_OF_TURN_TOKEN|>",
    "google-gemma-4-31B-it": "<|tool_response>",
    "meetkai-functionary-medium-v3.1": "<|eom_id|>",
    "openai-gpt-oss-120b": "<|call|>",
    "tool_chat_template_phi4_mini": "<|end|>",
    "tool_chat_template_toolace": "<|eot_id|>",
    "unsloth-Apriel-1.5": "<|end|>",
}
# (template, case): why the template's text does not determine the arguments.
UNQUOTED = "it writes strings without quotes, even with commas"
UNESCAPED = "it writes quotes within quotes"
LOSSY = {
    ("Apriel-1.6-15b-Thinker-fixed", "thoughts"): "it shows thoughts without what begins them",
    ("LFM2.5-8B-A1B", "typed arguments"): UNESCAPED,
    ("tool_chat_template_llama3.2_pythonic", "typed arguments"): UNQUOTED,
    ("tool_chat_template_toolace", "typed arguments"): UNQUOTED,
}


def prompted(name: str, messages: list[Any], **fields: Any) -> str:
    _, prompt = chat(messages, tools=[LOOKUP], **fields)
    return reader(name).template.render(prompt).text


def source_text(name: str, message: dict[str, Any]) -> tuple[str, str]:
    """Return a prompt, and the output for which the template renders this message: the template's
    own text, without the end of the message and without the prompt's tokens."""
    tokenizer: Any = reader(name).tokenizer
    _, prompt = chat([ASKED, message], tools=[LOOKUP])
    over = Chat(prompt.messages, prompt.tools, add_generation_prompt=False)
    after = tokenizer.tokenize(reader(name).template.render(over).text)
    before = tokenizer.tokenize(prompted(name, [ASKED]))
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    started, text = (
        tokenizer.convert_tokens_to_string(tokens) for tokens in (after[:same], after[same:])
    )
    for end in (ENDS.get(name), end_of_turn(reader(name).template.try_render)):
        text = text.partition(end)[0] if end else text
    return started, text


def shown_by(name: str, parts: list[DeltaPart]) -> bool:
    """Whether the template renders these parts in one message."""
    history = reader(name).template.history_format
    if history is None or history.calls_in_content:
        return False
    several = sum(part.kind == "call" for part in parts) > 1
    return not (several and history.one_call)


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, str) and value.isalnum() else []


@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_tool_without_descriptions_is_rendered(name: str) -> None:
    template, bare = reader(name).template, {"type": "function", "function": {"name": "clock"}}
    assert "clock" in template.render(Chat((ASKED,), (bare,))).text


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", matrix(NAMES, *KINDS))
def test_generated_calls_are_parsed_and_rendered_back(name: str, answer: str) -> None:
    parts = ANSWERS[answer]
    if not shown_by(name, parts):
        pytest.skip("the template cannot show it in one turn")
    if why := LOSSY.get((name, answer)):
        pytest.skip(why)
    template = reader(name).template
    sent = answered(template, [ASKED], *parts)
    started, text = source_text(name, sent)
    if "lookup" not in text:
        pytest.skip("the template shows it in several turns")
    calls = [part for part in parts if part.kind == "call"]

    request = sample_request([LOOKUP], None)
    assert isinstance(request.prompt, Chat)
    rendered = RenderedPrompt(started, template.output_format_for(request.tool_policy))
    prefix = response_prefix(request.prompt, rendered)
    parser = response_parser(request, rendered.output_format, prefix)
    assert parser is not None
    delta = parse(parser, text)
    actual = parsed_response(delta)
    for kind, was in (("content", actual.content), ("reasoning", actual.reasoning)):
        expected = "".join(part.text for part in parts if part.kind == kind)
        assert was.strip() == (expected if expected in text else ""), text
    assert [[item, json.loads(arguments)] for item, arguments in actual.calls] == [
        [part.name, json.loads(part.text)] for part in calls
    ], text

    again = answered(template, [ASKED], *delta.parts)
    for one, other in zip(again["tool_calls"], sent["tool_calls"], strict=True):
        one["id"] = other["id"]
    told_results = [f"result{char}" for char, _ in zip("αβ", calls, strict=False)]
    messages = [ASKED, again, *results(again, *told_results)]
    prompt = prompted(name, messages)
    bare = prompted(name, [ASKED])
    assert prompt.count("lookup") >= bare.count("lookup") + len(calls)
    for result in told_results:
        assert prompt.count(result) == 1
    for part in calls:
        for leaf in leaves(json.loads(part.text)):
            assert leaf in prompt
    assert prompted(name, [ASKED, sent, *results(sent, *told_results)]) == prompt
