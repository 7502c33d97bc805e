"""Two servers behind nginx, with the configuration of the documents: one drains, one is killed, or
both are full. NDJSON is passed on while it is sent."""

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from server.http.request import NDJSON_TYPES
from tests.serving import wait_until

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
pytestmark = pytest.mark.skipif(not NGINX, reason="nginx is not installed")
REQUESTS = 300
CLIENTS = 8
LOCAL = "http://localhost"

# A chat waits for its first token until the pipe is opened.
PROGRAM = """
    import sys, threading, uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fake_generator import FakeGenerator
    from tests.fakes import FakeRunner

    def wait_for_pipe():
        open(sys.argv[1] + ".held").close()

    def release_chats():
        wait_for_pipe()
        generator.release()

    runner = FakeRunner(lambda texts: "hold" in texts and wait_for_pipe())
    generator = FakeGenerator()
    settings = Settings(
        chat_model="{chat}", embedding_model="none", drain_delay_s=0.5, max_queue_size={slots},
        sse_keepalive_s=0.5,
    )
    if settings.chat_model != "none":
        generator.one_by_one = True
        threading.Thread(target=release_chats, daemon=True).start()
    app = create_app(settings, lambda: runner, lambda: generator)
    uvicorn.run(app, uds=sys.argv[1], log_level="error")
"""


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, cwd=ROOT)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def answers(url: str, **options: object) -> bool:
    with contextlib.suppress(httpx.TransportError):
        transport = httpx.HTTPTransport(**options)  # type: ignore[arg-type]  # uds
        with httpx.Client(transport=transport) as client:
            return client.get(url + "/ready").status_code == 200
    return False


def is_full(server: httpx.Client) -> bool:
    return "onequeue_queue_depth 1.0" in server.get("/metrics").text


class Servers(NamedTuple):
    url: str  # of nginx
    sockets: list[str]
    first: subprocess.Popen[bytes]


@contextlib.contextmanager
def behind_nginx(
    folder: Path,
    slots: int,
    chat: str = "none",
    read_timeout: str = "1h",
) -> Iterator[Servers]:
    """Two servers behind nginx; the text `hold` keeps one busy until its pipe is opened."""
    sockets = [str(folder / name) for name in ("a.sock", "b.sock")]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = (ROOT / "docs/deploy/nginx.conf").read_text()
    for name, path in zip("ab", sockets, strict=True):
        config = config.replace(f"/run/onequeue/{name}.sock", path)
        os.mkfifo(path + ".held")
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    assert "proxy_read_timeout 1h" in config
    config = config.replace("proxy_read_timeout 1h", f"proxy_read_timeout {read_timeout}")
    (folder / "nginx.conf").write_text(f"pid {folder}/pid;\nuser root;\n{config}")
    code = textwrap.dedent(PROGRAM).format(slots=slots, chat=chat)
    url = f"http://127.0.0.1:{port}"
    nginx = [str(NGINX), "-c", str(folder / "nginx.conf"), "-g", "daemon off;", "-e", "stderr"]
    with (
        process([sys.executable, "-c", code, sockets[0]]) as first,
        process([sys.executable, "-c", code, sockets[1]]),
        process(nginx) as proxy,
    ):
        for path in sockets:
            wait_until(partial(answers, LOCAL, uds=path), 120)
        wait_until(lambda: answers(url))
        yield Servers(url, sockets, first)
        proxy.send_signal(signal.SIGQUIT)  # its worker processes end, too
        proxy.wait(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_request_fails_when_one_of_two_servers_ends(number: int, tmp_path: Path) -> None:
    with (
        behind_nginx(tmp_path, slots=1024) as servers,
        ThreadPoolExecutor(CLIENTS) as pool,
        httpx.Client() as client,
    ):

        def post(n: int) -> int:
            if n == REQUESTS // 3:
                servers.first.send_signal(number)
            try:
                return client.post(servers.url, content=f"text {n}").status_code
            except httpx.RemoteProtocolError:  # killed between a response's head and its body
                assert number == signal.SIGKILL
                return 0

        statuses = [*pool.map(post, range(REQUESTS))]
        assert statuses.count(200) >= REQUESTS - CLIENTS
        assert {*statuses} <= {0, 200}
        servers.first.wait(60)
        assert client.post(servers.url, content="after").status_code == 200


def test_full_servers_refuse_by_themselves_and_are_asked_again(tmp_path: Path) -> None:
    with (
        behind_nginx(tmp_path, slots=1) as servers,
        ThreadPoolExecutor(2) as pool,
        contextlib.ExitStack() as clients,
    ):
        held = []
        for path in servers.sockets:
            transport = httpx.HTTPTransport(uds=path)
            server = clients.enter_context(httpx.Client(transport=transport, base_url=LOCAL))
            held.append(pool.submit(server.post, "/", content="hold", timeout=60))
            wait_until(partial(is_full, server))
        for _ in range(10):
            refused = httpx.post(servers.url, content="text")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
        for path in servers.sockets:
            open(path + ".held", "w").close()
        assert [request.result().status_code for request in held] == [200, 200]
        assert httpx.post(servers.url, content="text").status_code == 200


def test_a_stream_whose_first_token_takes_longer_than_the_proxy_waits_arrives(
    tmp_path: Path,
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with behind_nginx(tmp_path, slots=9, chat="demo", read_timeout="2s") as servers:
        url, lines = servers.url + "/v1/chat/completions", list[str]()
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 10:  # of 0.5 s each
                    for path in servers.sockets:
                        with contextlib.suppress(OSError):
                            os.close(os.open(path + ".held", os.O_WRONLY | os.O_NONBLOCK))
        assert lines[-2] == "data: [DONE]"
        assert "Hello" in "".join(lines)


def test_a_line_is_answered_before_the_next_one_is_sent(tmp_path: Path) -> None:
    with behind_nginx(tmp_path, slots=9) as servers:
        address = servers.url.removeprefix("http://")
        for media_type in NDJSON_TYPES:
            client = http.client.HTTPConnection(address, timeout=60)
            with contextlib.closing(client):
                client.putrequest("POST", "/")
                client.putheader("Content-Type", media_type)
                client.putheader("Transfer-Encoding", "chunked")
                client.endheaders(chunk(b'"first"\n'))
                response = client.getresponse()
                assert b"first" in response.readline()
                client.send(chunk(b'"second"\n') + chunk(b""))
                assert b"second" in response.readline()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
