"""`/v1/files` and `/v1/batches` through OpenAI's SDK and over real sockets."""

import io
import json
import socket
import sqlite3
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, BatchError, BatchUsage
from openai.types.batch_usage import InputTokensDetails, OutputTokensDetails

from batching.errors import QueueFull
from batching.fair_share import Priority
from server.apis.openai import jobs
from server.apis.openai.batches import input_file, runner, store
from server.apis.openai.database import DatabaseDown
from server.apis.openai.response_schemas import FileObject
from server.http.ndjson import LineWindow
from server.http.request import SEND_BYTES
from server.http.transfers import Transfer
from tests.conftest import opened_databases
from tests.event_streams import CLIENT, open_stream
from tests.fake_generator import FakeGenerator
from tests.matrix import matrix
from tests.postgres import Databases
from tests.serving import Server, metric, serving, wait_until
from tests.tiny_embedders import folder as folder_of

FILL_MASK = Path(__file__).parents[2] / "worker" / "demo" / "fill-mask"
CHAT: Any = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return line_of(CHAT, custom_id, **{"model": "demo", "messages": messages} | more)


def line_of(endpoint: str, custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Client:
    """A client with an API key."""

    def __init__(self, server: Server, key: str = "one") -> None:
        self.server = server
        self.sdk = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)

    def upload(self, content: bytes, **more: Any) -> str:
        return self.sdk.files.create(file=("in.jsonl", content), purpose="batch", **more).id

    def start(self, input_file_id: str, endpoint: Any = CHAT, **more: Any) -> str:
        return self.sdk.batches.create(
            input_file_id=input_file_id, endpoint=endpoint, completion_window="24h", **more
        ).id

    def create(self, content: bytes, endpoint: Any = CHAT, **more: Any) -> str:
        return self.start(self.upload(content), endpoint, **more)

    def get(self, id: str) -> Batch:
        batch = self.sdk.batches.retrieve(id)
        assert Batch.model_validate(batch.model_dump(), strict=True) == batch
        return batch

    def wait(self, id: str) -> Batch:
        wait_until(lambda: self.get(id).status in ENDED)
        return self.get(id)

    def completed(self, id: str) -> int:
        counts = self.get(id).request_counts
        return counts.completed if counts else 0

    def results(self, id: str | None) -> dict[str, Any]:
        """Return the lines of a file by custom_id, each of which occurs once."""
        if id is None:
            return {}
        lines = [json.loads(line) for line in self.sdk.files.content(id).text.splitlines()]
        by_id = {line["custom_id"]: line for line in lines}
        assert len(by_id) == len(lines)
        return by_id


def error_of(batch: Batch) -> BatchError:
    assert batch.errors
    assert batch.errors.data
    return batch.errors.data[0]


def usage_of(results: dict[str, Any]) -> BatchUsage:
    """Return the sum of the lines' usages, which is not zero."""
    sums: Counter[str] = Counter()
    for line in results.values():
        usage = line["response"]["body"]["usage"]
        sums["total"] += usage["total_tokens"]
        for kind, *names in (("input", "prompt_tokens", "input_tokens"),
                             ("output", "completion_tokens", "output_tokens")):  # fmt: skip
            for name in names:
                sums[kind] += usage.get(name, 0)
                details = usage.get(f"{name}_details", {})
                sums["cached"] += details.get("cached_tokens", 0)
                sums["reasoning"] += details.get("reasoning_tokens", 0)
    assert sums["total"] == sums["input"] + sums["output"] > 0
    return BatchUsage(
        input_tokens=sums["input"],
        input_tokens_details=InputTokensDetails(cached_tokens=sums["cached"]),
        output_tokens=sums["output"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=sums["reasoning"]),
        total_tokens=sums["total"],
    )


@contextmanager
def started(databases: Databases, generator: FakeGenerator, **settings: Any) -> Iterator[Client]:
    """Run a server; yield a client with the key "one"."""
    settings = databases.settings | {"api_keys": ("one", "two")} | settings
    with serving(load_chat=lambda: generator, **settings) as server:
        yield Client(server)


@pytest.fixture(scope="module", params=matrix(["sqlite", "postgres"], "sqlite"))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    models = {
        "embedding_model": "demo",
        "rerank_model": str(folder_of("bert-rank")),
        "pipeline_model": f"demo,vectors={FILL_MASK};task=feature-extraction",
        "pipeline_task": "fill-mask",
    }
    with (
        opened_databases(request, tmp_path_factory.mktemp("batches")) as databases,
        started(databases, FakeGenerator(), max_body_mb=0.01, **models) as client,
    ):
        yield client.server


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


