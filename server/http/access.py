"""Who may come in: API keys, and pages from elsewhere."""

import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope

from server.http.errors import HttpError
from server.http.json import to_json

# These need no key: a load balancer's probes have none, nor has a browser that looks for an icon.
OPEN_PATHS = {"/health", "/ready", "/ping", "/metrics", "/version", "/favicon.ico"}


def key_of(scope: Scope, keys: Sequence[bytes]) -> bytes:
    """The request's API key, empty where it needs none; HttpError (401) if it is none of `keys`."""
    if scope["method"] == "OPTIONS" or is_open(scope["method"], get_route_path(scope)):
        return b""
    headers = dict(reversed(scope["headers"]))  # of several, the first
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    matches = [hmac.compare_digest(key.strip(), known) for known in keys]
    if not any(matches):
        needed = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        raise HttpError(401, needed, headers=[(b"www-authenticate", b"Bearer")])
    return bytes(key.strip())


def is_open(method: str, path: str) -> bool:
    """Whether no key is needed: by probes, and by the page, which asks for one itself."""
    page = path == "/" and method in ("GET", "HEAD")
    return page or path in OPEN_PATHS or path.startswith("/assets/")


class Cors(CORSMiddleware):
    """Starlette's, with our envelope for a preflight that is refused."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = HttpError(400, bytes(response.body).decode())
        return Response(to_json(refused.document), 400, media_type="application/json")
