"""Images by URL: fetched within limits, from public addresses only, over real sockets.

The fixture `loopback_is_public` makes a loopback server count as public."""

import asyncio
import inspect
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpcore
import pytest

from batching.errors import InvalidInput
from server.core.metrics import Metrics
from server.http import fetch
from server.http.fetch import Fetcher, is_public, resolve

ALLOWED = "127.0.0.1", "elsewhere.test", "here.test"
IMAGE = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 3\r\n\r\npng"

Reply = bytes | Callable[[socket.socket], None]


@contextmanager
def replying(
    *replies: Reply, secure: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """Run a server that replies to one connection after the other; yield its port and requests."""
    listener, requests = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def wrapped(accepted: socket.socket) -> socket.socket:
        return secure.wrap_socket(accepted, server_side=True) if secure else accepted

    def serve() -> None:
        for reply in replies:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), wrapped(accepted) as client:
                requests.append(client.recv(10_000))
                reply(client) if callable(reply) else client.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def fetched(link: str, hosts: tuple[str, ...] = ("any",), max_bytes: int = 1000) -> bytes:
    fetcher = Fetcher(hosts, max_bytes, Metrics(lambda: 0.0))
    return asyncio.run(fetcher.fetch(link, "here", lambda more: None))


def refusal(link: str, **more: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        fetched(link, **more)
    assert refused.value.param == "here"
    return str(refused.value)


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%1", "fc00::1", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "2001:db8::1"),
        *("2002:7f00:1::", "2001:0:4136:e378::1", "100::1"),
        *("192.0.0.192", "168.63.129.16", "fd00:ec2::254"),  # metadata services
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:2800:21f::1"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "localhost"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::]", "[fe80::1]", "169.254.169.254", "10.0.0.1"),
    ],
)
def test_a_private_host_is_refused_in_every_notation(host: str) -> None:
    with replying(IMAGE) as (port, requests):
        message = refusal(f"http://{host}:{port}/a.png")
        reasons = ("not public", "no such host", "valid URL")
        assert any(reason in message for reason in reasons), message
        assert not requests


@pytest.mark.usefixtures("loopback_is_public")
def test_an_image_is_fetched_with_default_headers() -> None:
    with replying(IMAGE) as (port, requests):
        assert fetched(f"http://127.0.0.1:{port}/a.png?b=c#d") == b"png"
    lines = requests[0].split(b"\r\n")
    assert lines[0] == b"GET /a.png?b=c HTTP/1.1"
    names = {line.partition(b":")[0].lower() for line in lines[1:] if line}
    assert names == {b"host", b"accept", b"accept-encoding", b"connection", b"user-agent"}


def test_no_url_is_fetched_without_the_setting() -> None:
    assert "IMAGE_FETCH" in refusal("http://127.0.0.1:1/", hosts=())
    message = refusal("http://127.0.0.1:1/", hosts=("example.com",))
    assert "IMAGE_FETCH does not name the host '127.0.0.1'" in message


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("https://user:secret@example.com/a.png", "password"),
        ("ftp://example.com/a.png", "only http"),
        ("file:///etc/passwd", "only http"),
        ("http:///a.png", "only http"),
        ("http://[::1/a.png", "not a valid URL"),
        ("http://exa mple.com\x00/", "no"),
        *((f"http://example.com:{port}/", "1 to 65535") for port in (0, 65536, 99999)),
        *((f"http://{host}/", "not a valid URL") for host in ("xn--", "xn--a.com", "xn--55555577")),
    ],
)
def test_other_kinds_of_urls_are_refused(link: str, message: str) -> None:
    assert message in refusal(link)


@pytest.mark.usefixtures("loopback_is_public")
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "responds with status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\nhi", "'text/html', not image"),
        (IMAGE.replace(b": 3", b": 1001"), "larger than 0.001 MB"),
        (IMAGE.replace(b"Length: 3", b"Encoding: gzip"), "compresses"),
        (IMAGE[:-2], "connection to its host fails"),
        (b"nonsense\r\n\r\n", "connection to its host fails"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n", "not public"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[fe80::1]/\r\n\r\n", "not public"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "only http"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://u:p@127.0.0.1/\r\n\r\n", "password"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://other.test/\r\n\r\n", "does not name the host"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[::1/\r\n\r\n", "invalid URL"),
    ],
)
def test_unusable_replies_are_refused(reply: bytes, message: str) -> None:
    hosts = *ALLOWED, "10.0.0.1", "fe80::1"
    with replying(reply) as (port, _):
        assert message in refusal(f"http://127.0.0.1:{port}/", hosts=hosts)


