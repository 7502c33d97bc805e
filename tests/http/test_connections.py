"""Limits of headers, in bytes and time, and error envelopes for malformed HTTP, on real sockets."""

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.http import access, connections
from server.http.connections import MAX_HEADER_BYTES, LimitedProtocol
from server.http.request import MAX_HEADERS
from tests.fakes import FakeRunner
from tests.serving import Parser, Server, metric, read_response, server_fixture, serving, wait_until

START = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
END = b"\r\n\r\n"
SHORT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\ntext"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ntext\r\n"


server = server_fixture(FakeRunner)


@pytest.fixture(scope="module", params=["httptools", "h11"])
def either(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with each of uvicorn's parsers."""
    with serving(FakeRunner, http=request.param) as server:
        yield server


each_parser = pytest.mark.parametrize("http", ["httptools", "h11"])


def connect(server: Server, source: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", server.port)
    client = socket.create_connection(address, timeout=20, source_address=(source, 0))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def http_response(client: socket.socket, to_head: bool = False) -> http.client.HTTPResponse:
    """Read a whole response."""
    client.settimeout(20)
    response = http.client.HTTPResponse(client, method="HEAD" if to_head else None)
    response.begin()
    response.read()
    return response


def send_on(client: socket.socket, first: bytes, again: bytes) -> None:
    """Send `again` without end, until the server responds."""
    responded = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):  # closed while we were sending
            client.sendall(first)
            while not responded.is_set():
                client.sendall(again)

    thread = threading.Thread(target=send)
    thread.start()
    assert client.recv(1, socket.MSG_PEEK)
    responded.set()
    thread.join(20)


def assert_refused(client: socket.socket, status: int, code: str) -> None:
    """Read one error envelope, then the end of the connection."""
    client.settimeout(20)
    response = http.client.HTTPResponse(client)
    response.begin()
    assert response.status == status
    assert response.getheader("content-type") == "application/json"
    assert response.getheader("connection") == "close"
    error = json.loads(response.read())["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert client.recv(1) == b""
    client.close()


ENDLESS = {
    "one line": (START, b"a" * 65_536),
    "small pieces": (START, b"a" * 50),
    "many lines": (START + b"b\r\n", b"A: b\r\n" * 500),
    "a name": (START + b"b\r\n", b"a" * 999),
    "spaces": (START + b"b\r\nA:", b" " * 999),
    "the path": (b"GET /", b"a" * 999),
    "empty lines": (b"\r\n", b"\r\n" * 500),
}


@pytest.mark.parametrize("shape", ENDLESS)
def test_a_header_without_end_gets_431(server: Server, shape: str) -> None:
    with connect(server) as client:
        send_on(client, *ENDLESS[shape])
        assert_refused(client, 431, "headers_too_large")


def test_a_header_of_the_maximum_size_is_accepted(server: Server) -> None:
    fits = b"a" * (MAX_HEADER_BYTES - len(START) - len(END))
    with connect(server) as client:
        for _ in range(2):  # the limit is per request
            client.sendall(START + fits + END)
            assert read_response(client)[0] == 200
        client.sendall(START + fits + b"a" + END)
        assert_refused(client, 431, "headers_too_large")


def test_a_body_does_not_count_as_its_header(server: Server) -> None:
    body = b"a " * MAX_HEADER_BYTES
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nX-Long: " % len(body)
    with connect(server) as client:
        for _ in range(2):
            client.sendall(head + b"a" * 60_000 + END + body)
            assert read_response(client)[0] == 200


def test_the_number_of_headers_is_limited(either: Server) -> None:
    request = b"GET /health HTTP/1.1\r\n%bHost: localhost\r\n\r\n"
    with connect(either) as client:
        for _ in range(2):  # the limit is per request
            client.sendall(request % (b"a:\r\n" * (MAX_HEADERS - 1)))
            assert read_response(client)[0] == 200
        client.sendall(request % (b"a:\r\n" * MAX_HEADERS))
        status, body = read_response(client)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (431, "headers_too_large")
        assert str(MAX_HEADERS) in error["message"]


def test_too_many_headers_are_refused_before_they_are_complete(server: Server) -> None:
    with connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 2))
        assert_refused(client, 431, "headers_too_large")
    with connect(server) as client:  # the fields behind a body
        client.sendall(CHUNKED + b"0\r\n" + b"a:\r\n" * (MAX_HEADERS + 2))
        assert_refused(client, 431, "headers_too_large")


