"""A generator without a model: each step adds a scripted word to every running request.

The text of a request's prompt, or of its last message, is its script:

    "say a b c"    the response is those words; to any other text it is WORDS
    "refused"      prepare raises InvalidInput
    "bad"          the first step fails the item; "bad later": the third step does
    "hang"         there is no output
    "long"         the output goes on until max_tokens, or without end
    "big"          sixty words of a hundred kilobytes, then as "hang"

A word that starts with "*" is reasoning. One that starts with "!" calls the function of that name,
and one that starts with "=" is a part of the call's arguments. Of several choices, each starts with
its number. Steps wait for `gate`.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batching.errors import ClientGone, InvalidInput, ItemFailed, NotReady
from batching.fair_share import Priority
from batching.request_queue import WorkItem
from batching.step_times import StepTimes
from worker.adapter_folder import adapter_folder
from worker.messages.adapters import Adapter
from worker.messages.decisions import DecisionInput
from worker.messages.deltas import Delta, DeltaPart, FinishReason, Kind, TokenLogprob
from worker.messages.generation import (
    TEXT_ONLY,
    Chat,
    GenerationInput,
    SamplingDefaults,
    transcription_chat,
)
from worker.messages.protocol import (
    ALONE,
    Fallback,
    ModelInfo,
    OtherModels,
    StepOutcome,
    StepReport,
    TextModel,
)

INFO = ModelInfo("text-generation", "fake", "cpu", "float32", 0, "continuous")


@dataclass(eq=False)
class DeltaQueue:
    """A choice whose deltas are queued until they are taken."""

    choice: int
    finished: bool = False
    deltas: list[Delta] = field(default_factory=list)

    @property
    def unread(self) -> int:
        return len(self.deltas)

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.finished = delta.finish_reason is not None

    def take_delta(self) -> Delta:
        taken = self.deltas[:]
        del self.deltas[: len(taken)]
        whole = taken[0] if taken else Delta(self.choice)
        for delta in taken[1:]:
            whole.merge(delta)
        return whole


WORDS = ["Hello", " there", ",", " wörld", "!"]
VOCAB_SIZE = 1000
BIG_WORDS = 60


class FakeWeights:
    nbytes = 1000


@dataclass(eq=False)
class Choice(DeltaQueue):
    words: list[str] | None = None  # None: no end
    sent: int = 0  # words

    @property
    def done(self) -> bool:
        return self.finished


@dataclass
class Running:
    item: WorkItem[GenerationInput, str]
    prompt: str
    choices: list[Choice] = field(default_factory=list)
    steps: int = 0


class FakeGenerator:
    info = INFO
    others: OtherModels = ALONE
    hf_tokenizer: Any = None
    max_model_len = 4096
    refused_media = TEXT_ONLY  # a test may empty it
    transcription_chat = staticmethod(transcription_chat)
    compile_state: Literal["running", "done", "off"] = "off"
    stage = ""
    fallbacks: tuple[Fallback, ...] = ()
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, configured=True)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stepped = threading.Semaphore(0)  # released at each step's start
        self.permits = threading.Semaphore(0)  # with `one_by_one`, a step takes one
        self.one_by_one = False
        self.responded = threading.Event()  # set after the first step with output
        self.running: list[Running] = []
        self.payloads: list[GenerationInput] = []
        self.priorities: list[Priority] = []  # of the payloads' items
        self.dropped: list[str] = []  # prompts of cancelled requests
        self.step_error: Exception | None = None  # raised by steps
        self.healthy = True
        self.times = StepTimes()

    @property
    def text_model(self) -> TextModel:
        return self

    def release(self) -> None:
        """Let all steps run from now on."""
        self.one_by_one = False
        self.permits.release(1000)
        self.gate.set()

    # ── in pool threads ──

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        payload = item.payload
        prompt = text_of(payload)
        if payload.adapter and (reason := payload.adapter.unusable_reason):
            raise NotReady(reason)
        if prompt == "refused":
            raise InvalidInput(f"{payload.param}: this prompt is refused", payload.param)
        item.prepared = prompt

    def encode(self, prompt: Chat | str, add_special_tokens: bool = True) -> list[int]:
        text = text_of(prompt)
        if text == "refused":
            raise InvalidInput("the template refuses this")
        if isinstance(prompt, Chat) and prompt.add_generation_prompt:
            text += ">"
        return [1] * add_special_tokens + [ord(letter) % VOCAB_SIZE for letter in text]

    def render(self, chat: Chat) -> str:
        return text_of(chat)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return "".join(chr(token) for token in ids)

    def token(self, token_id: int) -> str:
        if not 0 <= token_id < VOCAB_SIZE:
            raise InvalidInput(f"there is no token {token_id}")
        return chr(token_id)

    def call_id(self, name: str, index: int) -> str:
        return f"call_{name}:{index}"

    def flush(self) -> None:
        pass

    def load_adapter(self, adapter: Adapter) -> None:
        adapter_folder(adapter.root, adapter.path)
        adapter.weights = FakeWeights()

    # ── on the worker's thread ──

    def add(self, item: WorkItem[Any, Any]) -> None:
        payload: GenerationInput = item.payload
        self.payloads.append(payload)
        self.priorities.append(item.owner.priority)
        prompt: str = item.prepared
        first = getattr(payload, "first_choice", 0)
        choices = [Choice(first + n, words=script(prompt)) for n in range(payload.n)]
        for number, choice in enumerate(choices):
            if payload.n > 1 and choice.words is not None:
                choice.words.insert(0, f"{number}:")
        self.running.append(Running(item, prompt, choices))

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def due_at(self, idle_since: float) -> float | None:
        return idle_since if self.running else None

    def finish(self, item: WorkItem, raw: Any) -> Any:
        raise NotImplementedError

    def step(self, idle_since: float = 0.0) -> StepOutcome:
        self.stepped.release()
        assert self.gate.wait(60)
        if self.one_by_one:
            assert self.permits.acquire(timeout=60)
        if self.step_error:
            raise self.step_error
        outcome = StepOutcome(StepReport(admitted=1, decode_tokens=1, total_s=0.001))
        for request in list(self.running):
            if not request.item.open:
                self.dropped.append(request.prompt)
                self.end(request, ClientGone("the client has gone"), outcome)
                continue
            request.steps += 1
            request.item.progress_at = time.monotonic()
            self._advance(request, outcome)
        if outcome.deltas:
            self.responded.set()
        time.sleep(0.0005 if outcome.deltas else 0.002)  # lets other threads run
        return outcome

    def _advance(self, request: Running, outcome: StepOutcome) -> None:
        payload = request.item.payload
        if request.prompt == "hang" or (request.prompt == "big" and request.steps > BIG_WORDS):
            return
        if request.prompt.startswith("bad") and request.steps > 2 * (request.prompt == "bad later"):
            self.end(request, ItemFailed("the model failed on this input"), outcome)
            return
        for number, choice in enumerate(request.choices):
            if not choice.done:
                choice.push(next_delta(payload, request, number, choice))
                outcome.deltas.append((request.item, choice))
        if all(choice.done for choice in request.choices):
            self.end(request, None, outcome)

    def end(self, request: Running, error: Exception | None, outcome: StepOutcome) -> None:
        self.running.remove(request)
        outcome.done.append((request.item, error))

    def clear(self) -> list[WorkItem]:
        items: list[WorkItem] = [request.item for request in self.running]
        self.running = []
        return items

    def warm_up(self) -> None:
        if not self.healthy:
            raise RuntimeError("the worker is broken")

    def close(self) -> None:
        pass


def text_of(prompt: Any) -> str:
    if isinstance(prompt, GenerationInput):
        prompt = prompt.prompt
    if isinstance(prompt, DecisionInput):
        return str(prompt.messages[-1]["content"])
    if isinstance(prompt, Chat):
        return str(prompt.messages[-1]["content"])
    return prompt if isinstance(prompt, str) else "".join(chr(token) for token in prompt)


def script(prompt: str) -> list[str] | None:
    if prompt in ("long", "big", "bad later"):
        return None
    if prompt.startswith("say "):
        words = prompt.removeprefix("say ").split(" ")
        return [words[0], *(" " + word for word in words[1:])]
    return list(WORDS)


def next_delta(payload: Any, request: Running, number: int, choice: Choice) -> Delta:
    if isinstance(payload, DecisionInput):
        options = len(payload.questions[number].options)
        return Delta(number, finish_reason="stop", probabilities=[1 / options] * options)
    delta = Delta(choice.choice)
    if choice.sent == 0:
        if number == 0:
            delta.prompt_tokens, delta.cached_tokens = len(request.prompt), 2
        if payload.token_ids:
            delta.prompt_ids = [ord(letter) for letter in request.prompt]
        if payload.prompt_logprobs is not None:
            top = payload.prompt_logprobs
            delta.prompt_logprobs = [
                logprob(letter, top, first=n == 0) for n, letter in enumerate(request.prompt)
            ]
        if payload.echo:
            add(delta, "content", request.prompt)
            if payload.sampling.logprobs is not None:
                delta.logprobs = [
                    logprob(letter, payload.sampling.logprobs, first=n == 0)
                    for n, letter in enumerate(request.prompt)
                ]
    max_tokens = payload.stopping.max_tokens
    max_tokens = payload.stopping.default_tokens if max_tokens is None else max_tokens
    if max_tokens == 0:
        delta.finish_reason = "length"
        return delta
    word = (
        choice.words[choice.sent] if choice.words else "x" * (100_000 * (request.prompt == "big"))
    )
    word = word or f"w{choice.sent} "
    finish: FinishReason | None = None
    choice.sent += 1
    if choice.words is not None and choice.sent == len(choice.words):
        finish = "stop"
    elif choice.sent == max_tokens:
        finish = "length"
    add_word(delta, word)
    delta.tokens = 1
    if payload.token_ids:
        delta.token_ids.append(choice.sent)
    if payload.sampling.logprobs is not None:
        if "ö" in word:  # two bytes and two tokens, of which the first has no text
            delta.logprobs.append(TokenLogprob(7, "", "ö".encode()[:1], -0.5))
        delta.logprobs.append(logprob(word, payload.sampling.logprobs))
    if finish == "stop" and any(is_call(text) for text in choice.words or ()):
        finish = "tool_calls"
    delta.finish_reason = finish
    return delta


def is_call(word: str) -> bool:
    return word.lstrip()[:1] == "!" and len(word.lstrip()) > 1


def add(delta: Delta, kind: Kind, text: str, name: str | None = None) -> None:
    if text or name is not None:
        delta.merge(Delta(delta.choice, [DeltaPart(kind, text, name)]))


def add_word(delta: Delta, word: str) -> None:
    kind, rest = word.lstrip()[:1], word.lstrip()[1:]
    if kind == "*":
        add(delta, "reasoning", rest + " ")
        delta.reasoning_tokens = 1
    elif is_call(word):
        add(delta, "call", "", rest)
    elif kind == "=":
        add(delta, "call", rest)
    else:
        add(delta, "content", word)


def logprob(text: str, top: int, first: bool = False) -> TokenLogprob:
    others = [TokenLogprob(n, f"{text}{n}" if n else text, b"%d" % n, -1.0 - n) for n in range(top)]
    return TokenLogprob(0, text, text.encode(), None if first else -1.0, tuple(others))
