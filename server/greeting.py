"""What is said when the models are there: the address, a line to try, and where the page is."""

import json
import logging
import shlex

import uvicorn

from server.engine import Engine
from worker.tasks import TASKS

log = logging.getLogger("onequeue")


def greet(engine: Engine, server: uvicorn.Server, keyed: bool, seconds: float) -> None:
    """`keyed`: requests need a key; `seconds` since the process began to serve."""
    url, via = address(server)
    log.info("ready seconds=%.1f address=%s page=%s/", seconds, url, url)
    words = [*via, *(["-H", "Authorization: Bearer KEY"] if keyed else []), *request(engine, url)]
    log.info("try: %s", shlex.join(["curl", *words]))


def address(server: uvicorn.Server) -> tuple[str, list[str]]:
    """The URL, of this machine where all of its addresses are listened on, and what else tells curl
    the way."""
    config, scheme = server.config, "https" if server.config.is_ssl else "http"
    if config.uds:
        return "http://localhost", ["--unix-socket", config.uds]
    host, port = config.host, config.port
    if not port:
        port = server.servers[0].sockets[0].getsockname()[1]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", []


def request(engine: Engine, url: str) -> list[str]:
    """curl's words for a request that one of the models answers."""
    if "generation" in engine.models:
        hello = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        return [f"{url}/v1/chat/completions", "-d", json.dumps(hello)]
    if "embedding" in engine.models:
        return [f"{url}/v1/embeddings", "-d", json.dumps({"input": "What is this about?"})]
    if "rerank" in engine.models:
        ranked = {"query": "a colour", "documents": ["red", "seven"]}
        return [f"{url}/rerank", "-d", json.dumps(ranked)]
    info = engine.models["pipeline"].loaded.info
    task = TASKS[info.task]
    if task.kind == "text" and not task.required:
        text = f"The capital of France is {info.mask}." if info.mask else "This is good."
        return [f"{url}/", "-d", text]
    if task.kind in ("image", "audio") and not task.required:
        return [f"{url}/", "--data-binary", "@cat.jpg" if task.kind == "image" else "@speech.wav"]
    return [f"{url}/openapi.json"]
