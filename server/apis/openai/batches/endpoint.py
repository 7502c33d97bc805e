"""`/v1/batches`: create, list, retrieve and cancel batches; runner.py runs them."""

from typing import Literal, get_args

from msgspec import Struct
from starlette.requests import Request

from batching.errors import InvalidInput
from server.apis.openai.batches.files import ExpiresAfter, FileEndpoints, namespace_of
from server.apis.openai.batches.runner import BatchRunner, BatchTask
from server.apis.openai.batches.store import KEPT_S
from server.apis.openai.request_fields import convert, convert_body
from server.apis.openai.response_schemas import BatchJob, BatchList
from server.apis.openai.responses.request import Metadata
from server.apis.openai.store import ListPage, in_store
from server.http.access import address_of
from server.http.errors import SETTING_FOR_PATH
from server.http.json import JsonBodyParser, parse_json, to_json
from server.http.operation import Operation, OperationRoute, routes_of
from server.http.request import read_request

BatchedPath = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/",
]
BATCH_ENDPOINTS = get_args(BatchedPath)


class BatchRequest(Struct):
    input_file_id: str
    endpoint: BatchedPath
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class Batches:
    """The endpoints of batches; `routes` has those of their files, too. `uploads`: see
    FileEndpoints."""

    def __init__(self, runner: BatchRunner, uploads: str | None) -> None:
        self.runner, self.store, self.uploads = runner, runner.store, uploads
        self.body_parser = JsonBodyParser()

    def routes(self) -> list[OperationRoute]:
        own = routes_of(self.create, self.list_batches, self.retrieve, self.cancel)
        return FileEndpoints(self.store, self.uploads).routes() + own

    @Operation(
        "POST /v1/batches",
        "Run the lines of a file as requests of low priority",
        BatchJob,
        BatchRequest,
        errors=[404],
    )
    async def create(self, request: Request) -> bytes:
        scope = request.scope
        _, body, incoming = await read_request(scope, request.receive)

        def parse(body: bytes) -> BatchRequest:
            return convert_body(parse_json(body), BatchRequest, scope)

        wanted = await self.body_parser.run(parse, body, incoming.deadlines.first)
        if wanted.endpoint not in self.runner.endpoints:
            setting = SETTING_FOR_PATH[wanted.endpoint]
            reason = f"no model serves {wanted.endpoint}: it needs {setting}"
            raise InvalidInput.at("endpoint", reason)
        expires = wanted.output_expires_after
        record = await in_store(
            self.store.create,
            namespace_of(scope),
            address_of(scope),
            wanted.endpoint,
            wanted.input_file_id,
            wanted.metadata,
            expires.seconds if expires else KEPT_S,
        )
        content = to_json(record.job)
        self.runner.add(record)
        return content

    @Operation("GET /v1/batches", "The batches of the key", BatchList, query=ListPage)
    async def list_batches(self, request: Request) -> bytes:
        page = convert(dict(request.query_params), ListPage, strict=False)
        return await in_store(self.store.list_batches, namespace_of(request.scope), page)

    @Operation("GET /v1/batches/{id}", "A batch", BatchJob)
    async def retrieve(self, request: Request) -> bytes:
        namespace, id = namespace_of(request.scope), request.path_params["id"]
        return await in_store(self.store.batch, namespace, id)

    @Operation("POST /v1/batches/{id}/cancel", "Cancel a batch", BatchJob, errors=[400])
    async def cancel(self, request: Request) -> bytes:
        namespace, id = namespace_of(request.scope), request.path_params["id"]
        content = await in_store(self.store.cancel, namespace, id)
        if batch := self.runner.jobs.find(BatchTask, namespace, id):
            batch.abort()
        return content
