"""Experts on a GPU, run by Triton's interpreter: they give the output of transformers' eager ones,
and never wait for the GPU. No GPU is needed."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import tiny_decoders

pytest.importorskip("triton", reason="triton exists for Linux only")

from worker.backends.cpu.experts import experts_of
from worker.backends.cuda import triton_experts
from worker.backends.cuda.triton_experts import MAX_ROWS, NAME, use_triton_experts
from worker.device.self_check import CannotRun

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter runs on CPUs", allow_module_level=True)


@pytest.fixture(autouse=True)
def gpu_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "waits", lambda experts: True)


# a plain one; with biases, transposed and interleaved
MODELS = ("qwen3-moe", "gpt-oss")


def loaded(name: str) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(tiny_decoders.folder(name), experts_implementation="eager").eval()


@torch.inference_mode()
def logits(model: Any, rows: int) -> Tensor:
    ids = torch.arange(rows)[None] % 290 + 7
    output: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return output


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_eager_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "MAX_ROWS", 80)  # the last count is left to torch
    model, counts = loaded(name), (1, 7, 33, 80, 81)  # tiles of 16, 32 and 64 rows
    expected = {rows: logits(model, rows) for rows in counts}
    use_triton_experts(model, partial(logits, model, 3))
    assert model.config._experts_implementation == NAME
    for rows in counts:
        torch.testing.assert_close(logits(model, rows), expected[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_experts_do_not_wait(name: str) -> None:
    """Tensors on the meta device have no values to wait for."""
    model = loaded(name)
    experts = next(experts_of(model)).to("meta")
    choices = model.config.num_experts_per_tok
    hidden = torch.empty(MAX_ROWS, model.config.hidden_size, device="meta")
    index = torch.zeros(MAX_ROWS, choices, dtype=torch.long, device="meta")
    weights = torch.empty(MAX_ROWS, choices, device="meta")
    with pytest.raises(NotImplementedError):  # eager ones read which experts are hit
        experts(hidden, index, weights)
    model.set_experts_implementation(NAME)
    assert experts(hidden, index, weights).shape == hidden.shape


def test_experts_stay_if_the_check_raises() -> None:
    model = loaded("qwen3-moe")

    def check() -> None:
        raise CannotRun("other logits")

    with pytest.raises(CannotRun, match="other logits"):
        use_triton_experts(model, check)
    assert model.config._experts_implementation == "eager"


def test_experts_that_do_not_wait_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "waits", lambda experts: False)
    model = loaded("qwen3-moe")
    use_triton_experts(model, partial(logits, model, 3))
    assert model.config._experts_implementation == "eager"
