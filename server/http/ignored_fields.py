"""Fields of a request that nothing reads: a response header and the log name them, or they are
refused (UNKNOWN_FIELDS)."""

import logging
import re
from collections.abc import Iterable
from itertools import islice

from starlette.types import Scope

from batching.errors import InvalidInput

log = logging.getLogger("onequeue.fields")

MAX_NAMES, MAX_LENGTH = 10, 64  # in a header
MAX_LOGGED = 100  # names, in a process
_UNSAFE = re.compile(r"[^!-+\--~]")  # in a list of a header: all but visible ASCII without commas
_logged: set[str] = set()


def ignore_fields(names: Iterable[str], scope: Scope) -> None:
    """Name fields in X-Ignored-Fields, unless the response has started, and each once in the log.
    Raises InvalidInput where UNKNOWN_FIELDS=refuse."""
    for name in islice(names, MAX_NAMES):
        shown = _UNSAFE.sub("?", name[:MAX_LENGTH])
        if scope["app"].settings.unknown_fields == "refuse":
            raise InvalidInput.at(shown, "is unknown: nothing here reads this field")
        ignored: list[str] = scope.setdefault("ignored_fields", [])
        if len(ignored) < MAX_NAMES and shown not in ignored:
            ignored.append(shown)
        if len(_logged) < MAX_LOGGED and shown not in _logged:
            _logged.add(shown)
            log.warning("unknown field ignored path=%s field=%s", scope["path"][:200], shown)