def texts_of(results: dict[str, Any]) -> dict[str, str]:
    return {
        id: line["response"]["body"]["choices"][0]["message"]["content"]
        for id, line in results.items()
    }


def test_the_lines_of_a_batch_are_served_as_requests_are(server: Server, client: Client) -> None:
    lines = [chat_line(f"line {n}", f"say {n} wörds") for n in range(60)]
    lines.append(chat_line("hot", temperature=9))
    lines.append(chat_line("bad", "bad"))
    lines.append(chat_line("unknown", model="other"))
    lines.append(chat_line("nested", json.loads("[" * 400 + "]" * 400)))
    before = metric(server, 'onequeue_batch_lines_total{result="completed"}')
    batch = client.wait(client.create(jsonl(lines), metadata={"night": "1"}))
    assert batch.status == "completed"
    assert batch.metadata == {"night": "1"}
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (64, 60, 4)
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    assert texts_of(client.results(batch.output_file_id)) == {
        f"line {n}": f"{n} wörds" for n in range(60)
    }
    assert batch.usage == usage_of(client.results(batch.output_file_id))
    assert batch.model == "demo"
    errors = client.results(batch.error_file_id)
    direct = CLIENT.post(
        server.url + CHAT, json=lines[60]["body"], headers={"Authorization": "Bearer one"}
    )
    hot = errors["hot"]["response"]
    assert (hot["status_code"], hot["body"]) == (direct.status_code, direct.json())
    assert hot["request_id"] == f"{batch.id}-61"
    assert errors["hot"]["id"].startswith("batch_req_")
    assert errors["hot"]["error"] is None
    assert errors["bad"]["response"]["status_code"] == 500
    assert errors["unknown"]["response"]["status_code"] == 404
    assert errors["nested"]["response"]["status_code"] == 400
    assert metric(server, 'onequeue_batch_lines_total{result="completed"}') == before + 60


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "say a"}),
        ("/v1/responses", {"input": "say a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_batch_takes_other_endpoints(client: Client, endpoint: str, body: Any) -> None:
    lines = [line_of(endpoint, str(n), model="demo", **body) for n in range(3)]
    batch = client.wait(client.create(jsonl(lines), endpoint))
    assert batch.error_file_id is None
    results = client.results(batch.output_file_id)
    assert [*sorted(results)] == ["0", "1", "2"]
    document = results["1"]["response"]["body"]
    assert (batch.usage, batch.model) == (usage_of(results), document["model"])
    if endpoint == "/v1/completions":
        assert document["choices"][0]["text"] == "a"
    elif endpoint == "/v1/responses":  # stored for the key of the batch
        assert client.sdk.responses.retrieve(document["id"]).output_text == "a"
    else:
        direct = client.sdk.embeddings.create(model="demo", input="a", encoding_format="float")
        assert document["data"][0]["embedding"] == direct.data[0].embedding


def bodies_of(client: Client, batch: Batch) -> dict[str, Any]:
    results = client.results(batch.output_file_id) | client.results(batch.error_file_id)
    return {id: line["response"]["body"] for id, line in results.items()}


def test_a_batch_of_pipeline_inputs(server: Server, client: Client) -> None:
    mask = {"inputs": "a [MASK] day", "parameters": {"top_k": 2}}
    lines = [
        line_of("/", "one", **mask),
        line_of("/", "several", inputs=["a [MASK]", "the [MASK]"]),
        line_of("/", "vectors", inputs="a", model="vectors"),
        line_of("/", "wrong", inputs="a [MASK]", parameters={"top_k": 0}),
        line_of("/", "unknown", inputs="a", model="other"),
        line_of("/", "number", inputs="a", model=5),
    ]
    batch = client.wait(client.create(jsonl(lines), "/"))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.model) == ("completed", 3, None)
    bodies = bodies_of(client, batch)
    direct = CLIENT.post(server.url, json=mask, headers={"Authorization": "Bearer one"}).json()
    assert [text["token"] for text in bodies["one"]] == [text["token"] for text in direct]
    assert len(bodies["several"]) == 2
    assert isinstance(bodies["vectors"][0][0][0], float)
    codes = {id: bodies[id]["error"]["code"] for id in ("wrong", "unknown", "number")}
    assert codes == {
        "wrong": "invalid_value", "unknown": "model_not_found", "number": "model_not_found",
    }  # fmt: skip


def test_a_batch_of_documents_to_rank(client: Client) -> None:
    pairs: dict[str, Any] = {"query": "a", "documents": ["b", "c"]}
    lines = [
        line_of("/v1/rerank", "documents", **pairs),
        line_of("/v1/rerank", "texts", query="a", texts=["b", "c"]),
    ]
    batch = client.wait(client.create(jsonl(lines), "/v1/rerank"))
    bodies = bodies_of(client, batch)
    assert {entry["index"] for entry in bodies["documents"]["results"]} == {0, 1}
    assert {entry["index"] for entry in bodies["texts"]} == {0, 1}
    assert batch.usage is not None
    assert batch.usage.input_tokens == bodies["documents"]["usage"]["prompt_tokens"]


def test_a_batch_of_messages(server: Server, client: Client) -> None:
    say = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "say a"}]}
    lines = [
        line_of("/v1/messages", "fine", **say),
        line_of("/v1/messages", "wrong", **say | {"max_tokens": 0}),
    ]
    batch = client.wait(client.create(jsonl(lines), "/v1/messages"))
    bodies = bodies_of(client, batch)
    assert bodies["fine"]["content"] == [{"type": "text", "text": "a"}]
    wrong = bodies["wrong"]
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
    assert wrong["request_id"] == f"{batch.id}-2"
    usage = bodies["fine"]["usage"]
    cached = usage["cache_read_input_tokens"]
    assert batch.usage is not None
    assert batch.usage.input_tokens == usage["input_tokens"] + cached > 0
    assert batch.usage.input_tokens_details.cached_tokens == cached > 0


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("in.jsonl", jsonl([chat_line("a")]) * 50)
    return buffer.getvalue()


