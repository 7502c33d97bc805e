"""A batch that raises is run again in halves, until only the guilty items fail.

For encoder batches and generation steps alike: pure control flow, no model and no clock.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_in_halves(
    items: Sequence[T],
    run: Callable[[Sequence[T]], None],
    failed: Callable[[Sequence[T], BaseException], None],
    wanted: Callable[[T], bool] = lambda item: True,
) -> None:
    """`run` the wanted items together; if that raises, in halves."""
    if items := [item for item in items if wanted(item)]:
        try:
            run(items)
        except BaseException as error:
            rerun_in_halves(items, error, run, failed, wanted)


def rerun_in_halves(
    items: Sequence[T],
    error: BaseException,
    run: Callable[[Sequence[T]], None],
    failed: Callable[[Sequence[T], BaseException], None],
    wanted: Callable[[T], bool] = lambda item: True,
) -> None:
    """`run(items)` raised `error`. `failed` may raise to end it all; then each half
    is run, as far as it is still wanted, down to one item."""
    # The frames hold what the forward had allocated, and the halves need it.
    traceback.clear_frames(error.__traceback__)
    failed(items, error)
    if len(items) > 1:
        middle = len(items) // 2
        for half in (items[:middle], items[middle:]):
            run_in_halves(half, run, failed, wanted)