def test_chunks_that_arrive_together_are_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    on_body = HttpToolsProtocol.on_body

    def counted(self: HttpToolsProtocol, body: bytes) -> None:
        nonlocal calls
        calls += 1
        on_body(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = bytes(range(97, 123)) * 2000
    with connect(server) as client:
        for _ in range(2):
            chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in text)
            client.sendall(head + chunks + b"0\r\n\r\n")
            status, body = read_response(client)
            assert (status, json.loads(body)) == (200, {"echo": text.decode()})
    assert 2 <= calls < 500


@pytest.mark.parametrize(
    "endless",
    [b"4;extension=" + b"a" * 4096, b"0" * 4096, b"0\r\nTrailer: " + b"a" * 4096],
    ids=["chunk extension", "chunk size", "trailer"],
)
def test_bytes_between_chunks_are_limited(server: Server, endless: bytes) -> None:
    with connect(server) as client:
        send_on(client, CHUNKED + endless, endless[-4096:])
        assert client.recv(13) in (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")


def test_health_responds_while_connections_send_endless_headers(server: Server) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with connect(server) as client:
                send_on(client, START, b"a" * 65_536)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert httpx.get(server.url + "/health", timeout=2).status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)


def test_no_refusal_is_written_into_a_response() -> None:
    runner = FakeRunner()
    with serving(lambda: runner) as server, connect(server) as client:
        runner.gate.clear()
        client.sendall(POST)
        assert runner.entered.acquire(timeout=10)
        client.sendall(START + b"a" * MAX_HEADER_BYTES)
        assert client.recv(1) == b""
        runner.gate.set()


@each_parser
def test_a_header_that_does_not_arrive_in_time_gets_408(http: Parser) -> None:
    with serving(FakeRunner, body_timeout_s=1, http=http) as server:
        first, later, idle = (connect(server) for _ in range(3))
        first.sendall(b"GET /health HT")
        later.sendall(POST)
        assert read_response(later)[0] == 200
        later.sendall(b"G")
        assert_refused(first, 408, "header_timeout")
        assert_refused(later, 408, "header_timeout")
        with idle:  # without a request there is no response
            assert idle.recv(1) == b""
        assert metric(server, 'onequeue_requests_total{endpoint="other",status="408"}') == 2


@each_parser
def test_a_slow_header_does_not_keep_a_connection(http: Parser) -> None:
    with serving(FakeRunner, body_timeout_s=1, http=http) as server, connect(server) as client:
        client.sendall(START)
        client.settimeout(0.01)
        for _ in range(1000):
            client.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                assert client.recv(13) == b"HTTP/1.1 408 "
                return
        raise AssertionError("the connection was kept")


def test_an_unread_body_does_not_keep_a_connection() -> None:
    late = serving(FakeRunner, body_timeout_s=1, api_keys=("key",))
    with late as server, connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n")
        assert read_response(client)[0] == 401
        client.sendall(b"a")
        assert client.recv(13) in (b"", b"HTTP/1.1 408 ")


def test_a_slow_response_is_not_a_late_header() -> None:
    runner = FakeRunner()
    with serving(lambda: runner, body_timeout_s=1) as server, connect(server) as client:
        runner.gate.clear()
        client.sendall(POST)
        assert runner.entered.acquire(timeout=10)
        with connect(server) as other:  # closed when the limit has passed
            assert other.recv(1) == b""
        runner.gate.set()
        assert read_response(client)[0] == 200


UNREAD = {
    "a foreign host": (b"POST / HTTP/1.1\r\nHost: evil.example\r\n", 421),
    "an unknown path": (b"POST /unknown HTTP/1.1\r\nHost: localhost\r\n", 404),
    "another method": (b"PUT / HTTP/1.1\r\nHost: localhost\r\n", 405),
    "a probe": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
    "only headers": (b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n", 200),
    "a compressed body": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n", 415
    ),
}  # fmt: skip


@pytest.mark.parametrize("request_kind", UNREAD)
def test_an_unread_body_is_not_parsed(
    either: Server, request_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = 0
    parse = LimitedProtocol._parse

    def counted(self: LimitedProtocol, data: bytes) -> None:
        nonlocal parsed
        parsed += len(data)
        parse(self, data)

    monkeypatch.setattr(LimitedProtocol, "_parse", counted)
    monkeypatch.setattr(connections, "LINGER_S", 3600)
    head, status = UNREAD[request_kind]
    with connect(either) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        response = http_response(client, head[:4] == b"HEAD")
        assert (response.status, response.getheader("connection")) == (status, "close")
        before = parsed
        client.sendall(b"1\r\na\r\n" * 1_000_000)  # more than the sockets hold
        assert client.recv(1) == b""
        assert parsed == before


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CHUNKED.replace(b"POST /", b"POST /unknown"), 404),  # its body is not read
        (b"\x16\x03\x01\r\n\r\n", 400),
        (CHUNKED + b"not a size\r\n", 400),
    ],
)
def test_a_refused_connection_is_closed_even_if_the_client_keeps_it_open(
    either: Server, sent: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.01)
    with connect(either) as client:
        client.sendall(sent)
        assert read_response(client)[0] == status
        wait_until(lambda: not either.uvicorn.server_state.connections)


