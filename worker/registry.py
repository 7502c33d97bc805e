"""The registry's entries: a served model with its name, state, lanes, breaker and engine.

Requests name an entry; the worker's thread loads its engine and runs the engine's steps. Entries
share nothing but that thread. Lanes belong to the event loop, which also reads states and breakers;
the rest belongs to the worker's thread.
"""

import logging
from collections.abc import Callable
from typing import cast

from batching.request_queue import BackgroundLane, Lane, StepLane
from batching.round_robin import RoundRobin
from worker.messages.protocol import Engine, Generator, State

log = logging.getLogger("onequeue.worker")

# Background requests may use 1 / BACKGROUND_DIVISOR of a language model's slots.
BACKGROUND_DIVISOR = 4


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


class ServedModel:
    """A model that requests are served by. `name` appears in metrics, logs and /ready: that of its
    kind, for the kind's default model, or kind:name."""

    engine: Engine  # set by the worker's thread at the end of the state "loading"

    def __init__(
        self, name: str, load: Callable[[], Engine], lane: Lane, background: Lane | None = None
    ) -> None:
        """`load` returns the engine; it runs on the worker's thread. Language models alone have a
        `background` lane, for low-priority requests."""
        self.name = name
        self.state: State = "loading"
        self.breaker = Breaker()
        self.lane = lane
        self.background = background
        self.lanes = [lane] if background is None else [lane, background]
        self._load = load

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def generator(self) -> Generator | None:
        """The engine of a language model; None for other models."""
        return cast(Generator, self.engine) if self.background else None

    def load(self) -> None:
        self.engine = self._load()
        self.state, info = "warming", self.engine.info
        log.info(
            "model loaded task=%s model=%s device=%s dtype=%s parameters=%d batching=%s%s",
            info.task, info.model, info.device, info.dtype, info.parameters,
            info.batching, f" because={info.why!r}" if info.why else "",
        )  # fmt: skip

    def close(self) -> None:
        """Stop the engine's own threads. On the event loop."""
        if self.state != "loading":
            self.engine.close()


def language_model(
    name: str, load: Callable[[], Generator], slots: int, max_running: int
) -> ServedModel:
    """Return the entry of a language model, with its two lanes."""
    background = BackgroundLane("background", max(1, slots // BACKGROUND_DIVISOR))
    return ServedModel(name, load, StepLane(name, slots, RoundRobin(max_running)), background)
