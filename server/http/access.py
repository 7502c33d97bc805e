"""Access control: API keys, checked before a request is routed, and cross-origin requests."""

import hmac
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope

from server.core.settings import Settings
from server.http.errors import HttpError
from server.http.json import to_json
from server.http.paths import route_path

# No key is needed here: probes of a load balancer and a browser's request for an icon have none.
OPEN_PATHS = {"/health", "/ready", "/ping", "/metrics", "/version", "/favicon.ico"}


def key_from_headers(scope: Scope, keys: Sequence[bytes]) -> bytes:
    """Return the request's API key; empty where none is needed. HttpError (401) if it is not one
    of `keys`."""
    if scope["method"] == "OPTIONS" or is_open(scope["method"], route_path(scope)):
        return b""
    key = key_in(scope)
    if not is_one_of(key, keys):
        message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        raise HttpError(401, message, headers=[(b"www-authenticate", b"Bearer")])
    return key


def key_in(scope: Scope) -> bytes:
    headers = dict(reversed(scope["headers"]))  # the first of repeated headers
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return bytes(key.strip())


def is_one_of(key: bytes, keys: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(key, valid) for valid in keys]
    return any(matches)


def check_admin(scope: Scope, settings: Settings) -> None:
    """Raise HttpError (403) unless the request may change which models are loaded."""
    if settings.admin_keys:
        if is_one_of(key_in(scope), [key.encode() for key in settings.admin_keys]):
            return
        reason = "a key of ADMIN_KEYS is needed"
    elif settings.api_keys:
        reason = "a key of ADMIN_KEYS is needed, and none is set"
    elif settings.model_control:
        return
    else:
        reason = "the server has neither ADMIN_KEYS nor MODEL_CONTROL=1"
    raise HttpError(403, f"models are not loaded or unloaded by this request: {reason}")


def client_of(scope: Scope) -> bytes:
    """Return whose share a request counts for: its API key or, without keys, its address. An IPv6
    client has a network of addresses."""
    return scope["api_key"] or network_of(scope["client"][0] if scope.get("client") else "")


@lru_cache(maxsize=1024)
def network_of(address: str) -> bytes:
    try:
        parsed = ip_address(address)
    except ValueError:  # such as that of a Unix socket
        return address.encode()
    bits = 64 if parsed.version == 6 else 32
    return ip_network((parsed, bits), strict=False).network_address.packed


def is_open(method: str, path: str) -> bool:
    """Return whether no key is needed: for probes, and for the page, which asks for one itself."""
    is_page = path == "/" and method in ("GET", "HEAD")
    return is_page or path in OPEN_PATHS or path.startswith("/assets/")


class Cors(CORSMiddleware):
    """Starlette's middleware, with the error envelope for a refused preflight request."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = HttpError(400, bytes(response.body).decode())
        return Response(to_json(error.document), 400, media_type="application/json")
