"""Garbage collection once a model is compiled."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from server.lifespan import freeze_compiled


def test_objects_of_a_compilation_are_frozen_once_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str]] = []
    later: list[tuple[Any, ...]] = []
    model = SimpleNamespace(compile_state="running")
    loop = SimpleNamespace(call_later=lambda _, *call: later.append(call))
    worker_client: Any = SimpleNamespace(models={"generation": model}, loop=loop)
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append((name, model.compile_state)))
    freeze_compiled(worker_client)
    assert calls == []
    model.compile_state = "done"
    [(function, *arguments)] = later
    function(*arguments)
    assert calls == [("collect", "done"), ("freeze", "done")]
