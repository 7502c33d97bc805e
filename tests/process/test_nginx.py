"""Two servers behind nginx, with the configuration of the documents: one drains, one is killed."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving import wait_until

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
REQUESTS = 300
CLIENTS = 8

PROGRAM = """
    import sys, uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fakes import FakeRunner

    settings = Settings(chat_model="none", embedding_model="none", drain_delay_s=0.5)
    app = create_app(settings, FakeRunner)
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


@pytest.mark.skipif(not NGINX, reason="nginx is not installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_request_fails_when_one_of_two_servers_ends(number: int, tmp_path: Path) -> None:
    sockets = [str(tmp_path / name) for name in ("a.sock", "b.sock")]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = (ROOT / "docs/deploy/nginx.conf").read_text()
    for name, path in zip("ab", sockets, strict=True):
        config = config.replace(f"/run/onequeue/{name}.sock", path)
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nuser root;\n{config}")
    code, url = textwrap.dedent(PROGRAM), f"http://127.0.0.1:{port}"
    nginx = [str(NGINX), "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;", "-e", "stderr"]
    with (
        process([sys.executable, "-c", code, sockets[0]]) as child,
        process([sys.executable, "-c", code, sockets[1]]),
        process(nginx) as proxy,
        ThreadPoolExecutor(CLIENTS) as pool,
        httpx.Client() as client,
    ):
        for path in sockets:
            wait_until(lambda path=path: answers("http://localhost", uds=path), 120)  # type: ignore[misc]
        wait_until(lambda: answers(url))

        def post(n: int) -> int:
            if n == REQUESTS // 3:
                child.send_signal(number)
            try:
                return client.post(url, content=f"text {n}").status_code
            except httpx.RemoteProtocolError:  # killed between a response's head and its body
                assert number == signal.SIGKILL
                return 0

        statuses = [*pool.map(post, range(REQUESTS))]
        assert statuses.count(200) >= REQUESTS - CLIENTS
        assert {*statuses} <= {0, 200}
        child.wait(60)
        assert client.post(url, content="after").status_code == 200
        proxy.send_signal(signal.SIGQUIT)  # its worker processes end, too
        proxy.wait(60)
