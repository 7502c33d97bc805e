"""Without API keys, web pages of other sites can neither send work nor read responses."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from server.app import create_app
from server.core.settings import Settings
from server.http.cross_site import is_loopback
from server.http.request import Application
from tests.event_streams import CLIENT, error_of
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.page_server import LetterEmbedder
from tests.serving import Server, read_response, server_fixture, serving, wait_until

# Requests that a page may send without a preflight request.
PATHS = ["/", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"]
PLAIN = {"content-type": "text/plain;charset=UTF-8"}
EVIL = "https://evil.example"


server = server_fixture(FakeRunner, load_chat=FakeGenerator, load_embedder=LetterEmbedder)


def post(server: Server, path: str = "/", **headers: str) -> httpx.Response:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return CLIENT.post(server.url + path, content=b"text", headers=PLAIN | fields)


def get(server: Server, path: str, host: str | None, *lines: str, method: str = "GET") -> int:
    """Send a request with a Host header, or none, on a raw socket; return the status."""
    head = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *lines]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall("\r\n".join([*head, "Connection: close", "", ""]).encode())
        return read_response(client)[0]


# ── the origin of a request ──


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [{"Sec_Fetch_Site": "cross-site", "Origin": EVIL}, {"Origin": EVIL}, {"Origin": "null"}],
    ids=["cross-site", "older browser", "opaque"],
)
def test_page_of_another_site_cannot_post(
    server: Server, path: str, headers: Mapping[str, str]
) -> None:
    response = post(server, path, **headers)
    assert response.status_code == 403
    error = error_of(response)
    assert (error["type"], error["param"]) == ("permission_error", "Origin")
    assert "CORS_ORIGINS" in error["message"]


@pytest.mark.parametrize("method", ["DELETE", "PUT"])
def test_other_methods_are_refused_before_they_are_routed(server: Server, method: str) -> None:
    url = server.url + "/v1/responses/resp_none"
    assert CLIENT.request(method, url, headers={"Origin": EVIL}).status_code == 403
    assert CLIENT.request(method, url).status_code in (404, 405)


def test_another_port_of_the_same_machine_is_another_site(server: Server) -> None:
    origin = f"http://localhost:{server.port + 1}"
    assert post(server, Origin=origin, Sec_Fetch_Site="same-site").status_code == 403
    assert post(server, Origin=origin, Host=f"localhost:{server.port}").status_code == 403
    assert post(server, Sec_Fetch_Site="same-site").status_code == 403
    assert post(server, Sec_Fetch_Site="CROSS-SITE").status_code == 403


def test_own_page_and_programs_can_post(server: Server) -> None:
    own = {"Origin": server.url}
    assert post(server).status_code == 200
    assert post(server, **own).status_code == 200
    assert post(server, Sec_Fetch_Site="same-origin", **own).status_code == 200
    assert post(server, Sec_Fetch_Site="none").status_code == 200
    # undici, below the SDK for Node, sends the mode alone
    assert post(server, Sec_Fetch_Mode="cors").status_code == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost", "localhost:80"),
        ("https://localhost", "localhost"),
        ("https://localhost:443", "localhost"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("http://localhost.:8000", "localhost.:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_origin_is_compared_with_the_host(server: Server, origin: str, host: str) -> None:
    assert post(server, Origin=origin, Host=host).status_code == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:80", "localhost:8000"),
        ("http://localhost:443", "localhost"),
        ("http://localhost.evil.example", "localhost"),
        ("http://", ""),
        ("localhost", "localhost"),
    ],
)
def test_origin_that_differs_from_the_host_is_refused(
    server: Server, origin: str, host: str
) -> None:
    assert post(server, Origin=origin, Host=host).status_code == 403


def test_link_from_another_site_opens_the_page(server: Server) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Accept": "text/html", "Referer": EVIL}
    for method in ("GET", "HEAD"):
        response = CLIENT.request(method, server.url, headers=followed)
        assert response.status_code == 200
    assert CLIENT.options(server.url, headers={"Origin": EVIL}).status_code == 405


def test_cors_origins_allow_pages() -> None:
    cross = {"Sec_Fetch_Site": "cross-site"}
    with serving(FakeRunner, cors_origins=("https://their.site",)) as server:
        allowed = post(server, Origin="https://their.site", **cross)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://their.site"
        assert post(server, Origin="https://their.site").status_code == 200
        assert post(server, Origin=EVIL, **cross).status_code == 403
        assert post(server, Origin="http://their.site").status_code == 403
        assert post(server, **cross).status_code == 403
    with serving(FakeRunner, cors_origins=("*",)) as server:
        for origin in (EVIL, "null"):
            assert post(server, Origin=origin, **cross).status_code == 200


def test_keys_replace_the_rules() -> None:
    with serving(FakeRunner, api_keys=("key",)) as server:
        bearer = {"Authorization": "Bearer key", "Host": "evil.example"}
        response = post(server, Origin=EVIL, Sec_Fetch_Site="cross-site", **bearer)
        assert response.status_code == 200
        assert post(server, Host="evil.example").status_code == 401


# ── the Host header ──

MACHINE = socket.gethostname()
LOCAL = [
    "127.0.0.1:8000", "localhost", "LocalHost:8000", "localhost.", "localhost.:8000", "[::1]",
    "[::1]:8000", "10.1.2.3", "[2001:DB8::1]:8000", "app.localhost:3000", "box.local",
    "host.docker.internal:8000", "BOX.LOCAL.", MACHINE, f"{MACHINE.upper()}:8000",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "EVIL.example.", "localhost.evil.example",
    "127.0.0.1.evil.example", "xlocalhost", "x-local", "evil.example@127.0.0.1", "localhost:evil",
    "[evil.example]", "[::1", "127.0.0.1:80:80", "localhost/", "", None,
]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
def test_host_of_this_machine_is_accepted(server: Server, host: str) -> None:
    assert get(server, "/v1/models", host) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_host_of_another_name_is_refused(server: Server, host: str | None) -> None:
    assert get(server, "/v1/models", host) == 421
    assert get(server, "/", host) == 421
    for path in ("/health", "/ready", "/ping"):
        assert get(server, path, host) == 200


def test_refused_host_gets_an_envelope(server: Server) -> None:
    response = post(server, Host="evil.example")
    assert response.status_code == 421
    error = error_of(response)
    assert "ALLOWED_HOSTS" in error["message"]
    assert "'evil.example'" in error["message"]


@pytest.mark.parametrize(
    "line",
    ["X-Forwarded-Host: localhost", "Forwarded: host=localhost", "X-Forwarded-For: 10.0.0.1",
     "X-Forwarded-Server: localhost", "X-Real-IP: 10.0.0.1"],
)  # fmt: skip
def test_forwarded_headers_do_not_lift_the_rule(server: Server, line: str) -> None:
    assert get(server, "/v1/models", "evil.example", line) == 421


def test_allowed_hosts_are_accepted() -> None:
    with serving(FakeRunner, allowed_hosts=("Their.Site.", "box")) as server:
        for host in ("their.site", "THEIR.site.:8443", "box", "localhost"):
            assert post(server, Host=host).status_code == 200
        for host in ("other.site", "a.their.site", "their.site.evil.example"):
            assert post(server, Host=host).status_code == 421
    with serving(FakeRunner, allowed_hosts=("*",)) as server:
        assert get(server, "/version", "evil.example") == get(server, "/version", None) == 200


def test_requests_through_the_documented_proxy_are_accepted() -> None:
    """nginx passes the client's Host and Origin; the server listens on a loopback address."""
    text = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
    nginx = text.partition("## nginx")[2].partition("```nginx")[2].partition("```")[0]
    assert "proxy_set_header Host $http_host;" in nginx
    setting = re.search(r"ALLOWED_HOSTS=([\w.-]+)", nginx)
    assert setting
    forwarded = {"Host": setting[1], "X_Forwarded_For": "10.0.0.1", "X_Forwarded_Proto": "https"}
    with serving(FakeRunner) as server:
        assert post(server, **forwarded).status_code == 421
    with serving(FakeRunner, allowed_hosts=(setting[1],)) as server:
        assert post(server, **forwarded).status_code == 200
        page = post(server, Origin=f"https://{setting[1]}", **forwarded)
        assert page.status_code == 200
        assert post(server, Origin=EVIL, **forwarded).status_code == 403


