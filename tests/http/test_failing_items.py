"""An exception while the worker handles an item fails that item alone."""

import json
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import httpx
import pytest

from batching.request_queue import WorkItem
from tests import tiny_chat
from tests.event_streams import frames
from tests.fakes import FakeRunner, PanicException
from tests.matrix import matrix
from tests.serving import Server, serving, wait_until
from worker.text.parser import OutputParser

ERRORS: list[type[BaseException]] = [RecursionError, MemoryError, PanicException]
POISON = "poison"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}}

# Methods that work on one choice, and the object that has each.
CHOICE_METHODS: dict[str, Callable[[Any], Any]] = {
    "start": lambda choice: choice,
    "push": lambda choice: choice,
    "_detokenizer.push": lambda choice: choice._detokenizer,
    "_parser.feed": lambda choice: choice._parser,
    "_stop_strings.push": lambda choice: choice._stop_strings,
    "_stop_strings.flush": lambda choice: choice._stop_strings,
    "sampling.accept": lambda choice: choice.sampling,
    "constraints.draft": lambda choice: choice.constraints,
    "constraints.mask": lambda choice: choice.constraints,
    "constraints.accept_token": lambda choice: choice.constraints,
    "constraints.update_phase": lambda choice: choice.constraints,
}
# Methods that work on all requests, and the kind of request that calls each.
SHARED_METHODS = {
    "generator.scheduler.schedule": "chat",
    "generator.scheduler.remove": "chat",
    "generator.scheduler.add": "chat",
    "generator.scheduler.pool.close": "chat",
    "generator.step": "chat",
    "generator._collect": "chat",
    "model.engine.batcher.add": "pipeline",
    "model.engine.batcher.take": "pipeline",
    "model.engine.batcher.due_at": "pipeline",
    "model.engine.batcher.succeeded": "pipeline",
    "runner.forward": "pipeline",
    "server.worker_client.on_step": "pipeline",
}


class Stage:
    """A server with a pipeline and a generator, and a method that raises when it is called next."""

    def __init__(self, server: Server, runner: FakeRunner, generator: Any) -> None:
        self.server, self.runner, self.generator = server, runner, generator
        self.raised = threading.Event()
        self.model: Any = server.worker_client.models["pipeline"]

    def raise_in(
        self, owner: Any, name: str, error: type[BaseException], once: bool = True
    ) -> None:
        own = getattr(owner, name)

        def raising(*arguments: Any) -> Any:
            if once:
                setattr(owner, name, own)
            self.raised.set()
            raise error("on purpose")

        setattr(owner, name, raising)

    def poison(self, place: str, error: type[BaseException]) -> None:
        """Make the next request with the text POISON raise in that method."""
        prepare = self.generator.prepare

        def preparing(item: WorkItem[Any, Any]) -> None:
            prepare(item)
            if item.payload.prompt.messages[-1]["content"] == POISON:
                self.generator.prepare = prepare
                owner = CHOICE_METHODS[place](item.prepared[0])
                self.raise_in(owner, place.rpartition(".")[2], error, once=False)

        self.generator.prepare = preparing

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return httpx.post(self.server.url + "/v1/chat/completions", json=body, timeout=60)

    def pipeline(self, text: str = "hello") -> httpx.Response:
        return httpx.post(self.server.url + "/", content=text, timeout=60)


@pytest.fixture(scope="module")
def shared() -> Iterator[Stage]:
    runner = FakeRunner()
    generator: Any = tiny_chat.engine()
    generator.close = lambda: None  # other tests use its grammar sandbox
    with serving(lambda: runner, load_chat=lambda: generator) as server:
        yield Stage(server, runner, generator)


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    shared.raised.clear()
    yield shared
    assert shared.raised.is_set(), "the method was not called"
    assert shared.chat().status_code == 200
    assert shared.pipeline().status_code == 200
    assert httpx.get(shared.server.url + "/health").status_code == 200
    generator = shared.generator
    wait_until(lambda: not generator.live and not generator.scheduler.pool.used)


