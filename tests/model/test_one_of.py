"""The branches of `oneOf` are made exclusive, or are an error: no document matches two."""

import json
import random
from typing import Any

import httpx
import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from batching.errors import InvalidInput
from tests import tiny_chat
from tests.generating import prepare
from tests.matrix import matrix
from tests.model.test_structured_output import CLOCK, alone
from tests.serving import serving
from tests.tiny_chat import asking, engine
from worker.grammar.lark import content_rule
from worker.grammar.one_of import make_exclusive
from worker.messages.generation import Constraint, Sampling, ToolCallPolicy

Schema = dict[str, Any]
TEXT = {"type": "string", "maxLength": 3}
OVERLAPPING: Schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}


def thing(required: list[str] | None = None, **properties: Any) -> Schema:
    names = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": names}


def closed(**properties: Any) -> Schema:
    return {**thing(**properties), "additionalProperties": False}


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {"oneOf": [{"const": 1}, closed(left={"$ref": "#/$defs/tree"})]}},
}
KINDS = {"a": thing(kind={"const": "a"}), "b": thing(kind={"enum": ["b", "c"]}, n=TEXT)}
APART: dict[str, Schema] = {
    "types": {"oneOf": [TEXT, {"type": ["null", "boolean"]}]},
    "constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"const": 1}]},
    "ranges": {"oneOf": [{"type": "number", "maximum": 0}, {"minimum": 0.5, "maximum": 9}]},
    "lengths": {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 3, "maxLength": 4}]},
    "a kind": {"oneOf": [*KINDS.values(), {"type": "null"}]},
    "a kind that one may lack": {"oneOf": [KINDS["a"], thing([], kind={"const": "b"})]},
    "a kind within": {"oneOf": [thing(in_=item) for item in KINDS.values()]},
    "types of a property": {"oneOf": [thing(a=TEXT), thing(a={"type": "integer"})]},
    "closed objects": {"oneOf": [closed(a=TEXT), closed(b=TEXT), closed(a=TEXT, c=TEXT)]},
    "references": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": KINDS},
    "alternatives within": {"oneOf": [{"anyOf": [TEXT, {"const": 1}]}, {"anyOf": [{"const": 2}]}]},
    "items": {
        "type": "array",
        "maxItems": 2,
        "oneOf": [{"items": TEXT, "minItems": 1}, {"items": {"type": "null"}}],
    },
    "a tree": TREE,
}
NARROWED: dict[str, Schema] = {
    "a kind that all may lack": {"oneOf": [thing([], kind={"const": item}) for item in "abc"]},
    "one or the other": {
        **thing([], a=TEXT, b=TEXT, c=TEXT),
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c", "a"]}],
    },
    "one or the other, of no type": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "lists of constants": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c", 1]}]},
    "kinds in common": {
        "oneOf": [thing(kind={"enum": ["a", "b"]}), thing([], kind={"enum": ["b", "c"]})]
    },
    "types in common": {"oneOf": [{"type": ["string", "null"]}, {"type": ["boolean", "null"]}]},
    "objects with some in common": {"oneOf": [closed(a=TEXT), thing(a=TEXT, b=TEXT)]},
}
del NARROWED["one or the other"]["oneOf"][2]
REFUSED: dict[str, Schema] = {
    "a type within another": OVERLAPPING,
    "twice the same": {"oneOf": [TEXT, TEXT]},
    "a constant of the other": {"oneOf": [{"const": "a"}, {"type": "string"}]},
    "anything": {"oneOf": [True, {"type": "string"}]},
    "itself": {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
    "a loop": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    "what is not looked at": {"oneOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]},
    "deep within": {"properties": {"a": {"items": {"anyOf": [OVERLAPPING]}}}},
}


@pytest.mark.parametrize("name", APART)
def test_disjoint_branches_stay_unchanged(name: str) -> None:
    expected = json.loads(json.dumps(APART[name]).replace('"oneOf"', '"anyOf"'))
    assert make_exclusive(APART[name]) == expected


@pytest.mark.parametrize("name", matrix([*APART, *NARROWED], *[*APART, *NARROWED][::3]))
def test_documents_match_exactly_one_branch(name: str) -> None:
    schema = {**APART, **NARROWED}[name]
    for seed in range(3):
        sampling = Sampling(temperature=1.0, seed=seed)
        constraint = Constraint("json_schema", schema, "f")
        [choice] = alone(asking(sampling=sampling, constraint=constraint, max_tokens=80)).choices
        if choice.finish_reason == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(choice.text)), choice.text


def test_every_branch_stays_possible() -> None:
    for schema, documents in (
        (NARROWED["one or the other"], ['{"a":""}', '{"b":""}', '{"b":"","c":""}']),
        (NARROWED["a kind that all may lack"], ['{"kind":"a"}', '{"kind":"c"}']),
        (NARROWED["types in common"], ['""', "true"]),
        (NARROWED["lists of constants"], ['"a"', '"c"', "1"]),
        (TREE, ["1", '{"left":{"left":1}}']),
    ):
        for document in documents:
            assert takes(schema, document), document
    assert not takes(NARROWED["one or the other"], '{"a":"","b":""}')
    assert not takes(NARROWED["lists of constants"], '"b"')


@pytest.mark.parametrize("name", REFUSED)
def test_inseparable_branches_are_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(
        InvalidInput, match="f: cannot be compiled: the branches 0 and 1 of a oneOf"
    ):
        content_rule(Constraint("json_schema", REFUSED[name], "f"))


def test_one_of_as_a_name_or_value_is_left_alone() -> None:
    schema = {
        "type": "object",
        "properties": {"oneOf": {"const": {"oneOf": [1, 1]}}, "const": {"oneOf": [{"const": 1}]}},
        "default": {"oneOf": [{}, {}]},
    }
    result = make_exclusive(schema)
    assert result["properties"]["oneOf"] == {"const": {"oneOf": [1, 1]}}
    assert result["properties"]["const"] == {"anyOf": [{"const": 1}]}
    assert result["default"] == schema["default"]


def test_any_of_beside_one_of_still_constrains() -> None:
    schema = {"anyOf": [TEXT, {"type": "null"}], "oneOf": [{"type": "null"}, {"const": "a"}]}
    assert takes(schema, '"a"')
    assert takes(schema, "null")
    assert not takes(schema, '"b"')


def deep(levels: int) -> Schema:
    result: Schema = {"type": "null"}
    for _ in range(levels):
        result = {"oneOf": [result, {"type": "string"}]}
    return result


LOOPS = {name: {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for name in "ab"}
HOSTILE: dict[str, Schema] = {
    "branches": {"oneOf": [{"type": "integer", "minimum": n, "maximum": n} for n in range(5000)]},
    "constants": {"oneOf": [{"const": str(n)} for n in range(50_000)]},
    "a large constant": {"oneOf": [{"const": [*range(100_000)]}] * 9},
    "loops of alternatives": {"$defs": LOOPS, "oneOf": [{"$ref": f"#/$defs/{n}"} for n in "ab"]},
    "required": {"required": [str(n) for n in range(50_000)], "oneOf": [{"title": "t"}] * 500},
    "a reference": {"$ref": "#/" + "a" * 500_000, "oneOf": [{"title": "t"}] * 500},
    "depth": deep(400),
    "conditions": {"allOf": [{"minLength": n} for n in range(2000)], "oneOf": [{"const": 1}] * 99},
    "no schemas": {"oneOf": [1, "x", None, [], {"type": 5, "required": "x", "enum": 3}]},
    "no keywords": {"oneOf": [{"items": [3], "properties": [], "allOf": {}, "$ref": 7}, {}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_expensive_schemas_fail_early(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"branches|nested"):
        make_exclusive(HOSTILE[name])


def test_large_unions_are_supported() -> None:
    union = [thing([], kind={"const": f"k{n}"}, a=TEXT) for n in range(300)]
    assert len(make_exclusive({"oneOf": union})["anyOf"]) == 300


# ── random schemas ──

VALUES = ["a", "b", "c", 1, 2, 1.0, 1.5, True, False, None, [], {"a": 1}]
TYPES = ["string", "null", "integer", "number", "boolean", "object"]


def made_up(rng: random.Random, depth: int) -> Schema:
    scalars: list[Schema] = [
        {"const": rng.choice(VALUES)},
        {"enum": rng.sample(VALUES, 2)},
        {"type": rng.sample(TYPES, rng.randint(1, 2))},
        {"type": "integer", "minimum": rng.randint(0, 3), "maximum": rng.randint(3, 5)},
        {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 4)},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(scalars)
    several = [made_up(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    members = dict(zip(rng.sample("abkt", len(several)), several, strict=True))
    result = thing([name for name in members if rng.random() < 0.6], **members)
    if rng.random() < 0.6:
        result["additionalProperties"] = False
    if rng.random() < 0.2:
        del result["type"]
    others: list[Schema] = [
        {"type": "array", "items": several[0], "minItems": rng.randint(0, 2), "maxItems": 2},
        {"anyOf": several},
        {"oneOf": several},
        {"allOf": several},
        {"$ref": "#/$defs/x"},
    ]
    return result if rng.random() < 0.6 else rng.choice(others)


@pytest.mark.parametrize("seed", matrix(range(4), 0))
def test_no_document_of_a_random_schema_matches_two_branches(seed: int) -> None:
    rng, documents = random.Random(seed), 0
    for _ in range(250):
        schema = {
            **(made_up(rng, 2) if rng.random() < 0.3 else {}),
            "oneOf": [made_up(rng, 2) for _ in range(rng.randint(2, 4))],
            "$defs": {"x": made_up(rng, 1)},
        }
        loose = json.loads(json.dumps(schema).replace('"oneOf"', '"anyOf"'))
        for text in followed(schema, rng):
            document = json.loads(text)
            # Except llguidance's leniency about numbers like 1.0.
            if jsonschema_rs.is_valid(loose, document):
                assert jsonschema_rs.is_valid(schema, document), (schema, text)
                documents += 1
    assert documents > 100


def grammar(schema: Schema) -> LLMatcher:
    rule = content_rule(Constraint("json_schema", schema, "f"))
    result = LLMatcher(TOKENIZER, f"start: {rule}", log_level=0)
    if result.is_error():
        raise InvalidInput(result.get_error())
    return result


def takes(schema: Schema, document: str) -> bool:
    matcher = grammar(schema)
    tokens = TOKENIZER.tokenize_str(document)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def followed(schema: Schema, rng: random.Random) -> list[str]:
    """Return random documents of a grammar; none if it does not compile."""
    try:
        matcher = grammar(schema)
    except InvalidInput:
        return []
    documents = []
    for _ in range(4):
        state, tokens = matcher.deep_copy(), list[int]()
        for _ in range(60):
            mask = state.compute_bitmask()
            allowed = [n for n in range(SIZE) if mask[n // 8] >> n % 8 & 1]
            if not allowed or state.is_stopped():
                break
            token = rng.choice(allowed)
            state.consume_token(token)
            tokens += [token] if token != TOKENIZER.eos_token else []
        if state.is_stopped():
            documents.append(TOKENIZER.decode_bytes(tokens).decode())
    return documents


TOKENS = tiny_chat.tokenizer()
SIZE = len(TOKENS)
TOKENIZER = LLTokenizer(TOKENS.backend_tokenizer.to_str(), n_vocab=SIZE)

# ── in requests ──


def tool(parameters: Schema) -> Schema:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_arguments_match_exactly_one_branch() -> None:
    branches = NARROWED["one or the other"]["oneOf"]
    parameters = {**closed(a=TEXT, b=TEXT), "required": [], "oneOf": branches}
    for seed in range(6):
        request = asking(
            sampling=Sampling(temperature=1.0, seed=seed),
            tools=(tool(parameters),),
            tool_policy=ToolCallPolicy(("f",), required=True, parallel=False),
        )
        [choice] = alone(request).choices
        [arguments] = [part.text for part in choice.parts if part.kind == "call"]
        assert jsonschema_rs.is_valid(parameters, json.loads(arguments)), arguments


def test_error_names_a_required_tool_with_overlapping_branches() -> None:
    tools = (CLOCK, tool(thing(a=OVERLAPPING)))
    with pytest.raises(InvalidInput, match="branches 0 and 1 of a oneOf") as caught:
        prepare(
            engine(),
            asking(tools=tools, tool_policy=ToolCallPolicy(("clock", "f"), required=True)),
        )
    assert caught.value.param == "tools[1]"
    prepare(
        engine(), asking(tools=tools, tool_policy=ToolCallPolicy(("clock", "f")))
    )  # optional calls are not affected


def test_http_error_names_the_field() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": OVERLAPPING}}
    folder = str(tiny_chat.folder())
    with serving(chat_model=folder, dtype="float32", kv_cache_gb=0.05, compile="off") as server:
        body = {"messages": [{"role": "user", "content": "?"}], "response_format": format}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body)
        error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert "the branches 0 and 1 of a oneOf may match the same document" in error["message"]
