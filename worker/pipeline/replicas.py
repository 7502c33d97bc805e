"""Replicas of a pipeline for pool threads, and the pipeline's own view of its parameters.

A fast tokenizer's truncation and padding settings are mutable state, which every call sets:
two threads on one tokenizer give wrong ids. So each thread borrows a pipeline of its own; the
model, which is used on the worker thread alone, is shared.
"""

import copy
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from worker.model.loading import Pipe


class Replicas:
    """At most `most` copies, made as they are needed from one that nobody uses: copying a
    tokenizer of 150,000 tokens takes half a second."""

    def __init__(self, pipe: Pipe, most: int) -> None:
        self.most = most
        self.made = 0
        self.template = copy_pipeline(pipe)
        self.idle: queue.SimpleQueue[Pipe] = queue.SimpleQueue()
        self.lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[Pipe]:
        pipe = self._take()
        try:
            yield pipe
        finally:
            self.idle.put(pipe)

    def _take(self) -> Pipe:
        try:
            return self.idle.get_nowait()
        except queue.Empty:
            with self.lock:
                if self.made < self.most:
                    pipe = copy_pipeline(self.template)
                    self.made += 1
                    return pipe
        return self.idle.get()


def copy_pipeline(pipe: Pipe) -> Pipe:
    """A pipeline that shares the model and has everything else to itself."""
    return copy.deepcopy(pipe, {id(pipe.model): pipe.model})


def stage_parameters(pipe: Pipe, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters of the three stages, as the pipeline's own call would have them."""
    defaults = (pipe._preprocess_params, pipe._forward_params, pipe._postprocess_params)
    given = pipe._sanitize_parameters(**parameters)
    return [{**default, **more} for default, more in zip(defaults, given, strict=True)]


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic inside the tokenizers library is no Exception, and would end its thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise
