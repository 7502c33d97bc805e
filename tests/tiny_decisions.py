"""A tiny random model for decisions: labels are tokens, and their probabilities differ."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from batching.request_queue import WorkItem
from batching.step_times import PrefillBudget
from server.apis.openai.decisions.systemone import SystemOneRequest
from server.apis.openai.request_fields import decode
from tests import tiny_chat
from tests.tiny import for_tokenizer
from worker.backends.cached_runner import CachedRunner
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem
from worker.engines.generation.loading import cached_engine, load_generator, paged_engine
from worker.messages.decisions import DecisionInput, Question
from worker.model.attention.kv_cache import BLOCK
from worker.model.language_model import GeneratorOptions, load_language_model
from worker.model.paged_runner import PagedRunner

STATE = "I was charged twice for my order, and the second parcel never came. " * 4
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund requested?"},
    "tone": {"type": "choice", "criteria": {"calm": "polite", "angry": None, "sad": None}},
    "urgency": {"type": "score", "criteria": ["can wait", "this week", "today"]},
}
PAIRS = ["AB", "AC", "BA", "CD"]  # labels beyond the letters


@cache
def folder() -> Path:
    tokenizer = tiny_chat.tokenizer(delimiters=[*tiny_chat.DELIMITERS, "Yes", "No", *PAIRS])
    return for_tokenizer("tiny", tokenizer, seed=7, initializer_range=0.3)


@cache
def _loaded() -> GenerationEngine:
    return load_generator(_options())


def _options() -> GeneratorOptions:
    return GeneratorOptions(str(folder()), dtype="float32", device="cpu", kv_cache_gb=0.01)


def engine(blocks: int = 400, max_running: int = 256) -> GenerationEngine:
    """Return a cleared engine, shared by calls with the same sizes."""
    generator = _engine(blocks, max_running)
    generator.clear()
    generator._budget = PrefillBudget("cpu")
    return generator


@cache
def _engine(blocks: int, max_running: int) -> GenerationEngine:
    options = GeneratorOptions("", max_running=max_running)
    length = min(tiny_chat.CONTEXT, blocks * BLOCK)
    return paged_engine(
        PagedRunner(_loaded().runner.language, blocks, length, max_running), options
    )


def cached() -> GenerationEngine:
    """Return an engine on the model's own cache, where prompts share no prefix."""
    language = load_language_model(_options())
    runner = CachedRunner(language)
    return cached_engine(runner, GeneratorOptions(""), "a test asks for it")


# ── questions ──


def read(questions: Any, state: Any = STATE) -> SystemOneRequest:
    return decode({"state": state, "questions": questions}, SystemOneRequest, lambda _: "tiny", {})


def predicates(count: int, words: str = "the parcel") -> tuple[Question, ...]:
    return tuple(
        Question("noul", f"Is {words} number {n}?", ("", ""), f"questions[{n}]")
        for n in range(count)
    )


def about(text: str, questions: Sequence[Question]) -> DecisionInput:
    return DecisionInput(({"role": "user", "content": text},), tuple(questions))


def prompts_of(decision: DecisionInput) -> list[list[int]]:
    return [[*ids] for ids in raw_prompts_of(decision)]


def raw_prompts_of(decision: DecisionInput) -> list[Any]:
    """Return the prompts as the engine holds them."""
    item: GenerationItem = WorkItem(decision, float("inf"), 0.0)
    engine().prepare(item)
    return [verdict.prepared.ids for verdict in item.prepared]
