"""What is said when the models are there: the address, a line to try, and where the page is."""

import logging
import shlex

import uvicorn

from server.curl import line_to_try
from server.engine import Engine
from server.settings import Settings

log = logging.getLogger("onequeue")


def greet(settings: Settings, engine: Engine, server: uvicorn.Server, seconds: float) -> None:
    """`seconds` since the process began to serve."""
    url, curl = address(server)
    if uds := server.config.uds:
        log.info("ready seconds=%.1f socket=%s", seconds, uds)  # browsers have no way there
    else:
        log.info("ready seconds=%.1f address=%s page=%s/", seconds, url, url)
    log.info("try: %s", line_to_try(settings, engine, url).replace("curl", curl, 1))


def address(server: uvicorn.Server) -> tuple[str, str]:
    """The URL, of this machine where all of its addresses are listened on, and the curl that finds
    the way."""
    config, scheme = server.config, "https" if server.config.is_ssl else "http"
    if config.uds:
        return "http://localhost", shlex.join(["curl", "--unix-socket", config.uds])
    host, port = config.host, config.port
    if not port:
        port = server.servers[0].sockets[0].getsockname()[1]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", "curl"
