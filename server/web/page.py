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
from starlette.types import Receive, Scope, Send

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
FILES = StaticFiles(directory=ASSETS)
MAX_TAGS = 1000  # bytes of If-None-Match that are read


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["counted_as"] = ASSETS_PATH  # keeps the page out of the pipeline's latency
        request = Request(scope)
        headers = {**HEADERS, "vary": "accept"}
        if "text/html" in request.headers.get("accept", "").lower():
            headers["content-security-policy"] = CONTENT_SECURITY_POLICY
            return await send_file(scope, receive, send, "index.html", headers)
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
class ReferencePage:
    """`GET /docs`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**HEADERS, "content-security-policy": CONTENT_SECURITY_POLICY}
        await send_file(scope, receive, send, "reference.html", headers)


@Operation(f"GET {ASSETS_PATH}", "A file of the page", {"*/*": {}})
@Operation("GET /favicon.ico", "The icon of the page", {"image/svg+xml": {}})
class Assets:
    """`GET /assets/…`, and the icon at /favicon.ico."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"].get("name", "icon.svg")
        await send_file(scope, receive, send, name, HEADERS)


async def send_file(
    scope: Scope, receive: Receive, send: Send, name: str, headers: Mapping[str, str]
) -> None:
    """Send a file of the page, or 304 if the client has it. Files are sent whole."""
    tags = [(key, value[:MAX_TAGS]) for key, value in scope["headers"] if key == b"if-none-match"]
    scope = {**scope, "headers": tags}
    response = await FILES.get_response(name, scope)
    response.headers.update(headers)
    await response(scope, receive, send)
