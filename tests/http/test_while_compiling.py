"""Outputs while another model is compiled, and after it: some flags of torch are the process's."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_adapters, tiny_decoders
from tests.event_streams import post
from tests.generating import ORDINARY
from tests.serving import Server, serving, wait_until
from worker.device.self_check import CannotRun

# Tiny models; LoRA is for the first. Jamba is a hybrid whose class asks whether it is compiled.
SERVED = ("llama", "qwen2-moe", "jamba")
COMPILED = "gpt2"


class HeldCompilation:
    """Replaces what `compile_model` calls: for the model COMPILED it stays within torch.compile
    until `gate` is set, for all others it fails."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def __call__(self, model: Any, *_: Any, **__: Any) -> Any:
        if model.config.model_type != COMPILED:
            raise CannotRun("it is not the model that this test compiles")
        torch.compile(lambda x: x + 1, backend=self._backend)(torch.ones(2))
        return model

    def _backend(self, graph: Callable[..., Any], inputs: list[Tensor]) -> Callable[..., Any]:
        torch.compiler._is_compiling_flag = True  # as it is already, in torch 2.13
        self.entered.set()
        assert self.gate.wait(60)
        torch.compiler._is_compiling_flag = False
        return graph


def outputs(server: Server, model: str, salt: str) -> list[Any]:
    """Return the tokens of some prompts with their log-probabilities, and use prefixes that were
    cached with this salt alone."""
    chance = random.Random(0)
    choices = []
    for length in (5, 40, 70):
        prompt = chance.choices(ORDINARY, k=length)
        body = {"prompt": prompt, "max_tokens": 6, "logprobs": 2, "cache_salt": salt}
        answer = post(server, "/v1/completions", {"model": model, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        choices += answer.json()["choices"]
    return choices


@pytest.mark.usefixtures("native")
def test_outputs_do_not_change_while_another_model_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCompilation()
    monkeypatch.setattr("worker.model.compiling.with_compiled_layers", held)
    tiny_adapters.make(tmp_path / "one", tiny_decoders.folder("llama"), 1)
    models = [f"{name}={tiny_decoders.folder(name)}" for name in (*SERVED, COMPILED)]
    settings: dict[str, Any] = {"lora_dir": str(tmp_path), "lora": ("tuned=one",)}
    settings |= {"compile": "on", "dtype": "float32", "kv_cache_gb": 0.05, "model_control": True}
    with serving(chat_model=",".join(models), **settings) as server:
        asked = ("tuned", *SERVED)
        before = {name: outputs(server, name, "before") for name in asked}
        assert before["tuned"] != before["llama"]
        try:
            assert post(server, "/models/load", {"model": COMPILED}).status_code == 200
            wait_until(held.entered.is_set, 60)
            for name in asked:
                assert outputs(server, name, "while") == before[name], name
        finally:
            held.gate.set()
            wait_until(lambda: not any(t.name == "compile" for t in threading.enumerate()), 60)
        for name in asked:
            assert outputs(server, name, "while") == before[name], name
