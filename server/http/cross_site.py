"""Requests that web pages of other sites make: refused while no API key is needed.

A browser sends a page's POST without asking the server first, and a page whose name is resolved to
127.0.0.1 (DNS rebinding) reads the responses too. API keys prevent both.
"""

import re
import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import Scope

from server.core.settings import Settings
from server.http.errors import HttpError
from server.http.paths import route_path

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PROBES = ("/health", "/ready", "/ping")
# No public domain has a name that ends so.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HOST = re.compile(
    r"(?:\[(?P<address>[\da-fA-F:.]{2,45})\]|(?P<name>[\w.-]{1,254}))(?::\d{1,5})?", re.ASCII
)


class CrossSiteRules:
    """The rules for a request's origin and for its Host header."""

    def __init__(self, settings: Settings) -> None:
        self._origins = settings.cors_origins
        self._hosts = {name.lower().removesuffix(".") for name in settings.allowed_hosts}
        self._local_names = {"localhost", socket.gethostname().lower()}

    def check(self, scope: Scope) -> None:
        """Raise HttpError: 403 for a request of another site's page, 421 for a Host header that may
        be the name of another site."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers, host)
        server = scope.get("server")  # the socket's address; None for a Unix socket
        if server and is_loopback(server[0]) and route_path(scope) not in PROBES:
            self._check_host(host)

    def _check_origin(self, headers: dict[bytes, bytes], host: str) -> None:
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is None:
            is_foreign = origin is not None and not is_same_origin(origin.decode("latin-1"), host)
        else:
            is_foreign = site.lower() in (b"cross-site", b"same-site")
        name = (origin or b"null").decode("latin-1")
        if is_foreign and "*" not in self._origins and name not in self._origins:
            message = f"pages of Origin {name[:100]!r} need CORS_ORIGINS, or API_KEYS and a key"
            raise HttpError(403, message, "Origin")

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if not (
            "*" in self._hosts
            or name in self._local_names
            or name in self._hosts
            or name.endswith(LOCAL_SUFFIXES)
            or parse_address(name)
        ):
            accepted = "localhost, an IP address, this machine's name, or a name in ALLOWED_HOSTS"
            raise HttpError(421, f"Host must be {accepted}, not {name[:100]!r}", "Host")


def host_name(host: str) -> str:
    """Return the name or address of a Host header, in lower case; empty if it is malformed."""
    if (match := _HOST.fullmatch(host)) is None:
        return ""
    return (match["address"] or match["name"]).lower().removesuffix(".")


@lru_cache(maxsize=64)
def is_loopback(address: str) -> bool:
    """Return whether an address is one of 127.0.0.0/8 or ::1, also where IPv6 is mapped to IPv4."""
    parsed = parse_address(address)  # None for a name, of a test client
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return parsed is not None and (mapped or parsed).is_loopback


@lru_cache(maxsize=256)
def parse_address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def is_same_origin(origin: str, host: str) -> bool:
    """Compare the host and port of an Origin with a Host header. A proxy may have changed the
    scheme: it only determines the default port."""
    scheme, _, authority = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(authority) and authority.removesuffix(port) == host.lower().removesuffix(port)
