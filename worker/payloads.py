"""What crosses between the event loop, the pool and the worker thread. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from batching.request_queue import WorkItem

State = Literal["loading", "warming", "ready", "dead"]


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """One input of a pipeline task as the client sent it, and its call's parameters.

    `inputs` is text, raw bytes (an image or a sound file), or a JSON value.
    """

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one trip through the worker was like. Times in seconds, one wait per item."""

    size: int
    tokens: int
    padded_tokens: int
    forward_s: float
    total_s: float
    waits_s: tuple[float, ...]
    out_of_memory: int
    cap: int
    saturated: bool  # full, or others waited meanwhile


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, for logs, /ready and build info."""

    task: str
    model: str
    device: str
    dtype: str
    parameters: int
    batching: Literal["packed", "padded", "same shape", "single"]
    why: str = ""  # why not packed


class Runner(Protocol):
    """A loaded model as the worker uses it.

    `prepare` and `finish` run in pool threads, several at once; the others on the worker's.
    """

    info: ModelInfo

    def prepare(self, item: WorkItem) -> None:
        """Fill in `item.prepared`, `rows`, `tokens`, `key`; InvalidInput if it cannot be served."""

    def forward(self, prepared: list[Any]) -> list[Any]:
        """One raw output for each prepared input, in order."""

    def finish(self, item: WorkItem, raw: Any) -> Any:
        """The answer to an item, from its raw output."""

    def diagnose(self, error: Exception) -> Literal["item", "memory", "fatal"]:
        """Why `forward` raised: its input, too little memory, or a device that is lost."""

    def warm_up(self) -> None:
        """Run the smallest sound input through everything; raises if the worker is broken."""
