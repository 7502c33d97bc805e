"""Weights on their way into memory: a line of the log every few seconds.

transformers draws bars and prints tables of weights; what a checkpoint lacks is looked at in
missing_weights.py and said there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import logging as transformers_log

log = logging.getLogger("onequeue.loading")

EVERY_S = 3.0


class Progress:
    """In the place of a tqdm bar: iterates, and tells how far it is."""

    def __init__(self, over: Iterable[Any] = (), *_: Any, **told: Any) -> None:
        self.over = over
        self.what = str(told.get("desc") or "loading").lower()
        self.total: int | None = told.get("total") or getattr(over, "__len__", lambda: None)()

    def __iter__(self) -> Iterator[Any]:
        began = said = time.monotonic()
        for done, each in enumerate(self.over):
            if self.total and (now := time.monotonic()) - said >= EVERY_S:
                said, share = now, 100 * done / self.total
                log.info("%s percent=%.0f seconds=%.0f", self.what, share, now - began)
            yield each

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def use_our_log() -> None:
    """For what transformers says from now on."""
    transformers_log.set_tqdm_hook(lambda _, args, told: Progress(*args, **told))
    logging.getLogger("transformers.modeling_utils").addFilter(is_no_report)
    if ours := logging.getLogger("onequeue").handlers:
        transformers_log.disable_default_handler()
        for handler in ours:
            transformers_log.add_handler(handler)
