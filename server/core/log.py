"""The log: one line an event on stderr, `key=value` behind the message.

uvicorn's lines come in the same form where `python -m server` starts it. Probes, which come every
few seconds, are in no access log. Whoever embeds the app keeps a log that is set up already.
"""

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PROBES = ("/health", "/ready", "/ping", "/metrics")
# What uvicorn tells of its stages; what they mean here is said by ours.
STAGES = {
    "Started server process [%d]",
    "Waiting for application startup.",
    "Application startup complete.",
    "Shutting down",
    "Waiting for application shutdown.",
    "Application shutdown complete.",
    "Finished server process [%d]",
}


class OneLine(logging.Formatter):
    """Line breaks in a message or a traceback would make two events of one."""

    def format(self, record: logging.LogRecord) -> str:
        record.name = record.name.removesuffix(".error")  # uvicorn's general log is called that
        return super().format(record).replace("\n", "\\n")


def is_no_probe(record: logging.LogRecord) -> bool:
    """Of uvicorn's access log: a client, a method, a path (behind the prefix that `--root-path`
    says), a version, a status."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return not str(path).partition("?")[0].endswith(PROBES)


def is_no_stage(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or record.msg not in STAGES


def configure_log() -> None:
    """Show our log beside uvicorn's lines, from the level that `--log-level` gave them."""
    logging.getLogger("uvicorn.access").addFilter(is_no_probe)
    ours = logging.getLogger("onequeue")
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(FORMAT))
    ours.addHandler(handler)
    ours.setLevel(logging.getLogger("uvicorn.error").level or logging.INFO)
    ours.propagate = False


def uvicorn_config() -> dict[str, Any]:
    """uvicorn's lines in our form: what its `log_config` takes."""
    quiet = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": "server.core.log.OneLine", "fmt": FORMAT}},
        "filters": {"stages": {"()": lambda: is_no_stage}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": quiet,
            "uvicorn.error": {"level": "INFO", "filters": ["stages"]},
            "uvicorn.access": quiet,
        },
    }
