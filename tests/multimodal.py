"""Requests with images and recordings for tiny models, with `generate` as their reference."""

import inspect
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from batching.request_queue import WorkItem
from tests import tiny_multimodal
from tests.generating import GREEDY, Request, Served, shares_template
from worker.device.self_check import CannotRun
from worker.engines.generation import loading
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import load_generator, paged_engine
from worker.messages.generation import Chat, GenerationInput, MediaInput, MediaKind, Stopping
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions
from worker.model.paged_runner import PagedRunner, StateSlots
from worker.vision.multimodal_prompt import MultimodalPrompt

torch.set_num_threads(1)
OUTPUT_TOKENS = 8


@cache
def png(seed: int, width: int = 64, height: int = 48) -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def kind_of(file: bytes) -> MediaKind:
    return "image" if file.startswith(b"\x89PNG") else "audio"


def request(*parts: str | bytes, max_tokens: int = OUTPUT_TOKENS, **fields: Any) -> Request:
    """A message of texts, images and recordings."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)}
        for part in parts
    ]
    files = [part for part in parts if isinstance(part, bytes)]
    at = "messages[0].content"
    media = tuple(MediaInput(file, "auto", at, kind=kind_of(file)) for file in files)
    chat = Chat(({"role": "user", "content": content},), media=media)
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    return WorkItem(GenerationInput(chat, GREEDY, stopping, **fields), float("inf"), 0.0)


@cache
def loaded(model: str) -> GenerationEngine:
    options = GeneratorOptions(
        str(tiny_multimodal.folder(model)), dtype="float32", device="cpu", kv_cache_gb=0.01
    )
    return load_generator(options)


@shares_template
def engine(model: str, blocks: int = 400, max_running: int = 256) -> GenerationEngine:
    """A new engine of a model that is loaded once. Its KV cache is filled with NaN."""
    known = loaded(model)
    assert known.info.batching == "continuous", known.info.why
    language = known.runner.language
    room = min(language.context, blocks * BLOCK)
    runner = PagedRunner(language, blocks, room, 0, StateSlots(32, 32))
    for stored in (*runner.cache.keys, *runner.cache.values):
        stored.fill_(float("nan"))
    options = GeneratorOptions("", max_running=max_running)
    return paged_engine(runner, options, known.input_processor.media_preprocessor)


@cache
def unpaged(model: str) -> GenerationEngine:
    """An engine whose check of paged media has failed."""
    options = GeneratorOptions(str(tiny_multimodal.folder(model)), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_multimodal", fail_check)
        return load_generator(options)


def fail_check(*_: Any) -> None:
    raise CannotRun("simulated")


def in_small_chunks(generator: GenerationEngine, tokens: int) -> GenerationEngine:
    budget: Any = generator._budget
    budget.prompt_tokens = lambda streaming, spent_s, max_turn_s: tokens
    return generator


@cache
def reference_model(model: str) -> Any:
    auto: Any = tiny_multimodal.hf.AutoModelForImageTextToText
    reference = auto.from_pretrained(
        tiny_multimodal.folder(model), dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = None
    return reference.eval()


def forward_inputs(model: str, served: Served) -> dict[str, torch.Tensor]:
    """The arguments of the model's forward for the same prompt and images."""
    prompt = served.item.prepared[0].prepared.multimodal
    preprocessor = loaded(model).input_processor.media_preprocessor
    ids = torch.tensor([list(served.prompt)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(prompt, MultimodalPrompt) and preprocessor:
        output = prompt.recompute().result()
        inputs |= {**output.inputs, **output.media_inputs()}
    names = inspect.signature(reference_model(model).forward).parameters
    return {name: tensor for name, tensor in inputs.items() if name in names}


def generated(model: str, served: Served, count: int = OUTPUT_TOKENS) -> list[int]:
    """The output tokens of transformers' `generate`."""
    output = reference_model(model).generate(
        **forward_inputs(model, served), do_sample=False, max_new_tokens=count, pad_token_id=2
    )
    return [int(token) for token in output[0, len(served.prompt) :]]


@torch.inference_mode()
def scored(model: str, served: Served) -> list[float]:
    """The log-probabilities of the prompt's tokens but the first; -inf for tokens that the model
    has no logit for."""
    logits = reference_model(model)(**forward_inputs(model, served)).logits
    rows = zip(logits[0, :-1].log_softmax(-1).tolist(), served.prompt[1:], strict=True)
    return [row[target] if target < len(row) else float("-inf") for row, target in rows]


def assert_generated(model: str, served: Sequence[Served]) -> None:
    for request in served:
        assert request.choices
        expected = generated(model, request, max(map(len, request.ids)))
        assert request.ids == [expected[: len(ids)] for ids in request.ids]
