"""`GET /openapi.json` describes the endpoints, and fuzzing by it finds no failure."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from batching.errors import InvalidInput
from server.apis.openai.chat import ChatRequest
from server.apis.openai.completions import CompletionRequest
from server.apis.openai.request_fields import GenerationRequest, decode
from server.apis.pipeline.endpoint import pipeline_operation
from server.http.access import is_open
from server.http.operation import OperationRoute
from server.openapi.document import DESCRIPTIONS, TAGS, build_document
from tests.event_streams import CLIENT, error_of
from tests.fake_generator import FakeGenerator
from tests.fake_transcriber import FakeTranscriber
from tests.fakes import FakeRunner
from tests.serving import Server, serving
from worker.tasks import TASKS

schemathesis = pytest.importorskip("schemathesis")

ALWAYS = {"/", "/assets/{name}", "/health", "/ready", "/ping", "/version", "/favicon.ico"}
ALWAYS |= {"/metrics", "/debug/queue", "/openapi.json", "/models", "/models/load", "/models/unload"}
ALWAYS |= {"/load", "/reset", "/reset_prefix_cache", "/docs"}
KEY = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    task = "text-classification"
    with serving(FakeRunner, load_chat=FakeGenerator, pipeline_task=task, api_keys=("k",)) as api:
        yield api


def fetch(server: Server) -> dict[str, Any]:
    answer = CLIENT.get(server.url + "/openapi.json", headers=KEY)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    document: dict[str, Any] = answer.json()
    return document


def check_form(document: dict[str, Any]) -> None:
    """By the meta-schemas of OpenAPI 3.1 and of JSON Schema."""
    assert document["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(document).validate()
    for schema in every(document, "schema") + list(document["components"]["schemas"].values()):
        jsonschema_rs.meta.validate(schema)
    for reference in every(document, "$ref"):
        node = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


def every(node: Any, key: str) -> list[Any]:
    """All values of `key`, however deep."""
    if isinstance(node, list):
        return [found for child in node for found in every(child, key)]
    if not isinstance(node, dict):
        return []
    found = [node[key]] if key in node else []
    return found + [deeper for child in node.values() for deeper in every(child, key)]


def test_the_document_is_well_formed(server: Server) -> None:
    document = fetch(server)
    check_form(document)
    ids = every(document["paths"], "operationId")
    assert len(ids) == len(set(ids))
    for name in document["components"]["schemas"]:
        assert name.isalnum(), "two structs of one name are distinguished by their modules"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_parameters_of_each_task_are_described(task: str) -> None:
    document = build_document(False, [OperationRoute(pipeline_operation(task), fetch)])
    check_form(document)
    (described,) = document["paths"].values()
    inputs = described["post"]["requestBody"]["content"]["application/json"]["schema"]
    named = [every(parameters, "properties") for parameters in every(inputs, "parameters")]
    assert named
    assert all(set(schema) == set(TASKS[task].parameters) for [schema] in named)


def test_exactly_the_mounted_routes_are_described(server: Server) -> None:
    with serving(FakeRunner, ready=False) as no_chat:
        assert set(fetch(no_chat)["paths"]) == ALWAYS
    with serving(load_chat=FakeGenerator, ready=False) as no_pipeline:
        generation = set(fetch(no_pipeline)["paths"]) - ALWAYS
        assert generation == no_pipeline.app.paths - ALWAYS
        assert "/v1/chat/completions" in generation
    document = fetch(server)
    assert set(document["paths"]) == {*ALWAYS, *generation, "/predict", "/info"}
    check_routes(server, document)


def check_routes(server: Server, document: dict[str, Any]) -> None:
    """Check that the document has the paths and methods of the server."""
    assert set(document["paths"]) == server.app.paths
    for path, operations in document["paths"].items():
        answer = CLIENT.request("TRACE", server.url + path, headers=KEY)
        allowed = {method.strip().lower() for method in answer.headers["allow"].split(",")}
        assert allowed - {"head"} == set(operations), path


def test_transcriptions_are_described_and_fuzzed(tmp_path: Path) -> None:
    with serving(load_transcriber=FakeTranscriber, api_keys=("k",)) as server:
        document = fetch(server)
        check_form(document)
        assert set(document["paths"]) == server.app.paths
        post = document["paths"]["/v1/audio/transcriptions"]["post"]
        fields = post["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
        assert {"file", "timestamp_granularities[]", "stream"} < set(fields)
        assert "text/vtt" in post["responses"]["200"]["content"]
        fuzz(server, tmp_path, 3, "--include-path-regex=audio")


def test_all_routes_fields_and_paths_are_described(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {
        "load_embedder": FakeRunner,
        "load_reranker": FakeRunner,
        "load_chat": FakeGenerator,
    }
    settings: dict[str, Any] = {"batch_dir": str(tmp_path), "pipeline_task": "text-to-audio"}
    with serving(FakeRunner, **kinds, ready=False, **settings) as server:
        document = fetch(server)
        check_form(document)
        check_routes(server, document)
        routes = [route for route in server.app.routes if isinstance(route, OperationRoute)]
    paths = {*document["paths"]}
    assert {"/v1/files", "/v1/batches", "/v1/embeddings", "/v2/rerank", "/v1/score"} < paths
    used = set()
    requests = [route.operation.request for route in routes]
    for kind in {request for request in requests if isinstance(request, type)}:
        for name, field in document["components"]["schemas"][kind.__name__]["properties"].items():
            key = f"{kind.__name__}.{name}"
            used.add(key if key in DESCRIPTIONS else name)
            assert field["description"], key
    assert used >= set(DESCRIPTIONS), "a description of no field"
    assert {tag["name"] for tag in document["tags"]} == {*TAGS, "Server"}


def test_document_is_served_before_the_model_is_loaded() -> None:
    gate = threading.Event()

    def load() -> FakeGenerator:
        assert gate.wait(60)
        return FakeGenerator()

    with serving(load_chat=load, ready=False) as server:
        try:
            assert "/v1/models" in fetch(server)["paths"]
            assert CLIENT.get(server.url + "/ready").status_code == 503
        finally:
            gate.set()


def test_key_is_required_where_the_document_requires_it(server: Server) -> None:
    assert error_of(CLIENT.get(server.url + "/openapi.json"))["code"] == "invalid_api_key"
    document = fetch(server)
    assert document["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert ("security" in operation) == ("401" in operation["responses"])
            assert ("security" in operation) != is_open(method.upper(), path)
    with serving(load_chat=FakeGenerator, ready=False) as without:
        assert not every(fetch(without), "security")


USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]


@pytest.mark.parametrize(
    ("kind", "name", "taken", "refused"),
    [
        (
            CompletionRequest,
            "prompt",
            ["a", ["a", "b"], [1, 2], [[1], [2, 3]]],
            ["", [], [""], [[]], ["a", 1], [1, [1]], [-1], [[-1]], [True], 1, None, {}],
        ),
        (CompletionRequest, "best_of", [None, 1], [5, "1", True]),
        (CompletionRequest, "stop", [None, "a", "", [], ["a"] * 16], [["a", ""], ["a"] * 17, 1]),
        (
            CompletionRequest,
            "logit_bias",
            [None, {}, {"5": 1, "17": -100}, {str(n): 1 for n in range(1024)}],
            [{"a": 1}, {"-1": 1}, {"5": 101}, {"5": None}, [], {str(n): 1 for n in range(1025)}],
        ),
        (ChatRequest, "tools", [None, [], TOOLS[:128]], [TOOLS]),
        (
            ChatRequest,
            "messages",
            [
                [USER],
                [{"role": "developer", "content": ""}],
                [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}],
                [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
                [{"role": "assistant", "tool_calls": []}],
                [{"role": "assistant", "content": None}],
                [{"role": "assistant", "content": []}],
                [{"role": "tool", "content": []}],
            ],
            [
                [],
                [{"role": "user"}],
                [{"role": "nobody", "content": "hi"}],
                [{"role": "user", "content": []}],
                [{"role": "user", "content": None, "tool_calls": [CALL]}],
                [{"role": "assistant", "tool_calls": [{}]}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": [{"type": "text", "refusal": "a"}]}],
                [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}],
                {},
            ],
        ),
        (ChatRequest, "best_of", [None, 1], [2, True, "1"]),
        (ChatRequest, "modalities", [None, ["text"], [], ""], [["audio"], "text"]),
    ],
)
def test_schema_of_a_field_agrees_with_its_check(
    server: Server,
    kind: type[GenerationRequest],
    name: str,
    taken: list[Any],
    refused: list[Any],
) -> None:
    document = fetch(server)
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    schema = jsonschema_rs.validator_for({**reference, "components": document["components"]})
    least: dict[str, Any] = {"prompt": "hi"} if kind is CompletionRequest else {"messages": [USER]}
    for values, fine in ((taken, True), (refused, False)):
        for value in values:
            body = {**least, name: value}
            assert (schema.is_valid(body), is_taken(body, kind)) == (fine, fine), value


def is_taken(body: dict[str, Any], kind: type[GenerationRequest]) -> bool:
    try:
        request = decode(body, kind, lambda _: "demo", {})
        request.generation_inputs(64)
    except InvalidInput:
        return False
    return True


@pytest.mark.matrix
@pytest.mark.parametrize("examples", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_a_fuzzer_finds_no_failure(server: Server, tmp_path: Path, examples: int) -> None:
    fuzz(server, tmp_path, examples)
    assert sum(answers(server).values()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("text-classification", "bert-classify"),
        ("token-classification", "bert-ner"),
        ("zero-shot-classification", "bert-nli"),
        ("table-question-answering", "tapas"),
        ("image-classification", "vit"),
        ("automatic-speech-recognition", "whisper"),
    ],
)
def test_a_fuzzer_finds_no_failure_in_a_pipeline(tmp_path: Path, task: str, model: str) -> None:
    from tests.tiny import folder

    with serving(None, pipeline_task=task, pipeline_model=str(folder(model))) as server:
        fuzz(server, tmp_path, 400, "--include-path=/")


@pytest.mark.slow
def test_a_fuzzer_finds_no_failure_in_embeddings_and_reranking(tmp_path: Path) -> None:
    from tests.tiny_embedders import folder

    reranker = str(folder("bert-rank"))
    with serving(embedding_model="demo", rerank_model=reranker) as server:
        fuzz(server, tmp_path, 200)


def fuzz(server: Server, folder: Path, examples: int, *words: str) -> None:
    """Requests that keep to the document and some that do not; every answer is held to it."""
    # A document cannot say which values go together, nor tell 1.0 from 1.
    unchecked = "positive_data_acceptance"
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"),
        *("--header", "Authorization: Bearer k", "--seed=1", f"--max-examples={examples}"),
        "--request-timeout=60",
        *("--phases=coverage,fuzzing", f"--exclude-checks={unchecked}", "--continue-on-failure"),
        *("--generation-database=none", "--suppress-health-check=all", "--no-color", *words),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    failures = {
        answer for answer in answers(server) if answer[1] >= "500" and answer[0] != "/ready"
    }
    assert not failures


def answers(server: Server) -> dict[tuple[str, str], int]:
    """Return their number by endpoint and status."""
    text = CLIENT.get(server.url + "/metrics").text
    counted = r'onequeue_requests_total\{endpoint="(.*)",status="(.*)"\} (.*)'
    return {(path, status): int(float(count)) for path, status, count in re.findall(counted, text)}
