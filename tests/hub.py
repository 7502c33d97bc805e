"""A hub of models on this machine, as huggingface_hub asks it for files: HF_ENDPOINT names it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Who has `token` gets the files of `folder` as those of `model`."""

    model: str
    folder: Path
    token: str
    port: int = 0
    asked: list[str] = field(default_factory=list)  # method and path, of those with the token

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}"}

    def answer(self, method: str, path: str, authorization: str) -> tuple[int, str, bytes]:
        """A status, an error's code, a body."""
        repository, found, name = path.removeprefix("/").partition("/resolve/main/")
        if repository == "a/gated":
            return 403, "GatedRepo", b""
        if authorization != f"Bearer {self.token}":
            return 401, "", b""
        self.asked.append(f"{method} {path}")
        if repository != self.model or not found:
            return 404, "RepoNotFound" if found else "EntryNotFound", b""
        file = self.folder / name
        return (200, "", file.read_bytes()) if file.is_file() else (404, "EntryNotFound", b"")


@contextmanager
def hub(model: str, folder: Path, token: str) -> Iterator[Hub]:
    made = Hub(model, folder, token)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # http.server's name
            status, code, body = made.answer(
                self.command, self.path.partition("?")[0], self.headers.get("authorization", "")
            )
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("etag", f'"{sha1(body).hexdigest()}"')
            if code:
                self.send_header("x-error-code", code)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  # http.server's name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()