def test_a_complete_body_that_no_route_reads_keeps_the_connection(either: Server) -> None:
    with connect(either) as client:
        for _ in range(2):
            client.sendall(POST.replace(b"POST /", b"POST /unknown"))
            assert read_response(client)[0] == 404


@pytest.mark.parametrize(
    "malformed",
    [
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        CHUNKED + b"not a size\r\n",
    ],
)
def test_malformed_http_gets_the_envelope(either: Server, malformed: bytes) -> None:
    with connect(either) as client:
        client.sendall(malformed)
        assert_refused(client, 400, "invalid_request")


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES, 10 * MAX_HEADER_BYTES])
def test_many_bytes_that_are_no_http_are_refused_once(
    either: Server, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(either) as client:
        client.sendall(b"\x16\x03\x01\xff" * (size // 4))
        assert_refused(client, 400, "invalid_request")
    wait_until(lambda: not either.uvicorn.server_state.connections)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_pipelined_requests_are_limited(server: Server) -> None:
    """Each response makes room for a waiting request; the rest ends with the connection."""
    with connect(server) as client, contextlib.suppress(OSError):
        for _ in range(20):
            client.sendall(SHORT * 500)
        while client.recv(1 << 16):
            pass
    with connect(server) as client:
        client.sendall(SHORT * 50)
        read_pipelined(client, 50)


def read_pipelined(client: socket.socket, count: int) -> None:
    """Read until `count` responses have begun."""
    responses = b""
    while responses.count(b"HTTP/1.1 200 OK") < count:
        received = client.recv(1 << 16)
        assert received
        responses += received


def held_bytes(server: Server) -> int:
    """Return the bytes of unfinished requests that the connections hold."""
    total = 0
    protocols: set[Any] = server.uvicorn.server_state.connections
    for protocol in protocols:
        cycles = [protocol.cycle, *(cycle for cycle, _ in getattr(protocol, "pipeline", ()))]
        total += sum(len(cycle.body) for cycle in cycles)
        if isinstance(protocol, H11Protocol):
            total += len(protocol.conn.trailing_data[0])
    return total


@each_parser
def test_bodies_behind_a_waiting_request_are_not_read(http: Parser) -> None:
    turns = threading.Semaphore(0)
    runner = FakeRunner(lambda texts: turns.acquire(timeout=60))
    large = POST.replace(b"4\r\n\r\ntext", b"100000\r\n\r\n" + b"a" * 100_000)
    with serving(lambda: runner, http=http) as server, connect(server) as client:
        client.sendall(POST * 51)
        assert runner.entered.acquire(timeout=10)
        thread = threading.Thread(target=client.sendall, args=(large * 40,))
        thread.start()
        turns.release(51)
        read_pipelined(client, 51)
        for _ in range(51):
            assert runner.entered.acquire(timeout=10)
        assert held_bytes(server) < 1_000_000
        turns.release(40)
        read_pipelined(client, 40)
        thread.join(20)
        client.sendall(SHORT)
        read_pipelined(client, 1)


@each_parser
def test_a_connection_whose_input_takes_long_to_parse_rests(
    http: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    with serving(lambda: runner, http=http) as server, connect(server) as client:
        loop: Any = server.worker_client.loop
        monkeypatch.setattr(connections, "MAX_PARSE_S", 0)
        monkeypatch.setattr(connections, "REST_FACTOR", 1e9)
        client.sendall(CHUNKED)
        protocols: set[Any] = server.uvicorn.server_state.connections
        wait_until(lambda: any(protocol.is_resting for protocol in protocols))
        [protocol] = [protocol for protocol in protocols if protocol.is_resting]
        client.sendall(b"0\r\n\r\n")
        with connect(server) as other:
            other.sendall(SHORT)
            assert read_response(other)[0] == 200
        assert protocol.flow.read_paused
        assert protocol.cycle.more_body
        monkeypatch.setattr(connections, "MAX_PARSE_S", 60)
        loop.call_soon_threadsafe(protocol._end_rest)
        assert read_response(client)[0] == 200


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_the_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        with serving(FakeRunner):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@each_parser
@pytest.mark.parametrize(("address", "others"), [("127.0.0.2", 8), ("127.0.0.1", 20)])
def test_the_waiting_connections_of_the_address_with_the_most_are_closed(
    http: Parser, address: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.1 may be a proxy: its connections do not count as those of one client."""
    limits = SimpleNamespace(**vars(resource))
    limits.getrlimit = lambda kind: (40, 40)  # 30 connections
    monkeypatch.setattr(connections, "resource", limits)
    runner = FakeRunner()
    with serving(lambda: runner, http=http) as server, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connect(server, address)) for _ in range(others)]
        for client in kept:
            client.sendall(SHORT)
            assert http_response(client).status == 200
        runner.gate.clear()
        held = stack.enter_context(connect(server, "127.0.0.9"))
        held.sendall(POST)
        assert runner.entered.acquire(timeout=10)
        waiting = [stack.enter_context(connect(server, "127.0.0.9")) for _ in range(60)]
        for n, client in enumerate(waiting):
            with contextlib.suppress(OSError):  # closed already
                client.sendall((b"", b"GET /health HT", POST[:-1])[n % 3])
        wait_until(lambda: sum(map(is_closed, waiting)) >= 61 + others - 30)
        for client in kept:
            client.sendall(SHORT)
            assert http_response(client).status == 200
        runner.gate.set()
        assert http_response(held).status == 200


def test_a_malformed_body_after_expect_100_is_not_an_internal_error(server: Server) -> None:
    before = metric(server, 'onequeue_errors_total{kind="internal",model=""}')
    expecting = CHUNKED.replace(b"Host: localhost", b"Host: localhost\r\nExpect: 100-continue")
    with connect(server) as client:
        client.sendall(expecting.partition(b"4\r\n")[0] + b"no size\r\n")
        assert read_response(client)[0] == 400
    wait_until(lambda: metric(server, "onequeue_queue_depth") == 0)
    assert metric(server, 'onequeue_errors_total{kind="internal",model=""}') == before


def test_a_client_that_is_still_sending_receives_the_refusal(server: Server) -> None:
    """Closing a connection with unread bytes would reset it and lose the response."""
    with connect(server) as client:
        client.sendall(START + b"a" * 20_000_000)
        assert_refused(client, 431, "headers_too_large")


def test_other_apps_keep_uvicorns_protocol(server: Server) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not called")

    async def protocol() -> type[asyncio.Protocol]:
        config = uvicorn.Config(app, http="httptools")
        config.load()
        return type(HttpToolsProtocol(config=config, server_state=ServerState(), app_state={}))

    assert asyncio.run(protocol()) is HttpToolsProtocol


@each_parser
def test_the_address_of_a_client_is_the_one_that_a_proxy_names(
    http: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(access, "address_of", lambda scope: addresses.append(scope["client"][0]))
    monkeypatch.setattr(access, "client_of", lambda key, address: b"client")
    with serving(FakeRunner, http=http) as server:
        addresses.clear()
        for headers in ({}, {"X-Forwarded-For": "10.0.0.1"}):
            assert httpx.get(server.url + "/version", headers=headers).status_code == 200
    assert addresses == ["127.0.0.1", "10.0.0.1"]


@each_parser
def test_an_unread_response_is_dropped(http: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    runner = FakeRunner()
    runner.finish = lambda item, raw: b"[" + b"1," * 8_000_000 + b"1]"  # type: ignore[method-assign]
    with serving(lambda: runner, body_timeout_s=3600, http=http) as server:
        with connect(server) as client:
            client.sendall(POST)
            wait_until(lambda: bool(runner.batches))
            wait_until(lambda: not server.uvicorn.server_state.connections)
        with connect(server) as client:
            client.sendall(POST)
            assert len(read_response(client)[1]) > 16_000_000


TO_HTTP_2 = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("request_", [POST, CHUNKED + b"0\r\n\r\n"], ids=["length", "chunked"])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_body_of_a_request_that_asks_for_another_protocol_is_read(
    either: Server, request_: bytes, at_once: bool
) -> None:
    """As Java's HttpClient does by default: it asks for HTTP/2 in its first request."""
    head, body = request_.split(END)[0] + b"\r\n" + TO_HTTP_2 + b"\r\n", request_.split(END, 1)[1]
    with connect(either) as client:
        for piece in [head + body] if at_once else [head, body[:2], body[2:]]:
            client.sendall(piece)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert (response.status, json.loads(response.read())) == (200, {"echo": "text"})
        if response.getheader("connection") != "close":
            client.sendall(SHORT)
            assert http_response(client).status == 200


def test_a_request_without_a_body_may_ask_for_another_protocol(either: Server) -> None:
    with connect(either) as client:
        client.sendall(SHORT.removesuffix(b"\r\n") + TO_HTTP_2 + b"\r\n")
        assert http_response(client).status == 200
