"""Requests on plain models run the files that CONTRIBUTING.md calls the core."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from tests.serving import Server, serving
from tests.tiny import folder, for_tokenizer
from tests.tiny_tokenizers import llama_tokenizer
from tests.unit.test_architecture import ROOT, core
from worker.model.compiling import _is_traced

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PACKAGES = ("batching", "worker", "server")
LAYERS = "worker/backends/cpu/"  # the loader puts them into a model


class Calls:
    """The files of the project of which a function runs while it counts, on any thread."""

    def __init__(self) -> None:
        self.counts = False
        self.files: set[str] = set()

    def on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        # an earlier test may have compiled a model, which leaves this function in transformers
        if self.counts and event == "call" and frame.f_code != _is_traced.__code__:
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def counted(self) -> Iterator[set[str]]:
        files: set[str] = set()
        self.files, self.counts = set(), True
        yield files
        self.counts = False
        paths = (Path(name) for name in self.files if name.startswith(str(ROOT)))
        names = {path.relative_to(ROOT).as_posix() for path in paths}
        files |= {name for name in names if name.startswith(PACKAGES)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr("server.apis.openai.jobs.POLL_S", 3600)  # runs without requests
    counter = Calls()
    before = sys.getprofile()
    threading.setprofile(counter.on_event)
    yield counter
    threading.setprofile(before)


@pytest.fixture
def plain(calls: Calls) -> Iterator[Server]:
    tokenizer = llama_tokenizer(TEMPLATE)
    tokenizer.model_max_length = 512
    models: dict[str, Any] = {
        "chat_model": str(for_tokenizer("core", tokenizer)),
        "pipeline_model": str(folder("bert-mlm")),
    }
    with serving(**models, device="cpu", dtype="float32", compile="off") as server:
        yield server


def test_requests_on_plain_models_run_the_core(calls: Calls, plain: Server) -> None:
    message = {"role": "user", "content": "Hello"}
    chat = {"messages": [message], "stream": True, "max_tokens": 20, "ignore_eos": True}
    inputs = {"inputs": "Paris is the [MASK]."}
    with httpx.Client(base_url=plain.url, timeout=60) as client:
        for _ in range(2):  # the first requests also build what later ones find
            with calls.counted() as by_chat:
                assert "[DONE]" in client.post("/v1/chat/completions", json=chat).text
            client.post("/", json=inputs)  # the worker has then removed the chat
            with calls.counted() as by_pipeline:
                assert client.post("/", json=inputs).status_code == 200
    run = {name for name in by_chat | by_pipeline if not name.startswith(LAYERS)}
    assert {"worker/engines/generation/engine.py", "worker/engines/pipeline/engine.py"} <= run
    assert run <= set(core())
    assert len(by_chat) <= 45
    assert len(by_pipeline) <= 25
