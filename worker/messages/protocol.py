"""The interfaces between the event loop, the pool and the worker thread.

Engines and runners implement the protocols; the dataclasses are the messages. The payloads of
language models, scoring and transcription are in the modules beside this one. No torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, Literal, Protocol

from typing_extensions import TypeVar

from batching.fair_share import WorkOwner
from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from worker.media.decode_limiter import RequestLimiter
from worker.messages.adapters import Adapter
from worker.messages.generation import Chat, MediaKind, SamplingDefaults

# of a model; "warming" to the end of "unloading" it has an engine
ModelState = Literal["unloaded", "loading", "warming", "ready", "unloading", "failed"]
IsWanted = Callable[[], bool]
Notify = Callable[[], None]
Batching = Literal["packed", "padded", "same shape", "single", "continuous", "static"]

# The types that an engine or a runner has for itself. A bare Engine or Runner may be of any model:
# items name the registry entry whose engine takes them.
Payload = TypeVar("Payload", contravariant=True, default=Any)
Prepared = TypeVar("Prepared", default=Any)
Raw = TypeVar("Raw", default=Any)
Item = TypeVar("Item", bound=WorkItem, contravariant=True, default=Any)
# Of the results of a step, whose receiver looks up the item's engine or stream.
StepDelta = TypeVar("StepDelta", covariant=True, default=object)
StepRaw = TypeVar("StepRaw", covariant=True, default=object)


class Cut(Enum):
    """Returned by `Runner.forward` for an input that the batch was cut before, to a turn: it needs
    another one, in which inputs of others may come first."""

    CUT = auto()


CUT = Cut.CUT


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """One input of a pipeline task as the client sent it, and the request's parameters.

    `inputs` is text, raw bytes (an image or an audio file), or a JSON value. The inputs of a list
    share a `limiter` of decoded media.
    """

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)
    limiter: RequestLimiter | None = None


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Measurements of one batch of a pipeline. Times in seconds; one wait per item."""

    size: int  # items
    tokens: int
    padding: float  # the share of the computed tokens that was padding
    forward_s: float
    total_s: float
    waits_s: tuple[float, ...]  # from acceptance to the start of the batch
    out_of_memory: int  # forward passes that ran out of memory
    cap: int  # rows that a batch may have after this one


@dataclass(frozen=True, slots=True)
class StepReport:
    """Measurements of one step of a language or speech model. Times in seconds."""

    prefill_tokens: int = 0  # prompt tokens run in this step, those of preempted sequences included
    decode_tokens: int = 0  # output tokens kept
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    drafted: int = 0  # tokens proposed by speculation
    accepted: int = 0  # proposed tokens that the model accepted
    read_tokens: int = 0  # prompt tokens whose keys and values were read from disk
    read_bytes: int = 0
    written_bytes: int = 0
    saved_ms: int = 0  # that reading took less than computing would have
    preempted: int = 0  # sequences
    admitted: int = 0  # sequences that started
    running: int = 0  # sequences, after the step
    waiting: int = 0  # sequences, after the step
    blocks_used: int = 0
    blocks_total: int = 0
    states_used: int = 0  # slots of recurrent layers' states
    states_total: int = 0
    total_s: float = 0.0
    waits_s: tuple[float, ...] = ()  # from acceptance to admission, one per admitted sequence


@dataclass(slots=True)
class StepOutcome(Generic[StepDelta, StepRaw]):
    """The results of one step of an engine, each with its item."""

    report: BatchReport | StepReport
    deltas: list[tuple[WorkItem, StepDelta]] = field(default_factory=list)  # for items' streams
    outputs: list[tuple[WorkItem, StepRaw]] = field(default_factory=list)  # raw, for `finish`
    done: list[tuple[WorkItem, Exception | None]] = field(default_factory=list)  # ended or failed
    unfinished: bool = False  # some items of the batch continue in the next one


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as shown in logs, /ready and metrics."""

    task: str
    model: str
    device: str
    dtype: str
    parameters: int
    batching: Batching
    why: str = ""  # why not packed
    mask: str = ""  # the mask token of fill-mask
    pooling: str = ""  # of an embedder
    voices: Sequence[str] = ()  # of a speech model, the default first; empty where it has one
    labels: Mapping[int, str] = field(default_factory=dict)  # of a text classifier, as the next
    max_length: int = 0  # tokens
    has_chat_template: bool = True  # of a language model; a base model may have none
    cache_blocks: int = 0  # of a paged cache
    block_size: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class Fallback:
    """A faster way to run a model that a check at load refused, as shown in /ready and metrics."""

    refused: str
    reason: str
    serves: str  # what runs instead
    lost: str


class Pending(Exception):
    """Raised by `prepare` while something that it needs is computed in another thread.

    `then(owner, is_wanted, notify)` registers `notify`, which is called from any thread when
    `prepare` is worth another call, as long as `is_wanted()` is true. `owner`: of the item.
    """

    def __init__(self, then: Callable[[WorkOwner, IsWanted, Notify], object]) -> None:
        super().__init__()
        self.then = then


class TextModel(Protocol):
    """The text side of a model that requests call by name: its limits and its tokenizer. The
    methods run in pool threads, several at once."""

    hf_tokenizer: Any
    max_model_len: int  # tokens, output included
    refused_media: Mapping[MediaKind, str]  # by kind, why files in chats are refused

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        """Return a prompt's token ids. Raises InvalidInput if the chat template refuses it."""

    def render(self, chat: Chat) -> str:
        """Return the text of a prompt. Raises InvalidInput as `encode`."""

    def transcription_chat(self, prompt: str | None, language: str | None) -> Chat:
        """Return a chat that asks for the text of a recording, without its file. Raises
        InvalidInput if the model does not take the prompt or the language. For any thread."""

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def token(self, token_id: int) -> str:
        """Return the text of one token. Raises InvalidInput if the id does not exist."""