@pytest.mark.parametrize(
    ("place", "error"),
    matrix(
        [
            *((place, PanicException) for place in CHOICE_METHODS),
            *(("push", error) for error in ERRORS[:2]),
        ],
        *((place, PanicException) for place in ("start", "push", "constraints.accept_token")),
    ),
)
def test_an_error_in_one_choice_fails_its_request_alone(
    stage: Stage, place: str, error: type[BaseException]
) -> None:
    stage.poison(place, error)
    url = stage.server.url + "/v1/chat/completions"
    mate = {
        "messages": [{"role": "user", "content": "mate"}],
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", url, json=mate, timeout=60) as stream:
        pieces = stream.iter_bytes()  # lines would end at characters of the text too
        first = next(pieces)
        held = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
        # with a penalty its history is looked at; a sampled `<think>` would leave no content
        penalty = {"frequency_penalty": 0.1, "temperature": 0}
        answer = stage.chat(POISON, n=2, stop="none of it", **penalty, **held)
        wanted = "out_of_memory" if error is MemoryError else "item_failed"
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, wanted)
        *_, last, _ = frames((first + b"".join(pieces)).decode())
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_text_that_is_read_fails_its_request_alone(
    stage: Stage, error: type[BaseException]
) -> None:
    stage.poison("_detokenizer.push", error)
    answer = stage.chat(POISON, temperature=0)  # a sampled end token would leave no text
    wanted = "out_of_memory" if error is MemoryError else "item_failed"
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, wanted)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", SHARED_METHODS)
def test_an_error_outside_any_request_leaves_the_worker_working(
    stage: Stage, place: str, error: type[BaseException]
) -> None:
    owner, _, name = place.rpartition(".")
    stage.raise_in(attrgetter(owner)(stage), name, error)
    assert getattr(stage, SHARED_METHODS[place])().status_code == 500


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_after_a_batch_or_step_leaves_no_request_waiting(
    stage: Stage, error: type[BaseException]
) -> None:
    stage.raise_in(stage.model.engine, "_report", error)
    assert stage.pipeline().status_code in (200, 500)
    stage.raised.clear()
    stage.raise_in(stage.server.worker_client, "on_step", error)
    assert stage.chat().status_code == 500


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_the_sampler_or_the_masks_leaves_the_generator_working(
    stage: Stage, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*arguments: Any) -> Any:
        monkeypatch.undo()
        stage.raised.set()
        raise error("on purpose")

    monkeypatch.setattr("worker.engines.generation.engine.sample", raising)
    assert stage.chat().status_code == 500
    stage.raise_in(stage.generator._masks, "start", error)
    assert stage.chat(response_format={"type": "json_object"}).status_code == 500


def test_a_request_that_failed_in_a_step_that_raises_is_answered(stage: Stage) -> None:
    """The step raises before it returns the request's own failure."""
    stage.poison("push", RecursionError)
    stage.raise_in(stage.generator, "_collect", ValueError)
    assert stage.chat(POISON).status_code == 500


def test_a_call_that_nests_a_thousand_brackets_is_answered(stage: Stage) -> None:
    """In place of a name, in a turn that the model is to go on with: it was the worker's end."""
    stage.raised.set()
    begun = '<tool_call>\n{"name": ' + "[" * 600 + '"x"'
    tool = {"type": "function", "function": {"name": "look"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": begun}]
    answer = stage.chat(messages=messages, tools=[tool], continue_final_message=True)
    assert answer.status_code == 200


def test_text_is_read_in_the_pool_and_once_for_all_choices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that is to be gone on with may be long."""
    stage.raised.set()
    threads: list[str] = []
    own = OutputParser.__init__

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        own(*arguments)

    monkeypatch.setattr(OutputParser, "__init__", watched)
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "<think>well"},
    ]
    answer = stage.chat(messages=messages, continue_final_message=True, n=9, max_tokens=3)
    assert len(answer.json()["choices"]) == 9
    assert len(threads) == 1
    assert threads[0].startswith("pool-")
