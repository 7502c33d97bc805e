"""A local hub of models that huggingface_hub uses when HF_ENDPOINT names it."""

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
    """Serves the files of `folder` as those of `model` to requests with `token`."""

    model: str
    folder: Path
    token: str
    port: int = 0
    requests: list[str] = field(default_factory=list)  # method and path, if authorized

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}"}

    def respond(self, method: str, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Return status, error code and body."""
        repository, separator, name = path.removeprefix("/").partition("/resolve/main/")
        if repository == "a/gated":
            return 403, "GatedRepo", b""
        if authorization != f"Bearer {self.token}":
            return 401, "", b""
        self.requests.append(f"{method} {path}")
        if repository != self.model or not separator:
            return 404, "RepoNotFound" if separator else "EntryNotFound", b""
        file = self.folder / name
        return (200, "", file.read_bytes()) if file.is_file() else (404, "EntryNotFound", b"")


def add_to_cache(cache: Path, model: str, files: dict[str, bytes], ref: str = "main") -> Path:
    """Write a revision of a model as huggingface_hub does; return its snapshot's folder."""
    repository = cache / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / sha1(ref.encode()).hexdigest()
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(snapshot.name)
    for name, content in files.items():
        blob = repository / "blobs" / sha1(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@contextmanager
def serving_hub(model: str, folder: Path, token: str) -> Iterator[Hub]:
    hub = Hub(model, folder, token)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # http.server's name
            status, code, body = hub.respond(
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
    hub.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()
