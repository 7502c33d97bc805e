"""`/v1/files`: the files of batches, uploaded as a form and kept in the store.

upload (http/upload.py) → store.py → content, in pieces, at the client's pace
"""

from typing import Annotated, Literal

from anyio import CapacityLimiter
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.apis.openai.batches.store import CHUNK_BYTES, KEPT_S, BatchStore
from server.apis.openai.media import while_connected
from server.apis.openai.request_fields import convert
from server.apis.openai.response_schemas import Deleted, FileList, FileObject
from server.apis.openai.store import ListPage, in_store, storage_namespace
from server.core.worker_client import NO_DEADLINES, IncomingRequest
from server.http.form import FILE, Form
from server.http.json import Document
from server.http.operation import FORM, Operation, OperationRoute, routes_of
from server.http.request import send_at_pace
from server.http.upload import Uploads

MAX_FILE_MB = 200
READER_THREADS = 1  # more would fill a turn of the event loop with pieces of files
MIN_KEPT_S = 3600


class ExpiresAfter(Struct):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_KEPT_S, le=KEPT_S)]


class FileFields(Struct):
    """The fields of an upload, beside the file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FilePage(ListPage):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    purpose: Annotated[str, Meta(max_length=64)] | None = None


def namespace_of(scope: Scope) -> bytes:
    return storage_namespace(scope["context"].key.id)


def file_form() -> Document:
    content = {"type": "string", "format": "binary", "description": "JSONL, with a file name"}
    seconds = {"type": "integer", "minimum": MIN_KEPT_S, "maximum": KEPT_S}
    fields = {
        FILE: content,
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": seconds,
    }
    return {"type": "object", "required": [FILE, "purpose"], "properties": fields}


class FileEndpoints:
    """`uploads`: a folder for files while they arrive; None: that of temporary files."""

    def __init__(self, store: BatchStore, uploads: str | None) -> None:
        self.store = store
        self.uploads = Uploads(MAX_FILE_MB, uploads)

    def routes(self) -> list[OperationRoute]:
        others = self.list_files, self.retrieve_or_delete, FileContent(self.store)
        return routes_of(self.upload, *others)

    @Operation(
        "POST /v1/files", "Upload the input file of a batch", FileObject, {FORM: file_form()}
    )
    async def upload(self, request: Request) -> FileObject:
        async with self.uploads.form(request.scope, request.receive) as (form, _):
            fields = form_fields(form)
            kept_s = fields.expires_after.seconds if fields.expires_after else KEPT_S
            namespace, size = namespace_of(request.scope), form.file_bytes

            def add() -> FileObject:
                return form.use_file(
                    lambda path: self.store.add_file(namespace, path, form.filename, size, kept_s)
                )

            return await in_store(add)

    @Operation("GET /v1/files", "The files of the key", FileList, query=FilePage)
    async def list_files(self, request: Request) -> bytes:
        page = convert(dict(request.query_params), FilePage, strict=False)
        namespace = namespace_of(request.scope)
        return await in_store(self.store.list_files, namespace, page, page.purpose)

    @Operation("GET /v1/files/{id}", "A file", FileObject)
    @Operation("DELETE /v1/files/{id}", "Delete a file", Deleted, errors=[400])
    async def retrieve_or_delete(self, request: Request) -> FileObject | Deleted:
        namespace, id = namespace_of(request.scope), request.path_params["id"]
        if request.method == "DELETE":
            await in_store(self.store.delete_file, namespace, id)
            return Deleted(id, "file", deleted=True)
        return await in_store(self.store.file, namespace, id)


def form_fields(form: Form) -> FileFields:
    """Return the checked fields. Raises InvalidInput."""
    document: dict[str, object] = {}
    expires: dict[str, str] = {}
    for name, values in form.fields.items():
        if len(values) > 1:
            raise InvalidInput.at(name, "must be sent once")
        if name.startswith("expires_after[") and name.endswith("]"):
            expires[name[len("expires_after[") : -1]] = values[0]
        else:
            document[name] = values[0]
    if expires:
        document["expires_after"] = expires
    return convert(document, FileFields, strict=False)


@Operation("GET /v1/files/{id}/content", "The content of a file", {"application/octet-stream": {}})
class FileContent:
    """An ASGI app that sends the content of a file."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self._threads = CapacityLimiter(READER_THREADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id, threads = scope["path_params"]["id"], self._threads
        file = await in_store(self.store.file, namespace_of(scope), id, limiter=threads)
        # a piece in the connection's buffer, and one that waits for room in it
        scope["app"].count_body(scope, min(file.bytes, 2 * CHUNK_BYTES))
        next_piece = self.store.next_piece
        piece = await in_store(next_piece, id, 0, limiter=threads)  # before the response begins

        async def send_pieces(piece: bytes, sent: int) -> None:
            headers = [(b"content-type", b"application/octet-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece:
                message = {"type": "http.response.body", "body": piece, "more_body": True}
                await send_at_pace(send, scope["transfer"], message)
                sent += len(piece)
                piece = await in_store(next_piece, id, sent, limiter=threads)
            await send({"type": "http.response.body", "body": b""})

        # uvicorn's `send` says nothing about a client that has gone
        incoming = IncomingRequest(scope, receive, NO_DEADLINES)
        await while_connected(incoming, [send_pieces(piece, 0)], "")
