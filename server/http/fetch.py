"""Fetch files of chats by URL, from public addresses only, within limits of bytes and time.

    URL → is its host allowed? → addresses → all public? → connect to one of them → redirect?

An address is not looked up again between the check and the connection: `PublicBackend` resolves,
checks and connects, while TLS and the Host header keep the name. A redirect is checked like the
first URL. Requests carry default headers only, and no proxy is used.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any

import httpcore
import httpx

from batching.errors import InvalidInput
from server.core.metrics import Metrics

MAX_CONNECTIONS = 16  # of the whole server
FETCH_S = 10.0  # one file, with its redirects
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
UNICAST = ipaddress.IPv6Network("2000::/3")
# Metadata services of Oracle Cloud and Azure. Those of other clouds are not globally routed.
METADATA = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("168.63.129.16"))
BINARY = ("application/octet-stream", "binary/octet-stream")
CONTAINERS = ("application/ogg", "video/mp4", "video/webm", "video/ogg")  # of recordings, too
MEDIA_TYPES = {
    "image": ("image/", *BINARY),
    "audio": ("audio/", *CONTAINERS, *BINARY),
    "video": ("video/", *BINARY),
}
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [("Accept-Encoding", "identity"), ("Connection", "close"), ("User-Agent", "onequeue")]


class NotFetched(Exception):
    """The message is the reason, for the client."""


class Fetcher:
    """`hosts`: those from which files may be fetched, or `any`; `max_bytes`: of one file."""

    def __init__(self, hosts: Iterable[str], max_bytes: int, metrics: Metrics) -> None:
        self.max_bytes, self.metrics = max_bytes, metrics
        self.allowed = {host.lower() for host in hosts}
        self.slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self.pool = httpcore.AsyncConnectionPool(
            max_keepalive_connections=0, network_backend=PublicBackend()
        )

    async def fetch(
        self, link: str, param: str, count: Callable[[int], None], kind: str = "image"
    ) -> bytes:
        """Return the bytes of a URL of that kind of content.

        `count` is called with the number of bytes of each chunk and may raise. Raises InvalidInput
        with the reason why the file cannot be fetched."""
        try:
            async with self.slots, asyncio.timeout(FETCH_S):
                with self.metrics.fetch_seconds.time():
                    return await self._follow(link, count, kind)
        except TimeoutError:
            reason = f"was not fetched within {FETCH_S:g} seconds"
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError):
            reason = "cannot be fetched: the connection to its host fails"
        except NotFetched as error:
            reason = f"cannot be fetched: {error}"
        raise InvalidInput.at(param, reason)

    async def _follow(self, link: str, count: Callable[[int], None], kind: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            url = self._parse(link)
            async with self.pool.stream(
                "GET", str(url), headers=[("Accept", f"{kind}/*"), *HEADERS]
            ) as response:
                headers = httpx.Headers(response.headers)
                if response.status not in REDIRECTS or "location" not in headers:
                    return await self._read(response, headers, count, kind)
                try:
                    link = str(url.join(headers["location"]))
                except (httpx.InvalidURL, UnicodeError):
                    raise NotFetched("it redirects to an invalid URL") from None
        raise NotFetched(f"it redirects more than {MAX_REDIRECTS} times")

    async def _read(
        self,
        response: httpcore.Response,
        headers: httpx.Headers,
        count: Callable[[int], None],
        kind: str,
    ) -> bytes:
        media = headers.get("content-type", BINARY[0]).strip().lower()
        length = headers.get("content-length", "0")
        if response.status != 200:
            raise NotFetched(f"its host responds with status {response.status}")
        if not media.startswith(MEDIA_TYPES[kind]):
            raise NotFetched(f"its content type is {media.partition(';')[0][:50]!r}, not {kind}/…")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise NotFetched("its host compresses the response though identity was requested")
        too_large = f"it is larger than {self.max_bytes / 1_000_000:g} MB"
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise NotFetched(too_large)
        chunks, size = [], 0
        async for chunk in response.aiter_stream():
            size += len(chunk)
            if size > self.max_bytes:
                raise NotFetched(too_large)
            count(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _parse(self, link: str) -> httpx.URL:
        """Raise NotFetched for a URL that is not allowed, without any look-up."""
        if not self.allowed:
            raise NotFetched(
                "this server fetches no files: send a data: URL (the operator allows URLs by the "
                "setting IMAGE_FETCH=host,… or IMAGE_FETCH=any)"
            )
        try:
            url = httpx.URL(link)
            host = url.host.lower()
        except (httpx.InvalidURL, UnicodeError):  # UnicodeError: for a broken xn-- name
            raise NotFetched("it is not a valid URL") from None
        if url.scheme not in PORTS or not host:
            raise NotFetched("only http:// and https:// URLs with a host are fetched")
        if url.userinfo:
            raise NotFetched("URLs with a user name or password are not fetched")
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise NotFetched(f"its port is {url.port}; 1 to 65535 are accepted")
        if "any" not in self.allowed and host not in self.allowed:
            raise NotFetched(f"IMAGE_FETCH does not name the host {host[:100]!r}")
        return url


class PublicBackend(httpcore.AsyncNetworkBackend):
    """Connect to the addresses that have been checked."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await resolve(host, port)
        except (OSError, UnicodeError):
            raise NotFetched("there is no such host") from None
        if not all(map(is_public, addresses)):
            raise NotFetched("its host has an address that is not public")
        for address in addresses[:-1]:
            try:
                return await self._backend.connect_tcp(address, port, timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._backend.connect_tcp(addresses[-1], port, timeout)


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, or of an address in any form that the system reads."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def is_public(address: str) -> bool:
    """Return whether an IP address is globally routed and embeds no other address."""
    ip = ipaddress.ip_address(address)
    if ip.is_multicast or ip.is_reserved or not ip.is_global or any(ip in n for n in METADATA):
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in UNICAST and not (ip.ipv4_mapped or ip.sixtofour or ip.teredo)
    return True
