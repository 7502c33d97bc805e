"""Requests with pictures for tiny vision-language models, and `generate` beside them."""

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
from tests import tiny_seeing
from tests.generating import GREEDY, Served
from worker.device.self_check import CannotRun
from worker.generation import loading
from worker.generation.engine import GenerationEngine
from worker.generation.loading import load_generator, paged_engine
from worker.messages.generation import Chat, GenerationInput, ImageInput, Stopping
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions
from worker.model.paged_runner import PagedRunner
from worker.vision.multimodal_prompt import MultimodalPrompt

torch.set_num_threads(1)
COUNT = 8  # tokens of an answer


@cache
def png(seed: int, width: int = 64, height: int = 48) -> bytes:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def request(
    *parts: str | bytes,
    max_tokens: int = COUNT,
    n: int = 1,
    prompt_logprobs: int | None = None,
    cache_namespace: bytes = b"",
) -> WorkItem:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    files = [part for part in parts if isinstance(part, bytes)]
    pictures = tuple(ImageInput(each, "auto", "messages[0].content") for each in files)
    chat = Chat(({"role": "user", "content": content},), images=pictures)
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    asked = GenerationInput(chat, GREEDY, stopping, n=n, prompt_logprobs=prompt_logprobs)
    return WorkItem(asked, float("inf"), 0.0, cache_namespace=cache_namespace)


@cache
def loaded(model: str) -> GenerationEngine:
    options = GeneratorOptions(
        str(tiny_seeing.folder(model)), dtype="float32", device="cpu", kv_cache_gb=0.01
    )
    return load_generator(options)


def engine(model: str, blocks: int = 400, max_running: int = 256) -> GenerationEngine:
    """A fresh one, of a model that is loaded once. Its memory is full of what are no numbers."""
    known = loaded(model)
    assert known.info.batching == "continuous", known.info.why
    language = known.language
    runner = PagedRunner(language, blocks, min(language.context, blocks * BLOCK), 0)
    for stored in (*runner.cache.keys, *runner.cache.values):
        stored.fill_(float("nan"))
    return paged_engine(
        runner, GeneratorOptions("", max_running=max_running), known.image_preprocessor
    )


@cache
def unpaged(model: str) -> GenerationEngine:
    """As if the model refused to run paged."""
    options = GeneratorOptions(str(tiny_seeing.folder(model)), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_multimodal", refuse)
        return load_generator(options)


def refuse(*_: Any) -> None:
    raise CannotRun("as if")


def in_small_chunks(generator: GenerationEngine, tokens: int) -> GenerationEngine:
    budget: Any = generator._budget
    budget.prompt_tokens = lambda streaming, spent_s: tokens
    return generator


@cache
def oracle(model: str) -> Any:
    auto: Any = tiny_seeing.hf.AutoModelForImageTextToText
    made = auto.from_pretrained(
        tiny_seeing.folder(model), dtype=torch.float32, attn_implementation="eager"
    )
    made.generation_config.eos_token_id = None
    return made.eval()


def inputs_of(model: str, served: Served) -> dict[str, torch.Tensor]:
    """What the model's forward takes of the same prompt and pictures."""
    multimodal, image_preprocessor = (
        served.item.prepared[0].prepared.multimodal,
        loaded(model).image_preprocessor,
    )
    ids = torch.tensor([list(served.prompt)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(multimodal, MultimodalPrompt) and image_preprocessor:
        made = multimodal.process().result()
        inputs |= {**made.inputs, **image_preprocessor.processor.joined(made.images)}
    takes = inspect.signature(oracle(model).forward).parameters
    return {name: each for name, each in inputs.items() if name in takes}


def generated(model: str, served: Served, count: int = COUNT) -> list[int]:
    """What `generate` makes of it."""
    output = oracle(model).generate(
        **inputs_of(model, served), do_sample=False, max_new_tokens=count, pad_token_id=2
    )
    return [int(each) for each in output[0, len(served.prompt) :]]


@torch.inference_mode()
def scored(model: str, served: Served) -> list[float]:
    """The log-probabilities of the prompt's tokens but the first; of what it never says, none."""
    logprobs = oracle(model)(**inputs_of(model, served)).logits[0, :-1].log_softmax(-1)
    rows = zip(logprobs.tolist(), served.prompt[1:], strict=True)
    return [row[target] if target < len(row) else float("-inf") for row, target in rows]


def assert_generated(model: str, served: Sequence[Served]) -> None:
    for each in served:
        assert each.choices
        for ids in each.ids:
            assert ids == generated(model, each, len(ids))
