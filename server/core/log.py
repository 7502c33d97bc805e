"""The log: one line per event on stderr, `key=value` pairs after the message.

Text of clients is escaped, and at most MAX_TEXT characters of it are logged.

`onequeue serve` gives uvicorn's lines the same format. Probes are left out of the access log. An
embedding program that has configured logging keeps its own configuration.
"""

import logging
import re
import sys
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
MAX_TEXT = 200
MAX_LINES = 300  # of a traceback
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
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
    for access_filter in (is_not_probe, shorten_path):
        logging.getLogger("uvicorn.access").addFilter(access_filter)
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
        "filters": {"lifecycle": {"()": "server.core.log.LifecycleFilter"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": logger,
            "uvicorn.error": {"level": "INFO", "filters": ["lifecycle"]},
            "uvicorn.access": logger,
        },
    }


class OneLineFormatter(logging.Formatter):
    """Escape control characters, so that a traceback stays one event and no text looks like one."""

    def format(self, record: logging.LogRecord) -> str:
        record.name = record.name.removesuffix(".error")  # uvicorn.error is its general log
        return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's name
        """Shorten the lines of a traceback: an error may quote what a client has sent."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(line[:MAX_TEXT] for line in lines[:MAX_LINES])


def shorten_path(record: logging.LogRecord) -> bool:
    """Shorten the path in a record of uvicorn's access log."""
    if isinstance(record.args, tuple) and len(record.args) > 2:
        record.args = (*record.args[:2], str(record.args[2])[:MAX_TEXT], *record.args[3:])
    return True


def silence_libraries() -> None:
    """Leave out transformers' warnings once the models are loaded: from then on they are about
    requests, some with a line for each value in a list."""
    logger = logging.getLogger("transformers")
    if logger.level == logging.WARNING:  # its default
        logger.setLevel(logging.ERROR)


def is_not_probe(record: logging.LogRecord) -> bool:
    """Filter uvicorn's access log, whose arguments are client, method, path, version, status. The
    path includes the prefix of `--root-path`."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return not str(path).partition("?")[0].endswith(PROBES)


class LifecycleFilter(logging.Filter):
    """Drop uvicorn's lines about the life cycle, which server/lifespan.py logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.msg not in LIFECYCLE
