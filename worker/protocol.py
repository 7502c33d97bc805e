"""What crosses between the event loop, the pool and the worker thread. No torch here."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from batching.request_queue import WorkItem
from worker.decode_budget import RequestBudget

TEXT_ALONE = "this model takes text, no images"
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
    budget: RequestBudget | None = None


@dataclass(frozen=True)
class Picture:
    """An image of a conversation, as a file's bytes, not yet decoded. `detail`: how large it is to
    be looked at. `param`: the field of the request that errors about it name. `link`: where its
    bytes are still to be fetched from. `root`: what is kept of it once it was looked at is for
    requests of the same root alone, as prefixes are."""

    data: bytes
    detail: str
    param: str
    link: str = ""
    root: bytes = b""

    @property
    def rough(self) -> bool:
        """A glance will do."""
        return self.detail == "low"

    @cached_property
    def digest(self) -> bytes:
        """Of what is seen, how, and for whom: 32 bytes."""
        how = b"rough" * self.rough
        return hashlib.blake2b(self.data, digest_size=32, key=self.root, person=how).digest()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template. Messages have `role` and
    `content` (text or None), or whatever else the template reads. The content of one with pictures
    is a list of parts, {"type": "text", "text": …} and {"type": "image"}: `pictures` are those
    of all such parts, in order."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None  # how much to think first: `none`, `minimal`, `low`, …
    effort_param: str = "reasoning_effort"  # the field of the request that it comes from
    pictures: tuple[Picture, ...] = ()

    @property
    def calls(self) -> int:
        """How many have been made."""
        return sum(len(message.get("tool_calls") or ()) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen. None: as the checkpoint's generation_config says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: of the best k as well


class SamplingDefaults(Protocol):
    """What a request that leaves these open gets."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a choice ends, besides the model's end-of-sequence tokens."""

    max_tokens: int | None = None  # None: `default_tokens`, or fewer if the context is full
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    default_tokens: int | None = None  # None: as many as the context holds
    # the field of the request that errors about it name
    param: str = field(default="max_tokens", compare=False)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text must be as a whole, whatever the model would rather say."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any  # a JSON schema, a regular expression, a list of texts, a grammar in Lark's notation
    param: str  # the field of the request that errors about it name


@dataclass(frozen=True, slots=True)
class Calls:
    """Which of the chat's tools an answer may call."""

    names: tuple[str, ...]
    required: bool = False  # nothing but calls, at least one
    parallel: bool = True  # more than one


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One prompt and how to continue it, `n` times; the text goes to the item's stream as it comes.

    A prompt is a conversation, text, or token ids. Choices are numbered from `first_choice` on,
    so that the prompts of a list share a stream. `echo`: the prompt's text, and log-probabilities
    if asked for, come first. `prompt_logprobs`: those of the prompt's tokens, with so many of the
    likeliest others (as many as `sampling.logprobs` where that is echoed), and `token_ids`, of the
    prompt and the output, come in deltas of their own fields. The item's future resolves to None
    when all choices have ended.
    """

    prompt: Chat | str | tuple[int, ...]
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    n: int = 1
    first_choice: int = 0
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    constraint: Constraint | None = None
    calls: Calls | None = None  # None: what looks like a call is text
    thinking_tokens: int | None = None  # reasoning is ended after so many; None: never
    param: str = "messages"  # the field of the request that errors about the prompt name
    background: bool = False  # nobody waits for it: it comes after all that somebody waits for
    cache_salt: str = ""  # what the client makes its own part of the prefix cache by
    cache_root: bytes = b""  # prefixes are shared with inputs of the same root alone

    @property
    def called_tools(self) -> list[Mapping[str, Any]]:
        """Those of the chat's tools that may be called."""
        names = self.calls.names if self.calls else ()
        tools = self.prompt.tools if isinstance(self.prompt, Chat) else ()
        return [tool for tool in tools if tool["function"]["name"] in names]


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