GOOD = jsonl([chat_line("a")])


@pytest.mark.parametrize(
    ("content", "code", "line", "param"),
    [
        (GOOD + b"{\n", "invalid_json_line", 2, None),
        (GOOD + b'"text"\n', "invalid_json_line", 2, None),
        (GOOD + b'{"custom_id": "\xff"}', "invalid_json_line", 2, None),
        (GOOD + b"[" * 5000, "invalid_json_line", 2, None),
        (zipped(), "invalid_json_line", 1, None),
        (b"\n \n", "empty_batch", None, None),
        (GOOD + b"\n\r\n" + GOOD, "duplicate_custom_id", 4, "custom_id"),
        (jsonl([chat_line("a") | {"url": "/v1/completions"}]), "url_mismatch", 1, "url"),
        (jsonl([chat_line("a") | {"method": "GET"}]), "invalid_request", 1, "method"),
        (jsonl([chat_line("a") | {"body": "text"}]), "invalid_request", 1, "body"),
        (jsonl([chat_line("")]), "invalid_request", 1, "custom_id"),
        (b'{"body": {}}', "invalid_request", 1, "custom_id"),
        (jsonl([chat_line("a", stream=True)]), "invalid_request", 1, "body.stream"),
        (GOOD + jsonl([chat_line("b", "x" * 20_000)]), "invalid_request", 2, None),
        (GOOD + b"x" * 300_000, "invalid_request", 2, None),
    ],
)  # fmt: skip
def test_a_wrong_input_file_fails_the_batch(
    client: Client, content: bytes, code: str, line: int | None, param: str | None
) -> None:
    batch = client.wait(client.create(content))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.output_file_id is batch.error_file_id is None
    error = error_of(batch)
    assert (error.code, error.line, error.param) == (code, line, param)
    assert error.message


