"""`GET /`: the page for browsers, curl examples for other clients; `GET /docs`: the reference of
the API, rendered from /openapi.json; `/assets/…`: the files of both.

No API key and no slot of the queue is needed here: the page asks the user for a key, and the
endpoints check it. The code is in assets/; page.js and reference.js are the entry points.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from server import __version__
from server.core.settings import Settings
from server.core.worker_client import WorkerClient
from server.http.cross_site import host_name
from server.http.operation import HTML, TEXT, Operation
from server.web.examples import ASSETS, MASK, curl_examples
from worker.messages.protocol import ModelInfo

ASSETS_PATH = "/assets/{name}"
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
PAGE_HEADERS = {**HEADERS, "content-security-policy": CONTENT_SECURITY_POLICY}
FILES = StaticFiles(directory=ASSETS)


@dataclass(eq=False)
class IndexPage:
    settings: Settings
    worker_client: WorkerClient

    @Operation(
        "GET /",
        "A page for browsers; examples with curl for other clients",
        {HTML: {"type": "string"}, TEXT: {"type": "string"}},
    )
    async def index(self, request: Request) -> Response:
        request.scope["counted_as"] = ASSETS_PATH  # keeps the page out of the pipeline's latency
        if "text/html" in request.headers.get("accept", "").lower():
            return await file_response(request, "index.html", {**PAGE_HEADERS, "vary": "accept"})
        headers = {**HEADERS, "vary": "accept"}
        return Response(self.plain_text(request), headers=headers, media_type="text/plain")

    def info(self, name: str) -> ModelInfo | None:
        """Return a model's description; None while it is not served."""
        client = self.worker_client
        if name not in client.models or client.refusal(name):
            return None
        return client.models[name].info

    def plain_text(self, request: Request) -> str:
        host = request.headers.get("host", "")
        address = f"{request.scope['scheme']}://{host if host_name(host) else 'localhost'}"
        address += request.scope.get("root_path", "")
        pipeline, language = self.info("pipeline"), self.info("generation")
        mask = pipeline.mask if pipeline and pipeline.mask else MASK
        chats = language is None or language.has_chat_template
        examples = curl_examples(self.settings, address, mask, chats)
        lines = "\n\n".join(f"# {about}\n{command}" for about, command in examples.items())
        more = f"# Page for browsers: {address}/\n# All endpoints: {address}/docs"
        return f"# onequeue {__version__}\n\n{lines}\n\n{more}\n"


@Operation("GET /docs", "The reference of the API, for browsers", {HTML: {"type": "string"}})
async def reference(request: Request) -> Response:
    return await file_response(request, "reference.html", PAGE_HEADERS)


@Operation(f"GET {ASSETS_PATH}", "A file of the page", {"*/*": {}})
@Operation("GET /favicon.ico", "The icon of the page", {"image/svg+xml": {}})
async def asset(request: Request) -> Response:
    return await file_response(request, request.path_params.get("name", "icon.svg"), HEADERS)


async def file_response(request: Request, name: str, headers: Mapping[str, str]) -> Response:
    """Return a file of the page, or 304 if the client has it by its tag: another version's file may
    have the same date. Files are sent whole."""
    request.scope["headers"] = [
        header
        for header in request.scope["headers"]
        if header[0] not in (b"range", b"if-modified-since")
    ]
    response = await FILES.get_response(name, request.scope)
    response.headers.update(headers)
    return response
