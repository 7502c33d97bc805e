"""What crosses between the event loop, the pool and the worker thread. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from batching.request_queue import WorkItem
from worker.media.decode_limiter import RequestLimiter
from worker.messages.generation import Chat, SamplingDefaults

State = Literal["loading", "warming", "ready", "dead"]
Batching = Literal["packed", "padded", "same shape", "single", "continuous", "static"]

# In an output's place: its input goes on with the next batch.
UNFINISHED = object()


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """One input of a pipeline task as the client sent it, and its call's parameters. `inputs` is
    text, raw bytes (an image or a sound file), or a JSON value. Inputs of a list share a `budget`
    of what is decoded."""

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)
    budget: RequestLimiter | None = None


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one trip through the worker was like. Times in seconds, one wait per item."""

    size: int
    tokens: int
    padding: float  # the share of what was run that was padding
    forward_s: float
    total_s: float
    waits_s: tuple[float, ...]
    out_of_memory: int
    cap: int
    saturated: bool  # full, or others waited meanwhile


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one generation step was like. Times in seconds."""

    prefill_tokens: int = 0  # tokens of prompts (or of what was preempted) run in this step
    decode_tokens: int = 0  # output tokens kept
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    drafted: int = 0  # tokens proposed by speculation
    accepted: int = 0  # of them, how many the model agreed to
    preempted: int = 0  # sequences put back to make room
    admitted: int = 0  # sequences that began
    running: int = 0  # sequences left running after the step
    waiting: int = 0  # sequences that wait for room
    starved: bool = False  # some that are not in the background had no part in the step
    blocks_used: int = 0
    blocks_total: int = 0
    total_s: float = 0.0
    waits_s: tuple[float, ...] = ()  # acceptance to admission, of those admitted


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gave to whom: new text, and the items that are done (None) or failed."""

    report: StepReport
    deltas: list[tuple[WorkItem, Any]]  # a Delta, or a TranscriptDelta
    done: list[tuple[WorkItem, Exception | None]]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, for logs, /ready and build info."""

    task: str
    model: str
    device: str
    dtype: str
    parameters: int
    batching: Batching
    why: str = ""  # why not packed
    mask: str = ""  # what stands for a word to be filled in


class Pending(Exception):
    """Something that `prepare` needs is being made. `then(wanted, again)` has `again` called, from
    any thread, when it is worth preparing once more, as long as it is still `wanted`."""

    def __init__(self, then: Callable[[Callable[[], bool], Callable[[], None]], object]) -> None:
        super().__init__()
        self.then = then


class LoadedModel(Protocol):
    """What the worker asks of models of both kinds."""

    info: ModelInfo

    def prepare(self, item: WorkItem) -> None:
        """Fill in `item.prepared`, and what batches go by (`rows`, `tokens`, `width`, `key`).

        In pool threads, several at once. InvalidInput if the item cannot be served, Pending if
        it takes more than a pool thread's time to tell."""

    def warm_up(self) -> None:
        """Run the smallest sound input through everything; raises if the model is broken."""


class Tokenizing(Protocol):
    """What is asked of a model that is called by its name. In pool threads, several at once."""

    max_model_len: int  # tokens that it takes at most, output included
    no_images: str  # why those of chats are refused; empty where they are taken

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; InvalidInput if the chat template refuses it."""

    def decode(self, ids: list[int]) -> str: ...

    def token(self, token_id: int) -> str:
        """The text of one token; InvalidInput if there is no such id."""


class Runner(LoadedModel, Protocol):
    """A loaded pipeline. `finish` runs in pool threads, `forward` on the worker's."""

    def forward(self, prepared: list[Any]) -> list[Any]:
        """One raw output for each prepared input, in order; UNFINISHED for those that have some way
        to go, and are given again in the next batch if somebody still waits."""

    def finish(self, item: WorkItem, raw: Any) -> Any:
        """The answer to an item, from its raw output."""


class Stepped(LoadedModel, Protocol):
    """A loaded model that is served in steps: `add`, `step` and `clear` run on the worker's
    thread."""

    def add(self, item: WorkItem) -> None:
        """Take a prepared item into the waiting queue."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""

    def step(self) -> StepOutcome:
        """Drop who left, then one step for who is running; raises only what belongs to no item."""

    def clear(self) -> list[WorkItem]:
        """Drop everything, waiting and running, whatever state it is in; the items are returned."""

    def close(self) -> None:
        """End what runs beside; nothing is prepared any longer."""


class Generator(Stepped, Tokenizing, Protocol):
    """A loaded causal language model."""

    @property
    def defaults(self) -> SamplingDefaults: ...

    @property
    def compile_state(self) -> Literal["running", "done", "off"]: ...

    def call_id(self, name: str, index: int) -> str:
        """For a call that an answer makes, its conversation's `index`-th: an id that the chat
        template takes back. At once, from any thread."""