def test_a_wrong_request_is_refused(client: Client) -> None:
    input_file_id = client.upload(GOOD + b" " * 2000)
    good: dict[str, Any] = {
        "input_file_id": input_file_id, "endpoint": CHAT, "completion_window": "24h",
    }  # fmt: skip
    output = client.results(client.wait(client.sdk.batches.create(**good).id).output_file_id)
    assert [*output] == ["a"]
    output_id = client.sdk.files.list(purpose="batch_output").data[0].id
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"input_file_id": output_id}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    ]  # fmt: skip
    for wrong, param in wrongs:
        with pytest.raises(openai.BadRequestError) as error:
            client.sdk.batches.create(**(good | wrong))
        assert error.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.sdk.batches.create(**(good | {"input_file_id": "file-0"}))


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at",
          "expires_after[seconds]": "1"}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after[seconds]": "x"}, "expires_after"),
    ],
)  # fmt: skip
def test_a_wrong_upload_is_refused(server: Server, form: dict[str, str], param: str) -> None:
    response = upload(server, form, "in.jsonl")
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def upload(server: Server, form: dict[str, str], name: str) -> httpx.Response:
    files, headers = {"file": (name, GOOD)}, {"Authorization": "Bearer one"}
    return CLIENT.post(server.url + "/v1/files", data=form, files=files, headers=headers)


def test_a_file_name_longer_than_a_header_may_be_is_refused_by_its_reason(server: Server) -> None:
    response = upload(server, {"purpose": "batch"}, "n" * 5000)
    assert response.status_code == 400
    assert "the file name, is longer than 4 kB" in response.json()["error"]["message"]


