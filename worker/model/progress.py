"""Weights on their way into memory: a line of the log every few seconds.

transformers draws bars and prints tables of weights; what a checkpoint lacks is looked at in
missing_weights.py and said there.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from transformers.utils import logging as transformers_log

log = logging.getLogger("onequeue.loading")

EVERY_S = 3.0


def told(over: Iterable[Any] = (), *_: Any, **bar: Any) -> Iterator[Any]:
    """What a tqdm bar iterates over; the log has how far it is."""
    what = str(bar.get("desc") or "loading").lower()
    total: int | None = bar.get("total") or getattr(over, "__len__", lambda: None)()
    began = said = time.monotonic()
    for done, each in enumerate(over):
        if total and (now := time.monotonic()) - said >= EVERY_S:
            said, share = now, 100 * done / total
            log.info("%s percent=%.0f seconds=%.0f", what, share, now - began)
        yield each


def is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def use_our_log() -> None:
    """For what transformers says from now on."""
    no_bar: Any = transformers_log.EmptyTqdm  # not annotated
    transformers_log.set_tqdm_hook(lambda _, args, bar: no_bar(told(*args, **bar)))
    logging.getLogger("transformers.modeling_utils").addFilter(is_no_report)
    if ours := logging.getLogger("onequeue").handlers:
        transformers_log.disable_default_handler()
        for handler in ours:
            transformers_log.add_handler(handler)
