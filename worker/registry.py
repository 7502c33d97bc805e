"""The registry's entries: a served model with its name, state, queue, breaker and engine.

Requests name an entry; the loader thread loads its engine, and the worker's thread runs the
engine's steps. Entries share nothing but those threads. Queues belong to the event loop, which
also reads states and breakers. A model that is not loaded has no engine.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakSet

from batching.errors import OnequeueError
from batching.request_queue import FairQueue
from batching.step_times import StepTimes
from worker.load_context import LoadContext, LoadProgress, LoadStopped, Memory, loading
from worker.messages.adapters import Adapter, InvalidAdapter
from worker.messages.generation import MediaKind
from worker.messages.protocol import Engine, Fallback, Generator, ModelInfo, ModelState

log = logging.getLogger("onequeue.worker")


class Breaker:
    """Opens after `threshold` failures in a row. A probe is due `cooldown_s` later, and again after
    each probe that fails; one that succeeds closes the breaker. The worker runs the probes."""

    def __init__(self, threshold: int = 3, cooldown_s: float = 5.0) -> None:
        self.threshold = threshold
        self.cooldown_s = cooldown_s
        self.failures = 0
        self.probe_at: float | None = None  # monotonic seconds; None while closed

    @property
    def is_open(self) -> bool:
        return self.probe_at is not None

    def succeeded(self) -> None:
        self.failures = 0
        self.probe_at = None

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= self.threshold:
            self.probe_at = now + self.cooldown_s


@dataclass(frozen=True, slots=True)
class TextModelInfo:
    """What is known of a TextModel also while it is not loaded."""

    max_model_len: int
    refused_media: Mapping[MediaKind, str]


class ServedModel:
    """A model that requests are served by. `name` appears in metrics, logs and /ready: that of its
    kind, for the kind's default model, or kind:name.

    `load` returns the engine; it runs on the loader thread. `capacity`: the units
    (texts, prompts, choices) that it runs at a time. `generates`: it is a language model.
    """

    engine: Engine  # of a model that is loaded

    def __init__(
        self, name: str, load: Callable[[], Engine], capacity: int, generates: bool = False
    ) -> None:
        self.name = name
        self.state: ModelState = "unloaded"
        self.at_start = False  # it is loaded before the server is ready; others are on demand
        self.pin = False  # it is never unloaded
        self.title = name  # its name for clients
        self.path = ""  # of its checkpoint: not for clients
        self.breaker = Breaker()
        self.queue = FairQueue(capacity, lambda: self.times)
        self.generates = generates
        self.has_cache = generates  # a KV cache that is sized by the free memory
        # the bytes that loading takes at least, and those that are free; on the loader thread
        self.measure: Callable[[], tuple[int, int]] = lambda: (0, sys.maxsize)
        self.progress = LoadProgress()
        self.on_progress: Callable[[], object] = lambda: None  # called on the loader thread
        self.info: ModelInfo | None = None  # since the first load, as the next
        self.text_info: TextModelInfo | None = None
        self.memory: list[Memory] = []
        self.adapters: list[Adapter] = []  # that are loaded with it
        self._with_weights: WeakSet[Adapter] = WeakSet()  # also those that only requests hold
        self._load = load
        self._loading: LoadContext | None = None  # of a load that can be stopped
        self._commit = threading.Lock()  # of the engine to a load that was not stopped

    def load_at_start(self) -> None:
        self.at_start, self.state = True, "loading"

    @property
    def served_name(self) -> str:
        """The name that responses have."""
        return self.info.model if self.info else self.title

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def generator(self) -> Generator | None:
        """The engine of a language model; None for other models."""
        return cast(Generator, self.engine) if self.generates else None

    @property
    def compile_state(self) -> Literal["running", "done", "off"]:
        return self.engine.compile_state if self.is_loaded else "off"

    @property
    def stage(self) -> str:
        """What is built or compiled while it serves; empty: nothing."""
        return self.engine.stage if self.is_loaded else ""

    @property
    def fallbacks(self) -> Sequence[Fallback]:
        return self.engine.fallbacks if self.is_loaded else ()

    @property
    def times(self) -> StepTimes | None:
        return self.engine.times if self.is_loaded else None

    @property
    def is_loaded(self) -> bool:
        return self.state in ("warming", "ready")

    @property
    def nbytes(self) -> int:
        """The memory of weights and caches."""
        adapters = sum(adapter.weights.nbytes for adapter in self.adapters if adapter.weights)
        return sum(memory.nbytes for memory in self.memory) + adapters

    def load(self, run: Callable[[Callable[[], Any]], Any], limit: int | None = None) -> None:
        """Load the engine. `run` runs a function on the worker's thread; `limit`: bytes that the
        model may take."""
        self.state, self.progress = "loading", LoadProgress()

        def report(progress: LoadProgress) -> None:
            self.progress = progress
            self.on_progress()

        context = self._loading = LoadContext(run, report, limit)
        engine: Engine | None = None
        try:
            with loading(context):
                engine = self._load()
                self._load_adapters(engine)
            with self._commit:
                context.advance()
                self._loading, self.memory = None, context.memory
                self.engine, self.info = engine, engine.info
                if text_model := engine.text_model:
                    limits = text_model.max_model_len, text_model.refused_media
                    self.text_info = TextModelInfo(*limits)
                self.state = "warming"
        except BaseException:
            if engine and context.stopped:
                engine.close()
            release(context.memory)
            raise
        info = engine.info
        log.info(
            "model loaded task=%s model=%s device=%s dtype=%s parameters=%d batching=%s%s",
            info.task, info.model, info.device, info.dtype, info.parameters,
            info.batching, f" because={info.why!r}" if info.why else "",
        )  # fmt: skip

    @property
    def progress_at(self) -> float:
        """When the running load has made progress."""
        return self._loading.progress_at if self._loading else 0.0

    def stop_load(self) -> bool:
        """Have the running load end at its next progress; False if there is none, or if its engine
        is warmed up already."""
        with self._commit:
            if context := self._loading:
                context.stopped, self._loading = True, None
            return context is not None

    def _load_adapters(self, engine: Engine) -> None:
        """Load the adapters. One that fails ends the server's start; later it fails its requests
        alone."""
        for adapter in [*self.adapters]:
            try:
                self.load_adapter(adapter, engine)
            except LoadStopped:
                raise
            except Exception as error:
                if self.at_start and self.info is None:
                    raise InvalidAdapter(f"LORA: the adapter {adapter.name!r}: {error}") from error
                is_known = isinstance(error, OnequeueError)
                adapter.failure = str(error) if is_known else "see the server's log"
                log.warning("adapter failed name=%s serves=%s: %s", adapter.name, self.name, error)

    def load_adapter(self, adapter: Adapter, engine: Engine) -> None:
        """Load an adapter of a language model. Raises InvalidAdapter."""
        cast(Generator, engine).load_adapter(adapter)
        adapter.failure = ""
        self._with_weights.add(adapter)
        nbytes = adapter.weights.nbytes if adapter.weights else 0
        log.info("adapter loaded name=%s serves=%s bytes=%d", adapter.name, self.name, nbytes)

    def take_engine(self) -> None:
        """Drop the engine. On the worker's thread: no step may run."""
        del self.engine
        for adapter in list(self._with_weights):
            adapter.weights = None
        self._with_weights.clear()
        self.breaker.succeeded()

    def free(self) -> None:
        """Free the memory, once the engine is dropped."""
        memory, self.memory = self.memory, []
        release(memory)

    def close(self) -> None:
        """Stop the engine's own threads. On the event loop."""
        if self.is_loaded:
            self.engine.close()


def release(memory: list[Memory]) -> None:
    for part in memory:
        part.release()
