"""A runner without a model, which tests can block and make fail."""

import threading
from collections.abc import Callable
from typing import Any

import orjson

from batching.batcher import DynamicBatcher
from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from batching.step_times import MAX_TURN_S
from worker.engines.pipeline.engine import PipelineEngine
from worker.messages.generation import TEXT_ONLY, transcription_chat
from worker.messages.protocol import ALONE, ModelInfo, OtherModels, Runner
from worker.registry import ServedModel

INFO = ModelInfo("fill-mask", "fake", "cpu", "float32", 0, "packed")


class PanicException(BaseException):
    """A panic in a Rust library, as Python sees it."""


class FakeRunner:
    """Returns `{"echo": text}` for a text; raises for texts that contain `bad`.

    Forward passes wait for `gate`. `before` is called with the texts of each and may raise.
    """

    info = INFO
    others: OtherModels = ALONE
    max_model_len = 512
    refused_media = TEXT_ONLY
    transcription_chat = staticmethod(transcription_chat)

    def __init__(self, before: Callable[[list[str]], object] | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)  # released at the start of each forward
        self.before = before or (lambda texts: None)
        self.batches: list[list[str]] = []
        self.healthy = True
        self.warm_ups = 0
        self.probing: Callable[[], object] = lambda: None

    @property
    def text_model(self) -> Any:
        return self  # subclasses with a model name have its attributes

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        text = item.payload.inputs
        if text == "refused" or not (text and isinstance(text, str)):
            raise InvalidInput("this text is refused", "inputs")
        item.prepared = text
        item.tokens = len(text.split())

    def forward(self, prepared: list[Any]) -> list[Any]:
        self.batches.append(list(prepared))
        self.entered.release()
        assert self.gate.wait(60)
        self.before(prepared)
        if any("bad" in text for text in prepared):
            raise ValueError("bad text")
        return [text.upper() for text in prepared]

    def finish(self, item: WorkItem, raw: Any) -> bytes:
        if raw == "UNFINISHED":
            raise ValueError("cannot be finished")
        return orjson.dumps({"echo": raw.lower()})

    def warm_up(self) -> None:
        self.warm_ups += 1
        self.probing()
        if not self.healthy:
            raise RuntimeError("the worker is broken")


class BusyModels(OtherModels):
    """Other models that always have work; counts their steps."""

    busy = True
    max_turn_s = MAX_TURN_S

    def __init__(self) -> None:
        self.steps = 0

    def run_steps(self) -> None:
        self.steps += 1


def batched_model(
    name: str, load: Callable[[], Runner], batcher: DynamicBatcher | None = None
) -> ServedModel:
    """Return an entry of the registry that serves a runner in batches."""
    batcher = batcher or DynamicBatcher(max_size=8, max_tokens=100, max_wait_s=0.0)
    return ServedModel(name, lambda: PipelineEngine(load(), batcher), 8)
