"""`GET /`: a page for browsers, lines of curl for everybody else; `/assets/…`: the page's files.

Nothing here needs a key or a place in the queue: the page asks for the key, and the endpoints check
it. Files are read once, at the start. What the page does is in assets/, beginning with page.js.
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
from server.web.examples import ASSETS, MASK, curl_examples

PATH = "/assets/{name}"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
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
        "require-trusted-types-for 'script'",  # no text becomes markup
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for by its tag
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_QUALITY = re.compile(r"q=([01](?:\.\d{0,3})?)")


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    tag: str
    media: str

    def answer(self, request: Request, headers: Mapping[str, str]) -> Response:
        """304 for whoever has it."""
        fields = {**headers, "etag": self.tag}
        known = request.headers.get("if-none-match", "")
        if self.tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
            return Response(status_code=304, headers=fields)
        return Response(self.content, headers=fields, media_type=self.media)


def read_file(path: Path) -> File:
    content = path.read_bytes()
    return File(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"', MEDIA[path.suffix])


class Assets:
    """The page's files, by name; its icon is at /favicon.ico too, for a browser's tab."""

    def __init__(self) -> None:
        paths = [path for path in ASSETS.iterdir() if path.suffix in MEDIA]
        self.files = {path.name: read_file(path) for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if (file := self.files.get(request.path_params.get("name", "icon.svg"))) is None:
            raise HttpError(404, "the page has no such file")
        await file.answer(request, HEADERS)(scope, receive, send)


@dataclass(eq=False)
class IndexPage:
    """`GET /`."""

    settings: Settings
    worker_client: WorkerClient
    page: File

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["counted_as"] = PATH  # apart from the pipeline's times
        request = Request(scope)
        headers = {**HEADERS, "vary": "accept"}
        if prefers_html(request.headers.get("accept", "")):
            policy = {"content-security-policy": POLICY}
            answer = self.page.answer(request, headers | policy)
        else:
            answer = Response(self.lines(request), headers=headers, media_type="text/plain")
        await answer(scope, receive, send)

    def lines(self, request: Request) -> str:
        """What can be typed, as text."""
        host = request.headers.get("host", "")
        address = f"{request.scope['scheme']}://{host if _HOST.fullmatch(host) else 'localhost'}"
        address += request.scope.get("root_path", "")
        mask = MASK
        if (
            "pipeline" in self.worker_client.models
            and self.worker_client.refusal("pipeline") is None
        ):
            mask = self.worker_client.models["pipeline"].engine.info.mask or mask
        lines = curl_examples(self.settings, address, mask)
        said = "\n\n".join(f"# {each.about}\n{each.command}" for each in lines)
        more = f"# In a browser there is a page: {address}/\n# All there is: {address}/openapi.json"
        return f"# onequeue {__version__}\n\n{said}\n\n{more}\n"


def prefers_html(accept: str) -> bool:
    """Whether HTML is asked for by name, and plain text not more so."""
    qualities: dict[str, float] = {}
    for each in accept.lower().split(","):
        media, *parameters = [part.strip() for part in each.split(";")]
        stated = [part for part in parameters if part.startswith("q=")]
        quality = _QUALITY.fullmatch(stated[0] if stated else "q=1")
        qualities[media] = float(quality[1]) if quality else 0.0
    return 0 < qualities.get("text/html", 0) >= qualities.get("text/plain", 0)
