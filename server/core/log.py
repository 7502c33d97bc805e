"""The log: one line per event on stderr, `key=value` pairs after the message, or JSON.

Text of clients is escaped, and at most MAX_TEXT characters of it are logged.

`onequeue serve` gives uvicorn's lines the same format. An embedding program that has configured
logging keeps its own configuration.
"""

import json
import logging
import re
import sys
from datetime import datetime
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
MAX_TEXT = 200
MAX_LINES = 300  # of a traceback
LIBRARIES = ("asyncio", "opentelemetry")  # that log while requests are served
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"""[^\s"'=]+""")  # a value that needs no quotes


def configure_log(log_format: str = "text") -> None:
    """Write onequeue's log, at uvicorn's level, and that of LIBRARIES to stderr, unless logging is
    configured already. In JSON, uvicorn's log too."""
    logger = logging.getLogger("onequeue")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format](FORMAT))
    if log_format == "json":
        for uvicorns in logging.getLogger("uvicorn").handlers:
            uvicorns.setFormatter(handler.formatter)
    logger.setLevel(logging.getLogger("uvicorn.error").level or logging.INFO)
    for name in ("onequeue", *LIBRARIES):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False


def uvicorn_config(log_format: str = "text") -> dict[str, Any]:
    """Return uvicorn's `log_config` for lines in our format."""
    formatter = f"server.core.log.{FORMATTERS[log_format].__name__}"
    logger = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter, "fmt": FORMAT}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": logger,
            "uvicorn.error": {"level": "INFO"},
            "uvicorn.access": logger,
        },
    }


class OneLineFormatter(logging.Formatter):
    """Escape control characters, so that a traceback stays one event and no text looks like one."""

    def format(self, record: logging.LogRecord) -> str:
        record.name = record.name.removesuffix(".error")  # uvicorn.error is its general log
        return escape(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        fields: dict[str, Any] = getattr(record, "fields", {})  # by a caller's `extra`
        pairs = (f" {name}={quoted(value)}" for name, value in fields.items())
        return super().formatMessage(record) + "".join(pairs)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's name
        """Shorten the lines of a traceback: an error may quote what a client has sent."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(line[:MAX_TEXT] for line in lines[:MAX_LINES])


class JsonFormatter(OneLineFormatter):
    """Format a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        document = {
            "time": time.isoformat(timespec="milliseconds"),  # with the offset from UTC
            "level": record.levelname,
            "logger": record.name.removesuffix(".error"),
            "message": escape(record.getMessage()),
        }
        for name, value in getattr(record, "fields", {}).items():
            document[name] = escape(value[:MAX_TEXT]) if isinstance(value, str) else value
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document).replace("\x7f", "\\u007f")


FORMATTERS = {"text": OneLineFormatter, "json": JsonFormatter}


def quoted(value: Any) -> str:
    """Return a value for a line of text, at most MAX_TEXT characters of it."""
    text = str(value)[:MAX_TEXT]
    return text if _PLAIN.fullmatch(text) and text.isprintable() else repr(text)


def escape(text: str) -> str:
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def silence_libraries() -> None:
    """Leave out transformers' warnings once the models are loaded: from then on they are about
    requests, some with a line for each value in a list."""
    logger = logging.getLogger("transformers")
    if logger.level == logging.WARNING:  # its default
        logger.setLevel(logging.ERROR)