def test_files_are_kept_listed_and_deleted(server: Server) -> None:
    client = Client(server, "two")
    ids = [client.upload(GOOD + b" " * n) for n in range(3)]
    kept = client.upload(GOOD, expires_after={"anchor": "created_at", "seconds": 3600})
    file = client.sdk.files.retrieve(kept)
    assert (file.expires_at or 0) - file.created_at == 3600
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    assert file.bytes == len(GOOD)
    assert client.sdk.files.content(kept).read() == GOOD
    newest_first = [kept, *reversed(ids)]
    assert [file.id for file in client.sdk.files.list(limit=3)] == newest_first  # all pages
    page = client.sdk.files.list(limit=2, order="asc", after=ids[0])
    assert ([file.id for file in page.data], page.has_more) == (ids[1:3], True)
    for purpose in ("batch_output", "user_data"):
        assert client.sdk.files.list(purpose=purpose).data == []
    with pytest.raises(openai.BadRequestError, match="after"):
        client.sdk.files.list(after="file-0")
    assert client.sdk.files.delete(kept).deleted
    for gone in (client.sdk.files.retrieve, client.sdk.files.content, client.sdk.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(kept)


def test_a_content_that_is_read_whole_is_no_error(server: Server, client: Client) -> None:
    contents = 'onequeue_requests_total{endpoint="/v1/files/{id}/content"}'
    errors = 'onequeue_errors_total{kind="client_gone"}'
    id, served, gone = client.upload(GOOD), metric(server, contents), metric(server, errors)
    assert client.sdk.files.content(id).read() == GOOD
    wait_until(lambda: metric(server, contents) == served + 1)
    assert metric(server, errors) == gone


def unread(server: Server, id: str) -> socket.socket:
    """Ask for the content of a file, and do not read it."""
    return open_stream(server, f"/v1/files/{id}/content", None, "Authorization: Bearer one")


def test_contents_that_are_read_leave_threads_to_other_requests(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, look_up = client.upload(GOOD), store.BatchStore.file
    may_look_up = threading.Event()

    def wait_and_look_up(self: store.BatchStore, *arguments: Any) -> FileObject:
        may_look_up.wait(60)
        return look_up(self, *arguments)

    monkeypatch.setattr(store.BatchStore, "file", wait_and_look_up)
    with ExitStack() as stack:
        stack.callback(may_look_up.set)
        connections = [stack.enter_context(unread(server, id)) for _ in range(50)]
        wait_until(lambda: len(server.uvicorn.server_state.tasks) == 50)
        listed = client.sdk.with_options(timeout=20).files.list()
        assert id in [file.id for file in listed]
        may_look_up.set()
        assert all(connection.recv(15) == b"HTTP/1.1 200 OK" for connection in connections)
    wait_until(lambda: not server.app.memory.used)


def test_a_content_ends_where_the_database_fails_meanwhile(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    id, next_piece = client.upload(GOOD * 1000), store.BatchStore.next_piece

    def fail(self: store.BatchStore, id: str, start: int) -> bytes:
        if start:
            raise DatabaseDown
        return next_piece(self, id, start)

    monkeypatch.setattr(store.BatchStore, "next_piece", fail)
    with pytest.raises(openai.APIConnectionError):
        client.sdk.files.content(id)
    assert "store not available" in caplog.text
    assert "bug" not in caplog.text


def test_contents_that_are_not_read_end_while_memory_is_short(server_databases: Databases) -> None:
    with started(server_databases, FakeGenerator()) as client:
        server, id = client.server, client.upload(b"x" * 30_000_000)
        server.app.memory.limit = 3 * SEND_BYTES
        with unread(server, id) as connection:
            wait_until(lambda: any(held.is_waiting for held in server.app.memory._transfers))
            sizes: list[int] = []

            def read() -> bool:
                with suppress(openai.InternalServerError):  # 503 until the other has ended
                    sizes.append(len(client.sdk.files.content(id).read()))
                return bool(sizes)

            wait_until(read)
            assert sizes == [30_000_000]
            size = 0
            while data := connection.recv(1 << 20):
                size += len(data)
            assert size < 30_000_000
        wait_until(lambda: not server.app.memory.used)


def test_input_files_are_checked_one_at_a_time_in_the_memory_of_bodies(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, active = input_file.InputChecker.feed, 0
    counts, held = [], []
    entered, may_end = threading.Event(), threading.Event()

    def count_and_feed(self: input_file.InputChecker, chunk: bytes) -> None:
        nonlocal active
        active += 1
        counts.append(active)
        held.append(server.app.memory.used)
        entered.set()
        may_end.wait(60)
        feed(self, chunk)
        active -= 1

    monkeypatch.setattr(input_file.InputChecker, "feed", count_and_feed)
    clients = Client(server, "one"), Client(server, "two")
    ids = [clients[0].create(GOOD)]
    entered.wait(60)
    ids.append(clients[1].create(GOOD))
    assert clients[1].get(ids[1]).status == "validating"
    may_end.set()
    for client, id in zip(clients, ids, strict=True):
        assert client.wait(id).status == "completed"
    assert counts == [1, 1]
    assert held[0] == len(GOOD)
    wait_until(lambda: not server.app.memory.used)


def test_an_input_file_waits_for_the_memory_of_bodies(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    memory, transfer = server.app.memory, Transfer()
    refused, take = threading.Event(), memory.take

    def take_and_note(transfer: Transfer, size: int) -> None:
        try:
            take(transfer, size)
        except QueueFull:
            refused.set()
            raise

    input_file_id = client.upload(GOOD + b" " * 2000)
    monkeypatch.setattr(memory, "take", take_and_note)
    memory.hold(transfer, memory.limit - 1000)  # for the request that creates the batch
    id = client.start(input_file_id)
    assert refused.wait(60)
    assert client.get(id).status == "validating"
    memory.release(transfer)
    assert client.wait(id).status == "completed"


def test_a_key_finds_neither_files_nor_batches_of_another(server: Server, client: Client) -> None:
    other = Client(server, "two")
    id = client.create(GOOD)
    batch = client.wait(id)
    assert batch.output_file_id
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (other.sdk.files.retrieve, other.sdk.files.content, other.sdk.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
        assert file_id not in [file.id for file in other.sdk.files.list()]
    for look_up in (other.sdk.batches.retrieve, other.sdk.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            look_up(id)
    assert id not in [found.id for found in other.sdk.batches.list()]
    with pytest.raises(openai.NotFoundError):
        other.start(batch.input_file_id)
    assert [found.id for found in client.sdk.batches.list(limit=1).data] == [id]


def test_without_a_folder_there_are_no_batches(server: Server) -> None:
    unknown = CLIENT.get(server.url + "/v1/files/x/y", headers={"authorization": "Bearer one"})
    assert unknown.status_code == 404
    assert "BATCH_DIR" not in unknown.json()["error"]["message"]
    with serving(load_chat=FakeGenerator) as without:
        for method, path in [("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/files/x")]:
            response = CLIENT.request(method, without.url + path)
            assert response.status_code == 404
            assert "it needs BATCH_DIR" in response.json()["error"]["message"]


def test_a_cancelled_batch_keeps_its_results(server_databases: Databases) -> None:
    lines = [chat_line(f"line {n}") for n in range(10)] + [chat_line("stuck", "hang")]
    generator = FakeGenerator()
    with started(server_databases, generator) as client:
        id = client.create(jsonl(lines))
        wait_until(lambda: client.completed(id) == 10)
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.sdk.files.delete(client.get(id).input_file_id)
        waiting = client.create(GOOD)  # a key has one running batch
        assert client.sdk.batches.cancel(waiting).status in ("cancelling", "cancelled")
        assert client.wait(waiting).output_file_id is None
        assert client.sdk.batches.cancel(id).status in ("cancelling", "cancelled")
        batch = client.wait(id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at
        assert batch.cancelled_at
        assert len(client.results(batch.output_file_id)) == 10
        [(name, line)] = client.results(batch.error_file_id).items()
        assert (name, line["response"], line["error"]["code"]) == ("stuck", None, "batch_cancelled")
        wait_until(lambda: generator.dropped == ["hang"])
        with pytest.raises(openai.BadRequestError, match="it is cancelled"):
            client.sdk.batches.cancel(id)


def test_a_cancelled_batch_keeps_results_that_wait_to_be_stored(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, record = store.BatchStore.append, LineWindow.record
    served, stored = threading.Semaphore(0), threading.Event()

    def wait_and_append(self: store.BatchStore, *arguments: Any) -> Any:
        assert stored.wait(60)
        return append(self, *arguments)

    def record_and_tell(window: LineWindow, answer_bytes: int) -> None:
        record(window, answer_bytes)
        served.release()

    monkeypatch.setattr(store.BatchStore, "append", wait_and_append)
    monkeypatch.setattr(LineWindow, "record", record_and_tell)
    lines = [chat_line(str(n)) for n in range(2)]
    with started(server_databases, FakeGenerator()) as client:
        id = client.create(jsonl(lines))
        for _ in lines:
            assert served.acquire(timeout=60)
        client.sdk.batches.cancel(id)
        stored.set()
        assert client.wait(id).status == "cancelled"
        assert client.completed(id) == 2


def test_lines_are_few_at_a_time_and_give_way(server_databases: Databases) -> None:
    generator = FakeGenerator()
    with started(server_databases, generator, max_queue_size=16) as client:
        id = client.create(jsonl([chat_line(f"line {n}", "hang") for n in range(30)]))
        wait_until(lambda: len(generator.running) == 2)  # the window's start
        assert {request.item.owner.priority for request in generator.running} == {Priority.BATCH}
        answer = client.sdk.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content
        assert len(generator.payloads) == 3
        client.sdk.batches.cancel(id)
        client.wait(id)


def test_batches_take_turns_by_key(server_databases: Databases) -> None:
    """Long batches of eight keys keep a ninth one waiting for a line, not for their end."""
    generator = FakeGenerator()
    keys = [f"key {n}" for n in range(9)]
    with started(server_databases, generator, max_queue_size=8, api_keys=tuple(keys)) as first:
        generator.one_by_one = True
        clients = [Client(first.server, key) for key in keys]
        long = jsonl([chat_line(str(n), f"say {n}") for n in range(200)])
        ids = [client.create(long) for client in clients[:8]]
        for client, id in zip(clients, ids, strict=False):
            wait_until(lambda client=client, id=id: client.get(id).status == "in_progress")  # type: ignore[misc]
        last = clients[8].create(GOOD)

        def step_and_look() -> bool:
            generator.permits.release()
            return clients[8].get(last).status == "completed"

        wait_until(step_and_look)
        counts = [client.completed(id) for client, id in zip(clients, ids, strict=False)]
        assert max(counts) - min(counts) <= 2
        generator.release()


def test_a_line_that_cannot_start_holds_no_place(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of one batch is refused; the other runs through a window of one line."""
    monkeypatch.setattr(runner, "WINDOW_DIVISOR", 1_000_000)
    with started(server_databases, FakeGenerator(), embedding_model="demo") as one:
        server, two = one.server, Client(one.server, "two")
        server.worker_client.models["generation"].breaker.probe_at = 0.0  # open
        refused = one.create(jsonl([chat_line(str(n)) for n in range(3)]))
        wait_until(lambda: one.get(refused).status == "in_progress")
        lines = [line_of("/v1/embeddings", str(n), input="a") for n in range(9)]
        batch = two.wait(two.create(jsonl(lines), "/v1/embeddings"))
        assert batch.request_counts
        assert batch.request_counts.completed == 9
        assert one.get(refused).status == "in_progress"
        server.worker_client.models["generation"].breaker.probe_at = None
        assert one.wait(refused).status == "completed"
        assert one.get(refused).error_file_id is None, "a refusal that passes is no result"


def test_a_batch_goes_on_after_a_restart(server_databases: Databases) -> None:
    lines = [chat_line(f"line {n}", f"say {n}") for n in range(20)] + [chat_line("last", "hang")]
    generator = FakeGenerator()
    with started(server_databases, generator) as client:
        id = client.create(jsonl(lines))
        wait_until(lambda: client.completed(id) == 20)
        later = client.create(jsonl([chat_line("later", "say later")]))
    generator = FakeGenerator()
    with started(server_databases, generator, api_keys=("two", "one")) as client:
        assert client.get(id).status == "in_progress"
        wait_until(lambda: len(generator.payloads) == 1)  # only the last line runs again
        client.sdk.batches.cancel(id)
        batch = client.wait(id)
        assert texts_of(client.results(batch.output_file_id)) == {
            f"line {n}": str(n) for n in range(20)
        }
        assert [*client.results(batch.error_file_id)] == ["last"]
        assert batch.usage == usage_of(client.results(batch.output_file_id))
        assert client.wait(later).status == "completed"
    with started(server_databases, FakeGenerator(), api_keys=("two",)) as client:
        assert Client(client.server, "two").sdk.batches.list().data == []


def test_a_batch_whose_key_is_gone_does_not_run(server_databases: Databases) -> None:
    generator = FakeGenerator()
    with started(server_databases, generator) as client:
        client.create(jsonl([chat_line("a", "hang")]))
        wait_until(lambda: bool(generator.running))
    generator = FakeGenerator()
    with started(server_databases, generator, api_keys=("two",)):
        ended = "SELECT ended_at IS NOT NULL FROM batches"
        wait_until(lambda: server_databases.execute(ended) == [(True,)])
    with started(server_databases, generator) as client:
        [batch] = client.sdk.batches.list().data
        assert batch.status == "failed"
        assert error_of(batch).code == "invalid_api_key"
    assert generator.payloads == []


def test_a_batch_that_only_crashes_fails(server_databases: Databases) -> None:
    """As a line that kills the process would: each restart would run it again."""
    with started(server_databases, FakeGenerator()) as client:
        id = client.create(jsonl([chat_line("a"), chat_line("b", "hang")]))
        wait_until(lambda: client.completed(id) == 1)
    execute = server_databases.execute
    assert execute("SELECT crashes FROM batches") == [(0,)]  # no crash
    for crashes in (2, 3):
        execute("UPDATE batches SET crashes = ?", (crashes,))
        generator = FakeGenerator()
        with started(server_databases, generator) as client:
            if crashes == 2:
                wait_until(lambda: bool(generator.running))  # noqa: B023
                continue
            batch = client.wait(id)
            assert batch.status == "failed"
            assert error_of(batch).code == "server_error"
            assert generator.payloads == []
            assert [*client.results(batch.output_file_id)] == ["a"]


def test_a_batch_without_its_model_fails(server_databases: Databases) -> None:
    with started(server_databases, FakeGenerator()) as client:
        id = client.create(jsonl([chat_line("b", "hang")]))
        wait_until(lambda: client.get(id).status == "in_progress")
    only = {"chat_model": "none", "embedding_model": "demo", "pipeline_model": "none"}
    with serving(api_keys=("one",), **server_databases.settings, **only) as server:  # type: ignore[arg-type]
        client = Client(server)
        assert error_of(client.wait(id)).code == "model_not_found"
        input_file_id = client.upload(GOOD)
        with pytest.raises(openai.BadRequestError, match="it needs CHAT_MODEL"):
            client.start(input_file_id)


def test_a_failing_disk_delays_a_batch(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    failures = [OSError(28, "No space left on device"), sqlite3.OperationalError("disk full")] * 3
    append = store.BatchStore.append

    def fail(self: store.BatchStore, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return append(self, *arguments)

    monkeypatch.setattr(store.BatchStore, "append", fail)
    with started(server_databases, FakeGenerator()) as client:
        batch = client.wait(client.create(jsonl([chat_line(str(n)) for n in range(9)])))
        assert batch.status == "completed"
        assert len(client.results(batch.output_file_id)) == 9
        assert failures == []


def test_a_failing_disk_refuses_requests_for_a_time(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator()
    with started(server_databases, generator) as client:
        file = client.upload(GOOD)
        id = client.create(jsonl([chat_line("a", "hang")]))
        wait_until(lambda: bool(generator.running))

        def fail(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        calls: list[tuple[str, Any, Any]] = [
            ("create", fail, lambda: client.start(file)),
            ("add_file", full, lambda: client.upload(GOOD)),
            ("delete_file", full, lambda: client.sdk.files.delete(file)),
            ("cancel", fail, lambda: client.sdk.batches.cancel(id)),
        ]
        for name, failure, call in calls:
            with monkeypatch.context() as patch:
                patch.setattr(store.BatchStore, name, failure)
                with pytest.raises(openai.InternalServerError, match="disk has failed") as error:
                    call()
            assert error.value.status_code == 503
            assert error.value.response.headers["retry-after"] == "10"
        assert client.sdk.batches.cancel(id).status == "cancelling"
        assert client.wait(id).status == "cancelled"


def test_a_batch_that_expires_names_the_rest(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WINDOW_S", 2)
    with started(server_databases, FakeGenerator()) as client:
        lines = [chat_line("a"), chat_line("b", "hang")]
        batch = client.wait(client.create(jsonl(lines)))
        assert (batch.status, bool(batch.expired_at)) == ("expired", True)
        assert [*client.results(batch.output_file_id)] == ["a"]
        [(name, line)] = client.results(batch.error_file_id).items()
        assert (name, line["error"]["code"]) == ("b", "batch_expired")


def test_a_full_folder_refuses_uploads_and_ends_batches(server_databases: Databases) -> None:
    hundred_kb_of_a_key = {"batch_dir_gb": 0.0002}
    with started(server_databases, FakeGenerator(), **hundred_kb_of_a_key) as client:
        lines = [chat_line(f"line {n}", "say " + "x" * 1000) for n in range(60)]
        batch = client.wait(client.create(jsonl(lines)))
        assert batch.status == "failed"
        assert error_of(batch).code == "storage_full"
        assert batch.request_counts
        assert len(client.results(batch.output_file_id)) == batch.request_counts.completed
        with pytest.raises(openai.APIStatusError) as error:
            client.upload(GOOD + b" " * 50_000)
        assert (error.value.status_code, error.value.code) == (413, "storage_full")
        Client(client.server, "two").upload(GOOD)


def test_servers_share_a_batch(
    server_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run lines of a batch, which is found, and cancelled, at both."""
    monkeypatch.setattr(jobs, "POLL_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    generators = FakeGenerator(), FakeGenerator()
    with ExitStack() as stack:
        clients = [stack.enter_context(started(server_databases, each)) for each in generators]
        lines = [chat_line(str(n), f"say {n}") for n in range(200)]
        id = clients[0].create(jsonl(lines))
        batch = clients[1].wait(id)
        assert texts_of(clients[1].results(batch.output_file_id)) == {
            str(n): str(n) for n in range(200)
        }
        assert batch.request_counts
        assert batch.request_counts.completed == 200
        ran = [len(generator.payloads) for generator in generators]
        assert sum(ran) == 200
        assert min(ran) > 20
        id = clients[0].create(jsonl([chat_line(str(n), "hang") for n in range(99)]))
        wait_until(lambda: all(generator.running for generator in generators))
        clients[1].sdk.batches.cancel(id)
        batch = clients[0].wait(id)
        assert batch.status == "cancelled"
        assert len(clients[0].results(batch.error_file_id)) == 99


def test_lines_find_the_prefixes_of_others_in_the_cache(tmp_path: Path) -> None:
    """The cache has room for two prompts; the lines of the six groups alternate in the file, by
    whose order less than a quarter of the tokens would be found."""
    lines = [
        chat_line(f"{n} {group}", f"Question {n}: what is the capital of Japan?", max_tokens=2)
        for n in range(6)
        for group in range(6)
    ]
    for line in lines:
        system = f"{line['custom_id'][2]} You are a helpful friend. " * 12
        line["body"]["messages"].insert(0, {"role": "system", "content": system})
    demo: dict[str, Any] = {"chat_model": "demo", "kv_cache_gb": 0.0005, "max_running": 4}
    with serving(**demo, batch_dir=str(tmp_path)) as server:
        client = Client(server)
        batch = client.wait(client.create(jsonl(lines)))
        results = client.results(batch.output_file_id)
    assert batch.usage == usage_of(results)
    usages = [line["response"]["body"]["usage"] for line in results.values()]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert len(usages) == 36
    assert cached > prompts / 2
