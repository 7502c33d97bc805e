"""Images behind links: fetched from public addresses alone, within bounds of bytes and time.

    link → is its host allowed? → addresses → all public? → connected to one of them → redirected?

Between the check of an address and the connection nothing is looked up again: the backend below
resolves, checks and connects, while TLS and the Host header keep the name. Each redirect is a
link like the first. Nothing but the default headers goes out, no proxy is asked.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from batching.errors import InvalidInput
from server.core.metrics import Metrics

AT_ONCE = 16  # connections of the whole server
FETCH_S = 10.0  # an image, with its redirects
MOST_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
UNICAST = ipaddress.IPv6Network("2000::/3")
TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [
    ("Accept", "image/*"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
    ("User-Agent", "onequeue"),
]


class NotFetched(Exception):
    """Why; for the client to read."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the whole internet, and leads to no other inside."""
    ip = ipaddress.ip_address(address)
    if ip.is_multicast or ip.is_reserved or not ip.is_global:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in UNICAST and not (ip.ipv4_mapped or ip.sixtofour or ip.teredo)
    return True


async def addresses_of(host: str, port: int) -> list[str]:
    """Of a name, or of an address in whatever form the system reads."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PublicBackend(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that it has checked."""

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
            addresses = await addresses_of(host, port)
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


@dataclass(eq=False)
class Fetcher:
    """`hosts`: from which images may be fetched, `any`, or none. `most_bytes`: of an image."""

    hosts: tuple[str, ...]
    most_bytes: int
    metrics: Metrics

    def __post_init__(self) -> None:
        self.allowed = {host.lower() for host in self.hosts}
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.pool = httpcore.AsyncConnectionPool(
            max_keepalive_connections=0, network_backend=PublicBackend()
        )

    def check(self, link: str, param: str) -> None:
        """InvalidInput for a link that is not even tried."""
        try:
            self._url(link)
        except NotFetched as error:
            raise InvalidInput.at(param, str(error)) from None

    async def fetch(self, link: str, param: str, count: Callable[[int], None]) -> bytes:
        """The bytes behind a link. `count` is told how many there are while they arrive, and may
        raise. InvalidInput says why there are none."""
        try:
            async with self.turns, asyncio.timeout(FETCH_S):
                with self.metrics.fetch_seconds.time():
                    return await self._follow(link, count)
        except TimeoutError:
            why = f"was not fetched within {FETCH_S:g} seconds"
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError):
            why = "cannot be fetched: the connection to its host fails"
        except NotFetched as error:
            why = f"cannot be fetched: {error}"
        raise InvalidInput.at(param, why)

    async def _follow(self, link: str, count: Callable[[int], None]) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            url = self._url(link)
            async with self.pool.stream("GET", str(url), headers=HEADERS) as response:
                headers = httpx.Headers(response.headers)
                if response.status not in REDIRECTS or "location" not in headers:
                    return await self._read(response, headers, count)
                try:
                    link = str(url.join(headers["location"]))
                except httpx.InvalidURL:
                    raise NotFetched("it is redirected to what is no link") from None
        raise NotFetched(f"it is redirected more than {MOST_REDIRECTS} times")

    async def _read(
        self, response: httpcore.Response, headers: httpx.Headers, count: Callable[[int], None]
    ) -> bytes:
        kind = headers.get("content-type", TYPES[0]).strip().lower()
        length = headers.get("content-length", "0")
        if response.status != 200:
            raise NotFetched(f"its host answers {response.status}")
        if not kind.startswith(TYPES):
            raise NotFetched(f"it is {kind.partition(';')[0][:50]!r}, no image")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise NotFetched("its host compresses what it was not asked to")
        large = f"it has more than {self.most_bytes / 1_000_000:g} MB"
        if length.isdigit() and int(length[:20]) > self.most_bytes:
            raise NotFetched(large)
        chunks, size = [], 0
        async for chunk in response.aiter_stream():
            size += len(chunk)
            if size > self.most_bytes:
                raise NotFetched(large)
            count(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _url(self, link: str) -> httpx.URL:
        """NotFetched for what is not allowed, whatever it leads to."""
        if not self.allowed:
            raise NotFetched(
                "images are not fetched here: send a data: URL (whoever runs this server allows "
                "links by the setting IMAGE_FETCH=host,… or IMAGE_FETCH=any)"
            )
        try:
            url = httpx.URL(link)
        except httpx.InvalidURL:
            raise NotFetched("it is no link that can be read") from None
        if url.scheme not in PORTS or not url.host:
            raise NotFetched("only http:// and https:// links to a host are fetched")
        if url.userinfo:
            raise NotFetched("links with a user's name or password are not fetched")
        if "any" not in self.allowed and url.host.lower() not in self.allowed:
            raise NotFetched(f"IMAGE_FETCH does not name the host {url.host[:100]!r}")
        return url
