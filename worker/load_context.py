"""The load that runs on this thread: where its forwards run, its progress, its memory.

A loader thread reads weights and lays them out, while the worker's thread serves other models.
`on_worker` hands each forward pass of the load to that thread, which runs it between their steps.
Without a load, as in tests, forwards run on the caller's thread.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from batching.errors import OnequeueError

T = TypeVar("T")
_thread = threading.local()


class LoadStopped(OnequeueError):
    """The load is to end: it was stopped, or made no progress."""


class Memory(Protocol):
    """Memory that a model holds until it is unloaded."""

    @property
    def nbytes(self) -> int: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is, in the stages and units of transformers' server."""

    stage: str = "processor"  # then config, then weights
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        percent = f", {100 * self.done // self.total} %" if self.total else ""
        return f"stage {self.stage}{percent}"


@dataclass(eq=False)
class LoadContext:
    """`run`: runs a function on the worker's thread. `limit`: bytes that weights and cache may take
    together; None: the free memory. `max_built`: bytes of the model before its weights are read."""

    run: Callable[[Callable[[], Any]], Any]
    report: Callable[[LoadProgress], object] = lambda progress: None
    limit: int | None = None
    memory: list[Memory] = field(default_factory=list)
    progress_at: float = field(default_factory=time.monotonic)
    stopped: bool = False
    built: int = 0
    max_built: int = sys.maxsize

    def stop(self) -> bool:
        self.stopped = True
        return True

    def advance(self) -> None:
        """Note progress. Raise LoadStopped if the load is to end."""
        if self.stopped:
            raise LoadStopped("the load was stopped")
        self.progress_at = time.monotonic()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)


@contextmanager
def loading(context: LoadContext) -> Iterator[None]:
    """Make `context` the load of this thread."""
    _thread.context = context
    try:
        yield
    finally:
        _thread.context = None


def current_load() -> LoadContext | None:
    context: LoadContext | None = getattr(_thread, "context", None)
    return context


def on_worker(function: Callable[[], T]) -> T:
    """Return the result of a function that runs a model."""
    if (context := current_load()) is None:
        return function()
    context.advance()
    torch = sys.modules.get("torch")  # which has this mode for each thread
    result: T = context.run(torch.no_grad()(function) if torch else function)
    context.advance()
    return result


def advance() -> None:
    """Note progress of this thread's load, if there is one. Raise LoadStopped if it is to end."""
    if context := current_load():
        context.advance()


def expect_download() -> None:
    """Do not count the time until the next progress: downloads have time limits of their own."""
    if context := current_load():
        context.progress_at = math.inf


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Report the progress of this thread's load, if there is one."""
    if context := current_load():
        context.advance()
        context.report(LoadProgress(stage, done, total))


def add_memory(memory: Memory) -> None:
    """Record memory that this thread's load has taken, if there is one."""
    if context := current_load():
        context.memory.append(memory)


def remaining_bytes() -> int:
    """Return how many bytes the limit of this thread's load leaves."""
    context = current_load()
    if context is None or context.limit is None:
        return sys.maxsize
    return max(0, context.limit - context.nbytes)
