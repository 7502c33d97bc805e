"""The log: one line per event on stderr, `key=value` pairs after the message.

`python -m server` gives uvicorn's lines the same format. Probes are left out of the access log. An
embedding program that has configured logging keeps its own configuration.
"""

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PROBES = ("/health", "/ready", "/ping", "/metrics")
# uvicorn's messages about its lifecycle; lifespan.py logs the lines that matter.
LIFECYCLE = {
    "Started server process [%d]",
    "Waiting for application startup.",
    "Application startup complete.",
    "Shutting down",
    "Waiting for application shutdown.",
    "Application shutdown complete.",
    "Finished server process [%d]",
}


def configure_log() -> None:
    """Write onequeue's log to stderr at uvicorn's level, unless logging is configured already."""
    logging.getLogger("uvicorn.access").addFilter(is_not_probe)
    logger = logging.getLogger("onequeue")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.getLogger("uvicorn.error").level or logging.INFO)
    logger.propagate = False


def uvicorn_config() -> dict[str, Any]:
    """Return uvicorn's `log_config` for lines in our format."""
    logger = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": "server.core.log.OneLineFormatter", "fmt": FORMAT}},
        "filters": {"lifecycle": {"()": lambda: is_not_lifecycle}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": logger,
            "uvicorn.error": {"level": "INFO", "filters": ["lifecycle"]},
            "uvicorn.access": logger,
        },
    }


class OneLineFormatter(logging.Formatter):
    """Escape line breaks, so that a traceback stays one event."""

    def format(self, record: logging.LogRecord) -> str:
        record.name = record.name.removesuffix(".error")  # uvicorn.error is its general log
        return super().format(record).replace("\n", "\\n")


def is_not_probe(record: logging.LogRecord) -> bool:
    """Filter uvicorn's access log, whose arguments are client, method, path, version, status. The
    path includes the prefix of `--root-path`."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return not str(path).partition("?")[0].endswith(PROBES)


def is_not_lifecycle(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or record.msg not in LIFECYCLE
