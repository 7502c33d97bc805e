"""Models that are loaded by a request and unloaded, with fake models."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from server.lifespan import drain
from tests.event_streams import CLIENT, chat, error_of, post
from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.serving import Server, serving, wait_until
from worker.load_context import add_memory, report
from worker.model.loading import LoadingFailed, TooLittleMemory

MODEL_BYTES = 600_000


@dataclass
class FakeMemory:
    nbytes: int = MODEL_BYTES

    def release(self) -> None:
        self.nbytes = 0


class Loads:
    """Loads chat models: the first at once, later ones when `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None  # of the next load
        self.generators: list[FakeGenerator] = []

    def __call__(self) -> FakeGenerator:
        if self.generators:
            report("weights", 1, 4)
            self.entered.release()
            assert self.gate.wait(60)
        if error := self.error:
            self.error = None
            raise error
        add_memory(FakeMemory())
        self.generators.append(FakeGenerator())
        return self.generators[-1]


@dataclass
class Setup:
    server: Server
    loads: Loads
    pool: ThreadPoolExecutor

    def ask(
        self, model: str | None, text: str = "say yes", **more: Any
    ) -> "Future[httpx.Response]":
        return self.pool.submit(chat, self.server, text, model=model, **more)

    def state(self, name: str) -> str:
        return self.server.worker_client.models[name].state

    def awaiting(self) -> int:
        return self.server.worker_client.queue.awaiting.total()


@contextmanager
def loading(models: str = "a=demo,b=demo", **settings: Any) -> Iterator[Setup]:
    loads = Loads()
    with (
        serving(load_chat=loads, chat_model=models, **settings) as server,
        ThreadPoolExecutor(16) as pool,
    ):
        try:
            yield Setup(server, loads, pool)
        finally:
            loads.gate.set()
            for generator in loads.generators:
                generator.release()


def models_of(server: Server) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = CLIENT.get(server.url + "/models").json()["data"]
    return models


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_model_serves_while_another_one_is_loaded_at_the_start() -> None:
    gate = threading.Event()

    def load_embedder() -> FakeRunner:
        report("weights", 1, 4)
        assert gate.wait(60)
        return FakeRunner()

    loaders: dict[str, Any] = {"load": FakeRunner, "load_embedder": load_embedder}
    with serving(ready=False, model_control=True, **loaders) as server:
        try:
            wait_until(lambda: httpx.post(server.url, content="a").status_code == 200)
            ready = CLIENT.get(server.url + "/ready")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "5")
            state = "the embedding model 'demo' is loading (stage weights, 25 %)"
            wait_until(lambda: error_of(CLIENT.get(server.url + "/ready"))["message"] == state)
            refused = post(server, "/v1/embeddings", {"input": "a"})
            assert refused.status_code == 503
            assert error_of(refused)["message"] == "the model is loading"
            states = {m["serves"]: m["status"]["value"] for m in models_of(server)}
            assert states["embedding"] == "loading"
            kept = post(server, "/models/unload", {"model": "demo"})
            assert error_of(kept)["message"] == "model: 'demo' is loading, not loaded"
        finally:
            gate.set()
        wait_until(lambda: CLIENT.get(server.url + "/ready").status_code == 200)


def test_only_the_first_model_is_loaded_at_the_start() -> None:
    with loading() as setup:
        assert (setup.state("generation"), setup.state("generation:b")) == ("ready", "unloaded")
        assert content(setup.ask("a").result()) == content(setup.ask(None).result()) == "yes"
        assert len(setup.loads.generators) == 1
        assert content(setup.ask("b").result()) == "yes"
        assert len(setup.loads.generators) == 2


def test_requests_wait_in_order_while_others_are_answered() -> None:
    with loading() as setup:
        setup.loads.gate.clear()
        waiting = []
        for n in range(5):
            waiting.append(setup.ask("b", f"say {n}"))
            wait_until(lambda n=n: setup.awaiting() == n + 1)  # type: ignore[misc]  # a default
        assert content(setup.ask("a").result()) == "yes"
        assert setup.state("generation:b") == "loading"
        setup.loads.gate.set()
        assert [content(answer.result()) for answer in waiting] == [*"01234"]
        payloads: Any = setup.loads.generators[1].payloads
        prompts = [payload.prompt.messages[-1]["content"] for payload in payloads]
        assert prompts == [f"say {n}" for n in range(5)]


def test_the_504_names_the_model_and_its_progress() -> None:
    with loading(request_timeout_s=0.3) as setup:
        setup.loads.gate.clear()
        late = setup.ask("b").result()
        assert late.status_code == 504
        message = error_of(late)["message"]
        assert re.search(r"the model 'b' is loading for \d+\.\d s", message)
        assert "(stage weights, 25 %)" in message


def test_waiting_requests_hold_at_most_a_quarter_of_the_queue() -> None:
    with loading(max_queue_size=8) as setup:
        setup.loads.gate.clear()
        waiting = [setup.ask("b"), setup.ask("b")]
        wait_until(lambda: setup.awaiting() == 2)
        refused = setup.ask("b").result()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "2 of 2 slots for requests that await models" in error_of(refused)["message"]
        assert content(setup.ask("a").result()) == "yes"
        setup.loads.gate.set()
        assert [content(answer.result()) for answer in waiting] == ["yes", "yes"]


def test_a_failed_load_fails_its_waiting_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading() as setup:
        long = setup.ask("a", "long", max_tokens=10_000)
        wait_until(lambda: bool(setup.loads.generators[0].running))
        setup.loads.gate.clear()
        setup.loads.error = LoadingFailed(
            "the model 'demo' could not be loaded for chat: no weights"
        )
        waiting = [setup.ask("b") for _ in range(3)]
        wait_until(lambda: setup.awaiting() == 3)
        setup.loads.gate.set()
        for answer in waiting:
            assert answer.result().status_code == 503
            assert error_of(answer.result())["message"] == (
                "the model 'b' could not be loaded: no weights"
            )
        refused = setup.ask("b").result()  # within the back-off
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        assert not long.done()
        entry = setup.server.worker_client.manager.models["generation:b"]
        entry.retry_at = 0.0
        assert content(setup.ask("b").result()) == "yes"
        assert entry.failures == 0
        setup.loads.generators[0].release()


def test_the_reason_of_a_failed_load_keeps_the_setting_that_it_names() -> None:
    with loading() as setup:
        for reason in (
            "MAX_MODEL_LEN=512: the memory holds 320 tokens",
            "KV_CACHE_GB=9: 1 GB is free",
        ):
            setup.server.worker_client.manager.models["generation:b"].retry_at = 0.0
            setup.loads.error = LoadingFailed(reason)
            refused = setup.ask("b").result()
            assert refused.status_code == 503
            message = error_of(refused)["message"]
            assert message == f"the model 'b' could not be loaded: {reason}"


def test_a_client_that_leaves_during_a_load_frees_its_slot() -> None:
    with loading(max_queue_size=4) as setup:
        setup.loads.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                setup.server.url + "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "say no"}], "model": "b"},
                timeout=0.5,
            )
        wait_until(lambda: setup.awaiting() == 0)
        answer = setup.ask("b")  # the only slot
        wait_until(lambda: setup.awaiting() == 1)
        setup.loads.gate.set()
        assert content(answer.result()) == "yes"
        assert len(setup.loads.generators[1].payloads) == 1


def test_tokenizing_and_responses_wait_as_well() -> None:
    with loading() as setup:
        counted = post(setup.server, "/tokenize", {"prompt": "ab", "model": "b"}).json()
        assert counted["count"] == 3
    with loading() as setup:
        answer = post(setup.server, "/v1/responses", {"input": "say yes", "model": "b"}).json()
        assert (answer["temperature"], answer["top_p"]) == (0.7, 0.8)  # the model's defaults
        assert answer["output"][0]["content"][0]["text"] == "yes"


def test_an_idle_model_is_unloaded_and_loaded_again() -> None:
    with loading("a=demo;pin,b=demo", model_idle_s=0.05) as setup:
        assert content(setup.ask("b").result()) == "yes"
        wait_until(lambda: setup.state("generation:b") == "unloaded")
        assert setup.state("generation") == "ready"
        for _ in range(3):
            assert content(setup.ask("b").result()) == "yes"
        assert len(setup.loads.generators) >= 3


def test_a_model_in_use_is_not_idle() -> None:
    with loading(model_idle_s=0.05) as setup:
        setup.loads.gate.clear()
        setup.loads.gate.set()
        streamed = setup.ask("b", "long", max_tokens=10_000)
        wait_until(lambda: setup.state("generation:b") == "ready")
        wait_until(lambda: setup.state("generation") == "unloaded")  # the other one is
        assert setup.state("generation:b") == "ready"
        setup.loads.generators[1].release()
        setup.server.worker_client.loop.call_soon_threadsafe(setup.server.worker_client.cancel_all)
        streamed.result()


@contextmanager
def loading_one_at_a_time(**settings: Any) -> Iterator[Setup]:
    """The budget fits one model."""
    with loading(models_gb=1.5 * MODEL_BYTES / 1e9, **settings) as setup:
        for model in setup.server.worker_client.models.values():
            model.measure = lambda: (MODEL_BYTES, 1 << 40)
        yield setup


def test_the_least_recently_used_model_makes_room() -> None:
    with loading_one_at_a_time() as setup:
        for name in "babab":
            assert content(setup.ask(name).result()) == "yes"
            states = {setup.state("generation"), setup.state("generation:b")}
            assert states == {"ready", "unloaded"}


def test_a_busy_model_finishes_and_makes_room_so_that_nobody_starves() -> None:
    with loading_one_at_a_time() as setup:
        first = setup.loads.generators[0]
        first.one_by_one = True
        running = setup.ask("a", "say 1 2 3")
        wait_until(lambda: bool(first.running))
        waiting = setup.ask("b")
        busy = setup.server.worker_client.manager.models["generation"]
        wait_until(lambda: busy.departure is not None)
        later = setup.ask("a", "say later")  # waits behind: the model leaves
        wait_until(lambda: setup.awaiting() == 2)
        first.release()
        assert content(running.result()) == "1 2 3"
        assert content(waiting.result()) == "yes"
        assert content(later.result()) == "later"
        assert len(setup.loads.generators) == 3


def test_no_room_beside_pinned_models_is_an_error() -> None:
    with loading_one_at_a_time() as setup:
        setup.server.worker_client.models["generation"].pin = True
        refused = setup.ask("b").result()
        assert refused.status_code == 503
        assert "no model can be unloaded" in error_of(refused)["message"]
        assert content(setup.ask("a").result()) == "yes"


def test_a_load_that_lacks_memory_unloads_others_and_tries_again() -> None:
    """The weights fit by their sizes; the cache does not."""
    with loading("a=demo,b=demo,c=demo") as setup:
        assert content(setup.ask("b").result()) == "yes"
        assert content(setup.ask("a").result()) == "yes"
        setup.loads.error = TooLittleMemory("the model 'c' could not be loaded for chat: no room")
        assert content(setup.ask("c").result()) == "yes"
        assert setup.state("generation:b") == "unloaded"  # the least recently used
        assert setup.state("generation") == "ready"
        assert setup.server.worker_client.manager.models["generation:c"].failures == 0
        setup.loads.error = LoadingFailed("the model 'b' could not be loaded for chat: no weights")
        assert setup.ask("b").result().status_code == 503
        assert setup.state("generation") == setup.state("generation:c") == "ready"


def test_the_last_model_that_lacks_memory_fails_with_the_reason() -> None:
    with loading("a=demo;pin,b=demo") as setup:
        setup.loads.error = TooLittleMemory("the model 'b' could not be loaded for chat: no room")
        refused = setup.ask("b").result()
        assert refused.status_code == 503
        assert error_of(refused)["message"] == "the model 'b' could not be loaded: no room"
        assert content(setup.ask("a").result()) == "yes"


def test_a_drain_answers_the_requests_that_wait_for_a_load() -> None:
    with loading() as setup:
        setup.loads.gate.clear()
        waiting = setup.ask("b")
        wait_until(lambda: setup.awaiting() == 1)
        client = setup.server.worker_client
        drained = asyncio.run_coroutine_threadsafe(drain(client, 60), client.loop)
        wait_until(lambda: client.draining)
        assert setup.ask("a").result().status_code == 503
        setup.loads.gate.set()
        assert content(waiting.result()) == "yes"
        drained.result(60)


# ── listing, loading and unloading by an operator ──


def status(setup: Setup, name: str, path: str = "/v1/models") -> dict[str, Any]:
    listed = CLIENT.get(setup.server.url + path).json()["data"]
    [found] = [model["status"] for model in listed if model["id"] == name]
    return dict(found)


def test_the_listing_has_states_and_progress() -> None:
    with loading(model_control=True) as setup:
        assert status(setup, "a") == {"value": "loaded"}
        assert status(setup, "b", "/models") == {"value": "unloaded"}
        setup.loads.gate.clear()
        assert post(setup.server, "/models/load", {"model": "b"}).json() == {"success": True}
        assert setup.loads.entered.acquire(timeout=60)
        assert status(setup, "b") == {
            "value": "loading", "stage": "weights", "progress": {"current": 1, "total": 4},
        }  # fmt: skip
        again = post(setup.server, "/models/load", {"model": "b"})
        assert (again.status_code, "already loading" in error_of(again)["message"]) == (400, True)
        setup.loads.error = LoadingFailed("the model could not be loaded for chat: no weights")
        setup.loads.gate.set()
        wait_until(lambda: status(setup, "b")["value"] == "failed")
        assert status(setup, "b") == {"value": "failed", "failed": True, "error": "no weights"}
        assert post(setup.server, "/models/load", {"model": "b"}).status_code == 200  # at once
        wait_until(lambda: status(setup, "b")["value"] == "loaded")


def test_unloading_waits_for_what_runs_and_a_request_loads_again() -> None:
    with loading(model_control=True) as setup:
        first = setup.loads.generators[0]
        first.one_by_one = True
        running = setup.ask("a", "say 1 2")
        wait_until(lambda: bool(first.running))
        assert post(setup.server, "/models/unload", {"model": "a"}).json() == {"success": True}
        again = post(setup.server, "/models/unload", {"model": "a"})
        assert error_of(again)["message"] == "model: 'a' is already being unloaded"
        later = setup.ask("a", "say later")
        wait_until(lambda: setup.awaiting() == 1)
        assert status(setup, "a")["value"] == "loading"
        first.release()
        assert (content(running.result()), content(later.result())) == ("1 2", "later")
        for name, reason in (("b", "is unloaded, not loaded"), ("nobody", "there is no model")):
            refused = post(setup.server, "/models/unload", {"model": name})
            assert refused.status_code in (400, 404)
            assert reason in error_of(refused)["message"]
    with loading("a=demo;pin", model_control=True) as setup:
        refused = post(setup.server, "/models/unload", {"model": "a"})
        assert (refused.status_code, error_of(refused)["message"]) == (400, "model: 'a' is pinned")


@contextmanager
def stuck_load(setup: Setup) -> Iterator["Future[httpx.Response]"]:
    """Have the load of b hang, with a request that waits for it; later loads do not hang."""
    gate = setup.loads.gate = threading.Event()
    waiting = setup.ask("b")
    assert setup.loads.entered.acquire(timeout=60)
    setup.loads.gate = threading.Event()
    setup.loads.gate.set()
    try:
        yield waiting
        assert content(setup.ask("c").result()) == "yes"  # by another thread
        assert len(setup.loads.generators) == 2
    finally:
        gate.set()


def test_unloading_ends_a_load_and_a_stuck_one_is_left_with_its_thread() -> None:
    with loading("a=demo,b=demo,c=demo", model_control=True) as setup:
        worker = setup.server.worker_client.worker
        thread = worker.loader.thread
        with stuck_load(setup) as waiting:
            assert post(setup.server, "/models/unload", {"model": "b"}).json() == {"success": True}
            answer = waiting.result()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert error_of(answer)["message"] == "the model 'b' was unloaded"
            assert status(setup, "b") == {"value": "unloaded"}
        thread.join(60)  # it ends with its load
        assert not thread.is_alive()
        assert worker.loader.thread.is_alive()
        assert len(setup.loads.generators) == 3
        assert (status(setup, "b"), worker.models["generation:b"].nbytes) == (
            {"value": "unloaded"},
            0,
        )
        assert content(setup.ask("b").result()) == "yes"


def test_a_load_that_waits_for_another_one_is_cancelled() -> None:
    with loading("a=demo,b=demo,c=demo", model_control=True) as setup:
        setup.loads.gate.clear()
        first = setup.ask("b")
        assert setup.loads.entered.acquire(timeout=60)
        second = setup.ask("c")
        wait_until(lambda: setup.awaiting() == 2)
        assert post(setup.server, "/models/unload", {"model": "c"}).json() == {"success": True}
        assert error_of(second.result())["message"] == "the model 'c' was unloaded"
        setup.loads.gate.set()
        assert content(first.result()) == "yes"
        assert (status(setup, "b"), status(setup, "c")) == (
            {"value": "loaded"}, {"value": "unloaded"},
        )  # fmt: skip


def test_a_load_without_progress_is_abandoned() -> None:
    with loading("a=demo,b=demo,c=demo", load_timeout_s=0.2) as setup, stuck_load(setup) as waiting:
        answer = waiting.result()
        assert answer.status_code == 503
        reason = "the model 'b' could not be loaded: it made no progress for 0.2 s (LOAD_TIMEOUT_S)"
        assert error_of(answer)["message"] == reason


def test_load_model_sends_the_progress() -> None:
    with loading(model_control=True) as setup:
        answer = post(setup.server, "/load_model", {"model": "b"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
        assert events[0] == {"status": "loading", "model": "b", "stage": "processor"}
        assert events[-1] == {"status": "ready", "model": "b", "cached": False}
        ready = post(setup.server, "/load_model", {"model": "b"}).text
        assert json.loads(ready[6:]) == {"status": "ready", "model": "b", "cached": True}
        assert post(setup.server, "/models/unload", {"model": "b"}).status_code == 200
        again = post(setup.server, "/load_model", {"model": "b"}).text
        assert json.loads(again.splitlines()[0][6:]) == events[0]
    with loading(model_control=True) as setup:
        setup.loads.error = LoadingFailed("the model could not be loaded for chat: no weights")
        last = post(setup.server, "/load_model", {"model": "b"}).text.splitlines()[-2]
        event = {"status": "error", "model": "b", "message": "no weights"}
        assert json.loads(last[6:]) == event


CONTROL = ("/models/load", "/models/unload", "/load_model")


@pytest.mark.parametrize(
    ("settings", "key", "allowed"),
    [
        ({}, None, False),
        ({"model_control": True}, None, True),
        ({"api_keys": ("user",)}, "user", False),
        ({"api_keys": ("user",), "model_control": True}, "user", False),
        ({"api_keys": ("user",), "admin_keys": ("boss",)}, "user", False),
        ({"api_keys": ("user",), "admin_keys": ("boss",)}, "boss", True),
        ({"admin_keys": ("boss",)}, None, False),
        ({"admin_keys": ("boss",), "model_control": True}, None, False),
        ({"admin_keys": ("boss",)}, "boss", True),
    ],
)
def test_only_operators_load_unload_and_reset(
    settings: dict[str, Any], key: str | None, allowed: bool
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with loading(**settings) as setup:
        for path in CONTROL:
            name = "a" if path == "/models/unload" else "b"
            answer = CLIENT.post(setup.server.url + path, json={"model": name}, headers=headers)
            assert answer.status_code == (200 if allowed else 403), (path, answer.text)
            if allowed and path == "/models/load":
                wait_until(lambda: setup.state("generation:b") == "ready")
        for path in ("/reset", "/reset_prefix_cache"):
            answer = CLIENT.post(setup.server.url + path, headers=headers)
            assert answer.status_code == (200 if allowed else 403), (path, answer.text)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "none", "lora_path": "none"}
            answer = CLIENT.post(setup.server.url + path, json=body, headers=headers)
            assert (answer.status_code == 403) is not allowed, (path, answer.text)
            assert allowed or error_of(answer)["code"] == "admin_key_needed"
        listed = CLIENT.get(setup.server.url + "/models", headers=headers)
        assert listed.status_code == 200
        if "admin_keys" in settings and "api_keys" not in settings:
            assert chat(setup.server, "say yes").status_code == 200  # needs no key
