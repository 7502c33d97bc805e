"""How the server runs each causal language model of transformers, and whether its greedy output is
that of `generate`."""

import copy
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import generating
from tests.causal_families import build
from tests.generating import ORDINARY, Driver, Request, request
from tests.tiny import hf
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import cached_engine, paged_engine
from worker.error_classification import first_line
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions
from worker.model.loading import LoadingFailed
from worker.model.paged_runner import PagedRunner, StateSlots

NEW = 8
LENGTHS = (3, 17, 40, 55)
FEW_BLOCKS = 7  # for one or two of the longest sequences
TIE = 1e-4  # of two logits, relative to the largest


class NotBuilt(Exception):
    """transformers does not build a tiny model of a type; the message is the reason."""


class Row(NamedTuple):
    """`mode`: paged, own cache or refused; `why`: not paged."""

    mode: str
    why: str


def check_family(kind: str, folder: Path) -> Row:
    """Save a tiny model in the folder and load it as the server does. Compare its greedy outputs
    with those of `generate`: of prompts alone, in a mixed batch, with prefixes that are cached, and
    after preemption. Raise AssertionError if they differ, and NotBuilt without a tiny model."""
    try:
        parts = build(kind)
        with torch.inference_mode():
            parts[0].eval().generate(torch.tensor([[7, 8, 9]]), max_new_tokens=2, pad_token_id=2)
    except Exception as error:  # model classes raise different types
        raise NotBuilt(first_line(error)) from error
    for part in parts:
        part.save_pretrained(folder)
    try:
        generator = generating.load(folder, kv_cache_gb=0.02)
    except LoadingFailed as error:
        return Row("refused", str(error).split(": ", 1)[-1])
    reference = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    chance = random.Random(0)
    texts = [chance.choices(ORDINARY, k=length) for length in LENGTHS]
    longer = [[*text, *chance.choices(ORDINARY, k=5)] for text in texts]
    _compare(reference, _new_engine(generator, 400), [texts[2]])
    together = _new_engine(generator, 400)
    _compare(reference, together, [*texts, *longer])
    _compare(reference, together, longer[::-1])
    _compare(reference, _new_engine(generator, FEW_BLOCKS), [*longer, *texts])
    is_paged = generator.info.batching == "continuous"
    return Row("paged" if is_paged else "own cache", generator.info.why)


def _new_engine(generator: GenerationEngine, blocks: int) -> GenerationEngine:
    runner, options = generator.runner, GeneratorOptions("", max_running=8)
    if not isinstance(runner, PagedRunner):
        return cached_engine(copy.copy(runner), options, generator.info.why)
    language = runner.language
    room = min(language.context, blocks * BLOCK)
    return paged_engine(PagedRunner(language, blocks, room, 8, StateSlots(8, 16)), options)


def _compare(reference: Any, generator: GenerationEngine, texts: Sequence[list[int]]) -> None:
    items: list[Request] = [request(text, max_tokens=NEW) for text in texts]
    driver, chance = Driver(generator), random.Random(1)
    served = []
    for item in items:
        served.append(driver.add(item))
        if chance.random() < 0.5:
            driver.step()
    driver.finish()
    for response, text in zip(served, texts, strict=True):
        (expected,) = generating.generate(reference, [text], NEW)
        (output,) = response.ids
        assert response.error is None, response.error
        if output == expected:
            continue
        index = next(n for n, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b)
        with torch.inference_mode():
            ids = torch.tensor([[*text, *expected[:index]]])
            logits = reference(input_ids=ids).logits[0, -1].double()
        margin = float(logits[expected[index]] - logits[output[index]])
        assert margin < TIE * float(logits.abs().max()), (
            f"the output of a prompt of {len(text)} tokens differs at {index} by a margin of "
            f"{margin:.1e}"
        )


logging.getLogger("transformers").setLevel(logging.ERROR)
