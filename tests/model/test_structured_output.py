"""Grammars and tools constrain the outputs of an engine whose model has random weights."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from batching.errors import InvalidInput
from tests import tiny_chat
from tests.generating import Driver, Request, Served, prepare, serve, when_ready
from tests.tiny_chat import calls_of, engine
from worker.backends.cached_runner import CachedRunner
from worker.engines.generation import engine as engine_module
from worker.engines.generation.loading import cached_engine
from worker.messages.generation import Constraint, Sampling, ToolCallPolicy
from worker.model.language_model import GeneratorOptions, load_language_model


def asking(*arguments: Any, **fields: Any) -> Request:
    """Ask without reasoning, unless the fields are about it."""
    if not {"effort", "variables", "thinking_tokens"} & fields.keys():
        fields["effort"] = "none"
    return tiny_chat.asking(*arguments, **fields)


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "n": {"type": "integer", "minimum": -3, "maximum": 40},
            "kind": {"enum": ["a", "bc", 7, None]},
        },
        "required": ["city", "n", "kind"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
        "properties": {
            "points": {
                "type": "array",
                "items": {"$ref": "#/$defs/point"},
                "minItems": 2,
                "maxItems": 3,
            },
            "one": {"anyOf": [{"$ref": "#/$defs/point"}, {"const": "none"}]},
        },
        "required": ["points", "one"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "minItems": 1,
        "maxItems": 4,
    },
}
FORMS = {
    "regex": Constraint("regex", "[A-Z]{2}-[0-9]{3}", "structured_outputs.regex"),
    "choice": Constraint("choice", ["Paris", "Rome", "Paradise"], "structured_outputs.choice"),
    "grammar": Constraint("grammar", 'start: "<" ("a" | "b"){2,4} ">"', "g"),
    "gbnf": Constraint("grammar", 'root ::= "<" ("a" | "b") ">"', "g"),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["c", "f"]},
                "where": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                    "required": ["x"],
                },
            },
            "required": ["city", "unit", "where"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = (WEATHER, CLOCK)
NAMES = ("get_weather", "clock")
BUSY = Sampling(
    temperature=0.9, top_p=0.9, seed=5, presence_penalty=0.3, repetition_penalty=1.1, logprobs=2
)


def schema(name: str) -> Constraint:
    return Constraint("json_schema", SCHEMAS[name], "response_format")


def together(items: Sequence[Request], **options: Any) -> list[Served]:
    served, _ = serve(engine(**options), items)
    return served


def alone(item: Request, **options: Any) -> Served:
    [served] = together([item], **options)
    return served


def assert_of_tools(calls: Sequence[tuple[str, Any]]) -> None:
    assert calls
    for name, arguments in calls:
        if name == "clock":
            assert arguments == {}
        else:
            assert jsonschema_rs.is_valid(WEATHER["function"]["parameters"], arguments)  # type: ignore[index]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("name", SCHEMAS)
def test_document_is_valid_and_compact(name: str) -> None:
    items = [
        asking(sampling=Sampling(temperature=1.2, seed=seed), constraint=schema(name))
        for seed in range(8)
    ]
    served, _ = serve(engine(), items, seed=0)
    for item in served:
        [choice] = item.choices
        assert choice.finish_reason == "stop"
        document = json.loads(choice.text)
        assert jsonschema_rs.is_valid(SCHEMAS[name], document), choice.text
        assert not re.search(r"[{\[,:]\s|\s[}\],:]", re.sub(r'"(\\.|[^"\\])*"', "", choice.text))


@pytest.mark.parametrize("form", FORMS)
def test_regex_choice_and_grammar_constrain(form: str) -> None:
    patterns = {
        "regex": "[A-Z]{2}-[0-9]{3}",
        "choice": "Paris|Rome|Paradise",
        "grammar": "<[ab]{2,4}>",
        "gbnf": "<[ab]>",
    }
    texts = set()
    drawn = [Sampling(temperature=1.5, seed=seed) for seed in range(5)]
    for served in together(
        [asking(sampling=sampling, constraint=FORMS[form]) for sampling in drawn]
    ):
        [choice] = served.choices
        assert choice.finish_reason == "stop"
        assert re.fullmatch(patterns[form], choice.text)
        texts.add(choice.text)
    assert len(texts) > 1  # sampling still varies


@pytest.mark.usefixtures("steps")
def test_speculation_does_not_change_the_output() -> None:
    def outputs(speculation: str) -> list[tuple[str, list[int]]]:
        items = [asking(sampling=s, constraint=schema(n)) for n in SCHEMAS for s in (BUSY, greedy)]
        items += [
            asking(sampling=s, tools=TOOLS, tool_policy=ToolCallPolicy(NAMES, required=True))
            for s in (BUSY, greedy)
        ]
        results = together(items, speculation=speculation)
        return [(served.choices[0].text, served.ids[0]) for served in results]

    greedy = Sampling(temperature=0.0)
    assert outputs("auto") == outputs("off")


def test_forced_tokens_take_few_steps() -> None:
    long = "a name that is quite long and known in advance"
    fixed = {
        "type": "object",
        "properties": {long: {"type": "boolean"}},
        "required": [long],
        "additionalProperties": False,
    }
    item = asking(constraint=Constraint("json_schema", fixed, "x"))
    [served], driver = serve(engine(), [item])
    assert len(driver.reports) < len(served.ids[0]) / 3
    assert json.loads(served.choices[0].text).keys() == {long}


@pytest.mark.usefixtures("steps")
def test_requests_of_a_batch_do_not_affect_each_other() -> None:
    """Constrained and free requests share steps: each output is as alone, preempted or not."""

    def requests() -> list[Request]:
        return [
            asking("one", BUSY, 60, constraint=schema("flat")),
            asking("two", BUSY, 60),
            asking("three", BUSY, 60, constraint=FORMS["regex"]),
            asking("four", Sampling(temperature=0.0), 60),
            asking(
                "five",
                BUSY,
                120,
                tools=TOOLS,
                tool_policy=ToolCallPolicy(NAMES, required=True),
            ),
            asking("six", BUSY, 60, tools=TOOLS, tool_policy=ToolCallPolicy(NAMES), n=3),
        ]

    alones = [alone(item) for item in requests()]
    together, driver = serve(engine(blocks=16), requests(), seed=3)
    assert driver.total("preempted") > 0
    for one, other in zip(alones, together, strict=True):
        assert one.ids == other.ids
        assert [c.parts for c in one.choices] == [c.parts for c in other.choices]


def free(seed: int) -> Request:
    hot = Sampling(temperature=1.5, seed=seed)
    return asking(str(seed), hot, max_tokens=40, stopping={"ignore_eos": True})


def test_a_grammar_does_not_stop_steps_ahead_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def requests() -> list[Request]:
        return [*map(free, range(8)), asking("two", BUSY, 40, constraint=schema("flat"))]

    expected = [served.ids for served in together(requests())]
    monkeypatch.setitem(engine_module.RUNS_AHEAD, "cpu", True)
    driver = Driver(engine())
    served = [driver.add(item) for item in requests()]
    steps = ahead = 0
    while driver.generator.busy:
        driver.step()
        steps, ahead = steps + 1, ahead + (driver.generator._in_flight is not None)
    assert [one.ids for one in served] == expected
    assert ahead > 0.8 * steps


def test_alone_a_grammar_drafts_instead_of_running_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_module.RUNS_AHEAD, "cpu", True)
    [served], driver = serve(engine(), [asking(constraint=schema("nested"))])
    assert jsonschema_rs.is_valid(SCHEMAS["nested"], json.loads(served.choices[0].text))
    assert driver.total("drafted") > 20


def test_logprobs_are_of_the_unmasked_distribution() -> None:
    served = alone(asking(sampling=BUSY, constraint=schema("flat")))
    [choice] = served.choices
    assert "".join(entry.text for entry in choice.logprobs) == choice.text
    banned = [e for e in choice.logprobs if e.token_id not in {t.token_id for t in e.top}]
    assert banned  # the likeliest tokens were mostly masked, and are reported all the same


@pytest.mark.usefixtures("steps")
def test_logprobs_cover_the_content() -> None:
    sampling = Sampling(temperature=1.0, logprobs=0, logit_bias=opening_call(0).logit_bias)
    items = [
        asking(
            sampling=replace(sampling, seed=seed),
            tools=TOOLS,
            tool_policy=ToolCallPolicy(NAMES),
            variables={"thinking_begun": seed % 2 == 0},
            thinking_tokens=4,
            max_tokens=120,
            stopping={"stop": ("e",)} if seed > 3 else {},
        )
        for seed in range(6)
    ]
    for served in together(items):
        [choice] = served.choices
        assert "".join(entry.text for entry in choice.logprobs) == choice.text


def test_min_tokens_and_ignore_eos_keep_a_document_valid() -> None:
    stopping = {"min_tokens": 200, "ignore_eos": True}
    [choice] = alone(asking(constraint=schema("flat"), stopping=stopping)).choices
    assert jsonschema_rs.is_valid(SCHEMAS["flat"], json.loads(choice.text))
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("json_schema", {"type": "foo"}, "f"), "foo"),
        (Constraint("json_schema", {"$ref": "#/$defs/none"}, "f"), "none"),
        (Constraint("json_schema", {"not": {"type": "string"}}, "f"), "not"),
        (Constraint("json_schema", ["no", "schema"], "f"), "object"),
        (Constraint("regex", "a(", "f"), "unclosed group"),
        (Constraint("json_schema", {"$ref": "#"}, "f"), "no text matches"),
        (Constraint("json_schema", False, "f"), "object"),
        (Constraint("grammar", "start: UNKNOWN", "f"), "UNKNOWN"),
    ],
)
def test_invalid_constraints_are_errors_with_the_reason(constraint: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        prepare(engine(), asking(constraint=constraint))
    assert caught.value.param == "f"
    assert len(str(caught.value)) < 1000


def chain(length: int) -> dict[str, Any]:
    """Return a schema with a chain of references."""
    links: dict[str, Any] = {
        f"a{n}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}},
            "required": ["x"],
            "additionalProperties": False,
        }
        for n in range(length)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", chain(1500), "f"),
        Constraint("grammar", "\n".join(
            ["start: a0", *(f'a{n}: "x" a{n + 1}' for n in range(5000)), 'a5000: "y"']
        ), "f"),
    ],
)  # fmt: skip
def test_long_chain_of_references_compiles_or_fails_cleanly(constraint: Constraint) -> None:
    item = asking(constraint=constraint, max_tokens=5)
    with contextlib.suppress(InvalidInput):  # if it is too long for llguidance
        [choice] = alone(item).choices
        assert choice.finish_reason == "length"


def test_oversized_tools_are_unconstrained_or_an_error() -> None:
    tool = {"type": "function", "function": {"name": "t", "parameters": chain(15_000)}}
    item = asking(tools=(tool,), tool_policy=ToolCallPolicy(("t",)), max_tokens=3)
    assert alone(item).choices[0].tokens  # served without a grammar
    with pytest.raises(InvalidInput, match="more than") as caught:
        prepare(engine(), asking(tools=(tool,), tool_policy=ToolCallPolicy(("t",), required=True)))
    assert caught.value.param == "tools[0]"


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("choice", [f"x{n}" for n in range(100_000)], "f"),
        Constraint("regex", "a" * 60_000, "f"),
        Constraint("json_schema", {"enum": ["x" * 1_000_000]}, "f"),
        Constraint("grammar", 'root ::= "a', "f"),
        Constraint("grammar", "root ::= " + "(" * 5000, "f"),
    ],
)
def test_oversized_constraints_are_short_errors(constraint: Constraint) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare(engine(), asking(constraint=constraint))
    assert caught.value.param == "f"
    assert len(str(caught.value)) < 700
    assert "backtrace" not in str(caught.value)


@pytest.mark.parametrize("text", ["</s>", "<tool_call>", "a<think>b", "x/y", 'tab\t\x7f "q" é'])
def test_any_text_can_be_required(text: str) -> None:
    [choice] = alone(asking(constraint=Constraint("choice", [text], "f"))).choices
    assert choice.text == text
    schema = {"const": {"a": text.replace("\x7f", "")}}
    [choice] = alone(asking(constraint=Constraint("json_schema", schema, "f"))).choices
    assert json.loads(choice.text) == schema["const"]
    pattern = Constraint("regex", re.escape(text), "f")
    [choice] = alone(asking(constraint=pattern)).choices
    assert choice.text == text


def test_often_used_grammar_is_recompiled() -> None:
    grammars = engine().input_processor.constraint_builder.grammars
    constraint = Constraint("regex", "(a|b)*a(a|b){9}c", "f")
    compiled = {id(when_ready(lambda: grammars.compile_constraint(constraint))) for _ in range(450)}
    assert 2 <= len(compiled) <= 3


def test_many_optional_properties_can_be_generated() -> None:
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"type": "boolean"} for n in range(700)},
        "additionalProperties": False,
    }
    item = asking(constraint=Constraint("json_schema", schema, "f"), max_tokens=30)
    assert alone(item).choices[0].tokens > 1


POINT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            {"type": "object", "properties": {"p": POINT}, "required": ["p"]},
            r'{"p":{"x":(true|false)}}',
        ),
        ({"$defs": {"p": POINT}, "anyOf": [{"$ref": "#/$defs/p"}]}, r'{"x":(true|false)}'),
        (
            {"allOf": [POINT, {"properties": {"y": {"const": 1}}, "required": ["y"]}]},
            r'{"x":(true|false),"y":1.*',
        ),
        (
            {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": POINT}, "required": ["y"]},
            r'{"(x|y)".*',
        ),
        ({"type": "object", "required": ["y"], "properties": {"x": {"const": 1}}}, r'{"(x|y)":.*'),
    ],
)
def test_properties_that_are_not_declared_are_not_written(schema: Any, texts: str) -> None:
    for seed in range(4):
        sampling = Sampling(temperature=1.5, seed=seed)
        item = asking(sampling=sampling, constraint=Constraint("json_schema", schema, "f"))
        [choice] = alone(item).choices
        assert re.fullmatch(texts, choice.text, re.DOTALL), choice.text


def test_captures_in_a_grammar_change_nothing() -> None:
    text = 'start: "I pick " c " " n\nc[capture]: "red" | "blue"\nn[capture="m"]: /[0-9]{2}/'
    [choice] = alone(asking(constraint=Constraint("grammar", text, "g"))).choices
    assert re.fullmatch(r"I pick (red|blue) \d\d", choice.text)


def test_one_of_constrains_and_client_options_are_ignored() -> None:
    schema = {
        "x-guidance": {"whitespace_pattern": " +", "foo": 1},
        "oneOf": [{"const": {"a": [1, 2]}}, {"const": {"a": [3, 4]}}],
    }
    [choice] = alone(asking(constraint=Constraint("json_schema", schema, "f"))).choices
    assert choice.text in ('{"a":[1,2]}', '{"a":[3,4]}')


def test_stop_tokens_and_min_tokens_leave_an_allowed_token() -> None:
    char = tiny_chat.tokenizer().encode("A", add_special_tokens=False)
    stopping = {"stop_token_ids": tuple(char), "min_tokens": 3}
    constraint = Constraint("choice", ["A"], "f")
    [choice] = alone(asking(constraint=constraint, stopping=stopping)).choices
    assert choice.finish_reason == "stop"


def test_unknown_format_is_an_annotation() -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "base64", "maxLength": 3},
            "day": {"type": "string", "format": "date"},
            "kind": {"const": {"format": "base64"}},
        },
        "required": ["format", "day", "kind"],
        "additionalProperties": False,
    }
    [choice] = alone(asking(constraint=Constraint("json_schema", schema, "f"))).choices
    document = json.loads(choice.text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["day"])
    assert document["kind"] == {"format": "base64"}


def with_property(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    properties = {"properties": {name: schema}, "required": [name]}
    return {"type": "object", **properties, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"not": {}}, {"const": 3}]},
        {"type": "array", "items": {"not": {}}},
        with_property("k", {"const": 3}) | {"propertyNames": {"type": "string"}},
    ],
)
def test_schemas_that_zod_writes_constrain_documents_and_strict_calls(
    schema: dict[str, Any],
) -> None:
    parameters = with_property("v", schema)
    function = {"name": "t", "strict": True, "parameters": parameters}
    calls = ToolCallPolicy(("t",), required=True, parallel=False)
    strict = asking(tools=({"type": "function", "function": function},), tool_policy=calls)
    document = asking(constraint=Constraint("json_schema", parameters, "f"))
    for item in (document, strict):
        [choice] = alone(item).choices
        assert jsonschema_rs.is_valid(parameters, json.loads(choice.parts[-1].text))


def test_error_names_the_tool_that_cannot_be_compiled() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(foo"}}}
    broken = {"type": "function", "function": {"name": "b", "parameters": parameters}}
    calls = ToolCallPolicy(("clock", "b"), required=True)
    with pytest.raises(InvalidInput, match="foo") as caught:
        prepare(engine(), asking(tools=(CLOCK, broken), tool_policy=calls))
    assert caught.value.param == "tools[1]"
    assert "start" not in str(caught.value)  # no part of the generated grammar
    prepare(engine(), asking(tools=(CLOCK, broken), tool_policy=ToolCallPolicy(("clock", "b"))))


# ── tools ──


def test_required_calls_are_made() -> None:
    line_break = {tiny_chat.tokenizer().encode("\n", add_special_tokens=False)[0]: 3.0}
    items = [
        asking(
            sampling=Sampling(temperature=1.0, seed=seed, logit_bias=line_break),
            tools=TOOLS,
            tool_policy=ToolCallPolicy(NAMES, required=True),
        )
        for seed in range(30)
    ]
    served, _ = serve(engine(), items, seed=1)
    counted: Counter[int] = Counter()
    for item in served:
        if item.choices[0].finish_reason == "length":
            continue
        calls = calls_of(item.choices[0])
        assert_of_tools(calls)
        counted[len(calls)] += 1
        assert item.choices[0].finish_reason == "tool_calls"
        assert {part.kind for part in item.choices[0].parts} == {"call"}
    assert max(counted) > 1  # their number is free


def opening_call(seed: int) -> Sampling:
    """Return sampling with which the model starts a call at some point, and ends."""
    delimiter, end = tiny_chat.tokenizer().convert_tokens_to_ids(["<tool_call>", "</s>"])
    return Sampling(temperature=1.0, seed=seed, logit_bias={delimiter: 2.5, end: 1.5})


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"const": 1}}, "allOf": [{"required": ["b"]}]},
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]},
        {"type": ["object", "null"], "properties": {"a": {"const": 1}}},
        {"type": "string"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {}}}},
    ],
)
def test_tools_of_any_schema_take_objects(parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    calls = ToolCallPolicy(("t",), required=True, parallel=False)
    item = asking(tools=(tool,), tool_policy=calls, max_tokens=400, sampling=Sampling(seed=3))
    served = alone(item)
    if served.choices[0].finish_reason == "tool_calls":
        [(name, arguments)] = calls_of(served.choices[0])
        assert name == "t"
        assert isinstance(arguments, dict)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "integer", "not": {"const": 3}},
        {"type": "string", "format": "colour"},
        {"type": "string", "pattern": "(?=a)b"},
    ],
)
@pytest.mark.parametrize("required", [False, True])
def test_strict_tool_with_a_keyword_that_cannot_be_applied_is_refused(
    value: dict[str, Any], required: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": value}}
    function = {"name": "t", "parameters": parameters}
    calls = ToolCallPolicy((*NAMES, "t"), required=required)
    for strict in (True, False):
        tool = {"type": "function", "function": {**function, "strict": strict}}
        item = asking(tools=(*TOOLS, tool), tool_policy=calls, max_tokens=5)
        if strict or (required and "pattern" in value):  # required calls need a grammar
            with pytest.raises(InvalidInput, match=r"tools\[2\]: cannot be compiled") as error:
                alone(item)
            assert error.value.param == "tools[2]"
        else:
            assert alone(item).choices[0].finish_reason


def test_keywords_without_a_meaning_are_ignored_in_strict_tools() -> None:
    parameters = {"type": "object", "x-order": 1, "properties": {"a": {"type": "null", "ui": {}}}}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters, "strict": True}}
    item = asking(tools=(tool,), tool_policy=ToolCallPolicy(("t",)), max_tokens=5)
    assert alone(item).choices[0].finish_reason


@pytest.mark.parametrize("stop", [(">>>",), ("}}}", "\n\n\n")])
def test_stop_strings_do_not_end_calls(stop: tuple[str, ...]) -> None:
    """They are searched in content alone, and delay no delimiters."""
    document = {"constraint": schema("flat"), "variables": {"thinking_begun": True}}
    requests: list[dict[str, Any]] = [
        {**document, "sampling": closing(1), "thinking_tokens": 9},
        {"sampling": opening_call(1), "tools": TOOLS, "tool_policy": ToolCallPolicy(NAMES)},
        {"tools": TOOLS, "tool_policy": ToolCallPolicy(NAMES, required=True)},
    ]
    without = together([asking(**fields) for fields in requests])
    stopped = together([asking(**fields, stopping={"stop": stop}) for fields in requests])
    for one, other in zip(stopped, without, strict=True):
        assert one.ids == other.ids
        assert one.choices[0].parts == other.choices[0].parts


# ── reasoning ──


def closing(seed: int, more: float = 1.5) -> Sampling:
    delimiter = tiny_chat.tokenizer().convert_tokens_to_ids("</think>")
    return Sampling(temperature=1.0, seed=seed, logit_bias={delimiter: more})


@pytest.mark.parametrize("effort", ["high", None])
@pytest.mark.parametrize("answer", ["document", "call"])
def test_model_may_open_its_reasoning_before_its_answer(answer: str, effort: str | None) -> None:
    """As its template does by default. The schema binds the answer alone."""
    opens = tiny_chat.tokenizer().convert_tokens_to_ids("<think>")
    fields: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0, seed=1, logit_bias={opens: 20.0}),
        "constraint": schema("flat") if answer == "document" else None,
        "tools": TOOLS,
        "tool_policy": None if answer == "document" else ToolCallPolicy(NAMES, required=True),
    }
    kind = "content" if answer == "document" else "call"
    [choice] = alone(asking(**fields, effort=effort, thinking_tokens=5)).choices
    assert choice.reasoning_tokens == 6  # and the token that ends it
    assert {part.kind for part in choice.parts} - {"reasoning"} == {kind}
    assert "</think>" not in choice.text
    if answer == "document":
        assert jsonschema_rs.is_valid(SCHEMAS["flat"], json.loads(choice.text))
    for off in ({"effort": "none"}, {"variables": {"enable_thinking": False}}):
        [choice] = alone(asking(**fields, **off)).choices
        assert {part.kind for part in choice.parts} == {kind}
        assert choice.reasoning_tokens == 0


def test_budget_is_an_error_for_a_model_without_reasoning() -> None:
    with pytest.raises(InvalidInput, match="thinking_token_budget"):
        prepare(tiny_chat.plain_engine(), asking(max_tokens=9, thinking_tokens=3))
    plain = [asking(max_tokens=9, effort=effort) for effort in (None, "none", "high")]
    for item in plain:  # clients send it to any model
        prepare(tiny_chat.plain_engine(), item)
    assert len({tuple(item.prepared[0].prepared.ids) for item in plain}) == 1


def test_cached_runner_constrains_too() -> None:
    language = load_language_model(tiny_chat.options())
    generator = cached_engine(CachedRunner(language), GeneratorOptions(""), "asked to")
    served, _ = serve(generator, both())
    paged = [alone(item) for item in both()]
    assert [one.choices[0].parts for one in served] == [one.choices[0].parts for one in paged]


def both() -> list[Request]:
    return [
        asking("a", BUSY, constraint=schema("flat")),
        asking("b", BUSY, 40),
        asking(
            "c",
            BUSY,
            tools=TOOLS,
            tool_policy=ToolCallPolicy(NAMES, required=True, parallel=False),
        ),
    ]


@pytest.mark.parametrize(
    "branches", [[{"type": "integer"}, {"type": "number"}], [{"const": 1}] * 2]
)
def test_branches_of_one_of_may_overlap(branches: list[Any]) -> None:
    schema = {"type": "array", "items": {"oneOf": branches}, "minItems": 1, "maxItems": 1}
    served = alone(asking(constraint=Constraint("json_schema", schema, "f"), max_tokens=40))
    [item] = json.loads(served.choices[0].text)
    assert isinstance(item, (int, float))


@pytest.mark.parametrize("required", [False, True])
def test_an_endless_document_ends_with_length(required: bool) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    endless = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    fields: dict[str, Any] = {"constraint": Constraint("json_schema", endless, "f")}
    if required:
        tool = {"type": "function", "function": {"name": "t", "parameters": endless}}
        fields = {"tools": (tool,), "tool_policy": ToolCallPolicy(("t",), required=True)}
    [choice] = alone(asking(**fields, max_tokens=60)).choices
    assert choice.finish_reason == "length"
    assert "".join(part.text for part in choice.parts).count('"next"') > 1