class OtherModels:
    """The models that share the worker's thread with an engine's own: none, for an engine without a
    worker. On that thread."""

    total_s: float = 0.0  # that `run_steps` has taken in all

    @property
    def busy(self) -> bool:
        """Whether one of them has work: a step should then be short."""
        return False

    @property
    def max_turn_s(self) -> float:
        """The longest time that a batch should take."""
        return math.inf

    def run_steps(self) -> None:
        """Run a step of each that has one due. Called at the yield points of a long step."""

    def run_all_steps(self) -> None:
        """Do the same, also for the engine's own model: what it runs is outside of its steps."""

    def wake(self) -> None:
        """Have the worker's thread ask all engines again when their next step is due. From any
        thread, for an engine that had none due."""


ALONE = OtherModels()


class Runner(Protocol[Payload, Prepared, Raw]):
    """A loaded model that computes a batch at a time: a pipeline, an embedder or a reranker. For
    all but `forward` see Engine."""

    info: ModelInfo
    others: OtherModels

    @property
    def text_model(self) -> TextModel | None: ...
    def prepare(self, item: WorkItem[Payload, Prepared]) -> None: ...
    def finish(self, item: WorkItem[Payload, Prepared], raw: Raw) -> object: ...
    def warm_up(self) -> None: ...
    def forward(self, prepared: list[Prepared]) -> Sequence[Raw | Cut]:
        """Run a batch on the worker's thread.

        Returns one raw output per prepared input, in order. CUT marks an input that needs more
        batches: it is passed again in a later one, unless its client has left.
        """


class Engine(Protocol[Item, Raw]):
    """A served model, with the items that wait for it and those that run.

    `prepare` and `finish` run in pool threads, several at once; the rest on the worker's thread.
    """

    others: OtherModels  # set by the worker before the first step

    @property
    def times(self) -> StepTimes:
        """The times of its steps, which the event loop reads."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def compile_state(self) -> Literal["running", "done", "off"]:
        """Whether the model is being compiled in the background."""

    @property
    def stage(self) -> str:
        """What is built or compiled in the background, and for how long; empty: nothing."""

    @property
    def fallbacks(self) -> Sequence[Fallback]:
        """What the checks have refused, up to now. Replaced, never changed, by any thread."""

    @property
    def text_model(self) -> TextModel | None:
        """The model's text side, for embedders, rerankers and language models."""

    def prepare(self, item: Item) -> None:
        """Set `item.prepared` and what batches are formed by: `rows`, `tokens`, `width`, `key`.

        Raises InvalidInput for an input that cannot be served, and Pending if preparing takes
        longer than a pool thread should be busy.
        """

    def add(self, item: Item) -> None:
        """Queue a prepared item."""

    @property
    def busy(self) -> bool:
        """Whether any item waits or runs. Only `add`, `step` and `clear` change it."""

    def due_at(self, idle_since: float) -> float | None:
        """Return when the next step should run, in monotonic seconds; None if there is none.

        `idle_since`: when the worker's last step ended, of whichever model.
        """

    def step(self, idle_since: float) -> StepOutcome[object, Raw] | None:
        """Drop the items whose clients have left and run one step, if one is due.

        Failures of items are in the outcome. An exception belongs to no single item. Items count
        the tokens that have run for them: `computed` and `generated`.
        """

    def finish(self, item: Item, raw: Raw) -> object:
        """Return an item's response, from its raw output in StepOutcome.outputs."""

    def clear(self) -> list[WorkItem]:
        """Drop all items, in whatever state the engine is, and return those without a result."""

    def warm_up(self) -> None:
        """Run the smallest valid input through the model. Raises if the model is broken."""

    def close(self) -> None:
        """Stop the engine's own threads. Called on the event loop, after the last `prepare`."""


class Generator(Engine[Item, Raw], Protocol[Item, Raw]):
    """The engine of a language model."""

    @property
    def text_model(self) -> TextModel: ...

    @property
    def defaults(self) -> SamplingDefaults: ...

    def call_id(self, name: str, index: int) -> str:
        """Return an id for the conversation's `index`-th tool call that the chat template accepts
        back. Does not block; from any thread."""

    def flush(self) -> None:
        """Wait until what outlives the engine is on disk. After its last step."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Fill in an adapter's weights, on the loader thread. Raises InvalidAdapter."""
