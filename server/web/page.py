"""`GET /`: the page for browsers, curl examples for other clients; `/assets/…`: the page's files.

No API key and no slot of the queue is needed here: the page asks the user for a key, and the
endpoints check it. Files are read once, at startup. The page's code is in assets/; page.js is its
entry point.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server import __version__
from server.core.settings import Settings
from server.core.worker_client import WorkerClient
from server.http.errors import HttpError
from server.http.operation import HTML, TEXT, Operation
from server.web.examples import ASSETS, MASK, curl_examples
from worker.messages.protocol import ModelInfo

ASSETS_PATH = "/assets/{name}"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text never becomes markup
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "cache-control": "no-cache",  # cached, and revalidated by the etag
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
MAX_LIST_HEADER = 1000  # characters of Accept and If-None-Match that are read
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_QUALITY = re.compile(r"q=([01](?:\.\d{0,3})?)")


@Operation(
    "GET /",
    "A page for browsers; examples with curl for other clients",
    {HTML: {"type": "string"}, TEXT: {"type": "string"}},
)
@dataclass(eq=False)
class IndexPage:
    """`GET /`."""

    settings: Settings
    worker_client: WorkerClient
    page: "AssetFile"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["counted_as"] = ASSETS_PATH  # keeps the page out of the pipeline's latency
        request = Request(scope)
        headers = {**HEADERS, "vary": "accept"}
        if prefers_html(request.headers.get("accept", "")):
            policy = {"content-security-policy": CONTENT_SECURITY_POLICY}
            response = self.page.response(request, headers | policy)
        else:
            response = Response(self.plain_text(request), headers=headers, media_type="text/plain")
        await response(scope, receive, send)

    def info(self, name: str) -> ModelInfo | None:
        """Return a model's description; None while it is not served."""
        client = self.worker_client
        if name not in client.models or client.refusal(name):
            return None
        return client.models[name].info

    def plain_text(self, request: Request) -> str:
        """Return curl examples for the served models."""
        host = request.headers.get("host", "")
        address = f"{request.scope['scheme']}://{host if _HOST.fullmatch(host) else 'localhost'}"
        address += request.scope.get("root_path", "")
        pipeline, language = self.info("pipeline"), self.info("generation")
        mask = pipeline.mask if pipeline and pipeline.mask else MASK
        chats = language is None or language.has_chat_template
        examples = curl_examples(self.settings, address, mask, chats)
        lines = "\n\n".join(f"# {about}\n{command}" for about, command in examples.items())
        more = f"# Page for browsers: {address}/\n# All endpoints: {address}/openapi.json"
        return f"# onequeue {__version__}\n\n{lines}\n\n{more}\n"


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header names HTML, with at least the quality of plain text. A long
    one is read in part."""
    qualities: dict[str, float] = {}
    for media_range in accept[:MAX_LIST_HEADER].lower().split(","):
        media, *parameters = [part.strip() for part in media_range.split(";")]
        stated = [part for part in parameters if part.startswith("q=")]
        quality = _QUALITY.fullmatch(stated[0] if stated else "q=1")
        qualities[media] = float(quality[1]) if quality else 0.0
    return 0 < qualities.get("text/html", 0) >= qualities.get("text/plain", 0)


@Operation(f"GET {ASSETS_PATH}", "A file of the page", {"*/*": {}})
@Operation("GET /favicon.ico", "The icon of the page", {"image/svg+xml": {}})
class Assets:
    """`GET /assets/…`, and the icon at /favicon.ico."""

    def __init__(self) -> None:
        paths = [path for path in ASSETS.iterdir() if path.suffix in MEDIA_TYPES]
        self.files = {path.name: read_file(path) for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if (file := self.files.get(request.path_params.get("name", "icon.svg"))) is None:
            raise HttpError(404, "the page has no such file")
        await file.response(request, HEADERS)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class AssetFile:
    content: bytes
    etag: str
    media: str

    def response(self, request: Request, headers: Mapping[str, str]) -> Response:
        """Return the file, or 304 if the client has it."""
        fields = {**headers, "etag": self.etag}
        known = request.headers.get("if-none-match", "")[:MAX_LIST_HEADER]
        if self.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=fields)
        return Response(self.content, headers=fields, media_type=self.media)


def read_file(path: Path) -> AssetFile:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return AssetFile(content, etag, MEDIA_TYPES[path.suffix])
