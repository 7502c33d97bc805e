"""One line per event, `key=value` after the message, on stderr beside uvicorn's own lines."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class OneLine(logging.Formatter):
    """Line breaks in a message or a traceback would make two events of one."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\\n")


def configure() -> None:
    """Show our own log at INFO, unless whoever embeds us has set it up."""
    ours = logging.getLogger("onequeue")
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(FORMAT))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
