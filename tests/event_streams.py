"""Send requests, and parse errors and server-sent events strictly."""

import json
import socket
from typing import Any

import httpx

from tests.serving import Server

Chunk = dict[str, Any]
CLIENT = httpx.Client(verify=False, timeout=60)  # creating one takes longer than most requests


def post(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    return CLIENT.post(server.url + path, json=body, headers=headers)


def chat(server: Server, text: str = "hi", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return post(server, "/v1/chat/completions", body)


def error_of(response: httpx.Response) -> dict[str, str]:
    """Return the error of a checked envelope."""
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 32_000
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    for internal in ("Traceback", ".py", "Error(", "batching.", "site-packages"):
        assert internal not in response.text
    error: dict[str, str] = document["error"]
    return error


def assert_refused(answer: httpx.Response, param: str | None, reason: str = "") -> None:
    """Check that a request is refused by an error that names the field, and has the reason."""
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


def frames(text: str) -> list[str]:
    """Return the data of each event; the last is [DONE]."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    data = [event.removeprefix("data: ") for event in events]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return data


def chunks(response: httpx.Response) -> list[Chunk]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return [json.loads(data) for data in frames(response.text)[:-1]]


def open_stream(server: Server, path: str, body: Any, *headers: str) -> socket.socket:
    """Send a request and return the socket, from which nothing has been read. Without a body it is
    a GET request."""
    content = json.dumps(body).encode() if body is not None else b""
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    return client


def read_until(client: socket.socket, delimiter: bytes) -> bytes:
    received = bytearray()
    while delimiter not in received[-70_000:]:
        data = client.recv(65536)
        assert data, received
        received += data
    return bytes(received)


def writes(raw: bytes) -> list[bytes]:
    """Return the server's single writes: the chunks of HTTP's chunked encoding."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return chunks