# ── other addresses than a loopback's ──


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False),
     ("testserver", False), ("", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@contextmanager
def running(config: uvicorn.Config) -> Iterator[uvicorn.Server]:
    """Run uvicorn in a thread until the block ends."""
    listener = uvicorn.Server(config)
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    wait_until(lambda: listener.started)
    try:
        yield listener
    finally:
        listener.should_exit = True
        thread.join(60)


def own_address() -> str:
    """Return this machine's address towards another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def fake_app() -> Application:
    settings = Settings(chat_model="none", embedding_model="none")
    return create_app(settings, FakeRunner)


def test_wildcard_address_has_the_rule_where_the_connection_is_local() -> None:
    """The address is the connection's, not the one that the server listens on."""
    config = uvicorn.Config(fake_app(), host="0.0.0.0", port=0, log_level="error")
    with running(config) as listener:
        port = listener.servers[0].sockets[0].getsockname()[1]
        for host, status in (("evil.example", 421), ("localhost", 200)):
            url = f"http://127.0.0.1:{port}/version"
            assert CLIENT.get(url, headers={"Host": host}).status_code == status
        address = own_address()
        if not address.startswith("127."):
            url = f"http://{address}:{port}/version"
            assert CLIENT.get(url, headers={"Host": "box.example"}).status_code == 200


def test_unix_socket_takes_any_host(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with running(uvicorn.Config(fake_app(), uds=path, log_level="error")):
        client = httpx.Client(transport=httpx.HTTPTransport(uds=path))
        assert client.get("http://their.site/version").status_code == 200
        refused = client.post("http://their.site/", content="x", headers={"Origin": EVIL})
        assert refused.status_code == 403


def test_clients_in_process_are_accepted() -> None:
    with TestClient(fake_app()) as client:
        assert client.get("/version").status_code == 200

    async def fetch(url: str, **headers: str) -> int:
        app = fake_app()
        transport = httpx.ASGITransport(app)
        async with app.lifespan(), httpx.AsyncClient(transport=transport) as client:
            return (await client.get(url, headers=headers)).status_code

    for base in ("http://test", "http://127.0.0.1:8000", "http://localhost"):
        assert asyncio.run(fetch(f"{base}/version")) == 200
    assert asyncio.run(fetch("http://127.0.0.1/version", Host="evil.example")) == 421