@pytest.mark.usefixtures("loopback_is_public")
def test_redirects_are_followed_up_to_a_limit() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: /next\r\n\r\n"
    with replying(moved, moved, moved, IMAGE) as (port, requests):
        assert fetched(f"http://127.0.0.1:{port}/first") == b"png"
        assert [request.split()[1] for request in requests] == [b"/first", *[b"/next"] * 3]
    with replying(*[moved] * 5) as (port, requests):
        assert "more than 3 times" in refusal(f"http://127.0.0.1:{port}/first")
        assert len(requests) == 4


@pytest.mark.usefixtures("loopback_is_public")
def test_an_endless_body_is_read_up_to_the_limit() -> None:
    sent = []

    def pour(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        while True:
            sent.append(client.send(b"x" * 1000))

    with replying(pour) as (port, _):
        message = refusal(f"http://127.0.0.1:{port}/", max_bytes=500_000)
        assert "larger than 0.5 MB" in message
    assert sum(sent) < 20_000_000  # of the sockets' buffers


@pytest.mark.usefixtures("loopback_is_public")
def test_a_slow_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 0.05)
    left = threading.Event()

    def stall(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\nx")
        client.settimeout(60)
        client.recv(1)  # until the other end closes
        left.set()

    with replying(stall) as (port, _):
        assert "within 0.05 seconds" in refusal(f"http://127.0.0.1:{port}/")
        assert left.wait(60)


def test_a_name_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second look-up would give a private address; the checked one is used."""
    lookups, connected = [], []

    async def changing(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["93.184.215.14"] if len(lookups) == 1 else ["127.0.0.1"]

    class Backend(httpcore.AsyncNetworkBackend):
        async def connect_tcp(self, host: str, *rest: Any, **more: Any) -> Any:
            connected.append(host)
            raise httpcore.ConnectError

    monkeypatch.setattr(fetch, "resolve", changing)
    monkeypatch.setattr(httpcore, "AnyIOBackend", Backend)
    assert "connection to its host fails" in refusal("https://here.test/a.png")
    assert (lookups, connected) == (["here.test"], ["93.184.215.14"])
    assert "not public" in refusal("https://here.test/a.png")
    assert connected == ["93.184.215.14"]


def test_a_name_with_one_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def both(host: str, port: int) -> list[str]:
        return ["93.184.215.14", "10.0.0.1"]

    monkeypatch.setattr(fetch, "resolve", both)
    assert "not public" in refusal("https://here.test/a.png")


@pytest.mark.usefixtures("loopback_is_public")
def test_the_host_header_keeps_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(fetch, "resolve", here)
    with replying(IMAGE) as (port, requests):
        assert fetched(f"http://here.test:{port}/", hosts=ALLOWED) == b"png"
    assert f"\r\nhost: here.test:{port}\r\n".encode() in requests[0].lower()


def test_addresses_come_from_the_system_resolver() -> None:
    assert asyncio.run(resolve("2130706433", 80)) == ["127.0.0.1"]


@pytest.mark.usefixtures("loopback_is_public")
@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl to make certificates")
def test_the_certificate_is_checked_against_the_urls_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    named = ["-addext", "subjectAltName=DNS:here.test", "-keyout", str(key)]
    subprocess.run(
        ["openssl", *options.split(), *named, "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate, key)

    async def addresses(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(fetch, "resolve", addresses)
    uncached = inspect.unwrap(ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", uncached)
    with replying(*[IMAGE] * 3, secure=secure) as (port, requests):
        link = f"https://here.test:{port}/"
        assert "connection to its host fails" in refusal(link)  # no authority has signed it
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "connection to its host fails" in refusal(link.replace("here", "elsewhere"))
        assert not requests
        assert fetched(link) == b"png"
