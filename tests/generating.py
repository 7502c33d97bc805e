"""Runs a GenerationEngine step by step as the worker does, without HTTP or threads, and
transformers' own `generate` to compare with."""

import logging
import random
import threading
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from batching.fair_share import NO_OWNER
from batching.request_queue import WorkItem
from batching.sequence import Batch, Chunk, Sequence
from tests import tiny_decoders
from worker.engines.generation import input_processor
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.input_processor import GenerationItem
from worker.engines.generation.loading import load_generator, paged_engine
from worker.engines.generation.output import SequenceOutput
from worker.messages.deltas import Delta
from worker.messages.generation import GenerationInput, Sampling, Stopping
from worker.messages.protocol import Generator, OtherModels, Pending, StepReport
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionBackend, AttentionMetadata
from worker.model.language_model import GeneratorOptions, LanguageModel, load_language_model
from worker.model.paged_runner import PagedRunner, StateSlots
from worker.model.paging import load_paged_runner
from worker.text.chat_template.template import ChatTemplate

torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)

T = TypeVar("T")
Request = WorkItem[GenerationInput, abc.Sequence[SequenceOutput]]

GREEDY = Sampling(temperature=0.0)
ORDINARY = range(6, 300)  # ids of tokens that are not special


def small(model: str | Path, **options: Any) -> GeneratorOptions:
    """Return options of a tiny model: float32, on the CPU, unless a test chooses others."""
    usual: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gb": 0.01}
    return GeneratorOptions(str(model), **{**usual, **options})


def load(model: str | Path, **options: Any) -> GenerationEngine:
    return load_generator(small(model, **options))


def load_paged(model: str | Path, **options: Any) -> PagedRunner:
    chosen = small(model, **options)
    return load_paged_runner(load_language_model(chosen), chosen)


@cache
def loaded(model: str) -> GenerationEngine:
    generator = load(tiny_decoders.folder(model))
    assert generator.info.batching == "continuous", generator.info.why
    return generator


def built(name: str, build: Callable[[], abc.Sequence[Any]]) -> LanguageModel:
    """Return a model and its tokenizer, built with weights that depend on the name alone."""
    torch.manual_seed(sum(name.encode()))
    model, tokenizer = build()
    model.generation_config.eos_token_id = None
    return LanguageModel(name, model.eval(), tokenizer)


@cache
def template_of(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer)


# Probing a template takes as long as a short test: engines of one tokenizer share theirs.
shares_template = patch.object(
    input_processor, "ChatTemplate", lambda tokenizer, *_: template_of(tokenizer)
)


@shares_template
def engine(
    model: str, blocks: int = 400, speculation: str = "auto", max_running: int = 256,
    metadata: Callable[[KVCache, Batch], AttentionBackend] = AttentionMetadata,
    state_sequences: int = 64, checkpoints: int = 64,
) -> GenerationEngine:  # fmt: skip
    """A new engine of a model that is loaded once. Its cache is filled with NaN."""
    language = loaded(model).runner.language
    options = GeneratorOptions("", speculation=speculation, max_running=max_running)
    room = min(language.context, blocks * BLOCK)
    slots = StateSlots(state_sequences, checkpoints, drafts=32)
    runner = PagedRunner(language, blocks, room, max_running, slots)
    for stored in (*runner.cache.keys, *runner.cache.values, *runner.cache.states):
        stored.fill_(float("nan"))
    runner.metadata = metadata
    return paged_engine(runner, options)


def runner_of(generator: GenerationEngine) -> PagedRunner:
    assert isinstance(generator.runner, PagedRunner)
    return generator.runner


@dataclass(eq=False)
class Served:
    """A request and its results."""

    item: GenerationItem
    prompt: abc.Sequence[int]
    deltas: dict[int, Delta] = field(default_factory=dict)  # merged, by choice
    sequences: list[Sequence] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None

    @property
    def choices(self) -> list[Delta]:
        assert self.done
        assert self.error is None, self.error
        return [self.deltas[number] for number in sorted(self.deltas)]

    @property
    def ids(self) -> list[list[int]]:
        """Output tokens of each choice, its stop token included."""
        return [sequence.tokens[sequence.prompt_len :] for sequence in self.sequences]


def request(
    prompt: str | abc.Sequence[int],
    sampling: Sampling = GREEDY,
    max_tokens: int | None = 12,
    ignore_eos: bool = True,
    n: int = 1,
    echo: bool = False,
    **stopping: Any,
) -> Request:
    payload = GenerationInput(
        prompt if isinstance(prompt, str) else tuple(prompt),
        sampling,
        Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos, **stopping),
        n=n,
        echo=echo,
    )
    return WorkItem(payload, float("inf"), 0.0)


def when_ready(run: Callable[[], T]) -> T:
    """Run it, again after each grammar that it waits for is compiled."""
    while True:
        try:
            return run()
        except Pending as pending:
            again = threading.Event()
            pending.then(NO_OWNER, lambda: True, again.set)
            assert again.wait(60), "the grammar is not compiled"


def prepare(generator: Generator, item: GenerationItem) -> None:
    when_ready(lambda: generator.prepare(item))


class Woken(OtherModels):
    """Lets a test wait for the end of a read as the worker's thread does."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wake(self) -> None:
        self.event.set()


class Driver:
    """The worker's loop around a generator, step by step."""

    def __init__(self, generator: GenerationEngine) -> None:
        self.generator = generator
        self.reports: list[StepReport] = []
        self.served: dict[WorkItem, Served] = {}
        self.ended: list[WorkItem] = []  # in the order of their ends
        self.deltas: list[Delta] = []  # of the last step
        self.partial = 0  # chunks that ended before their sequence did
        self._schedule: Any = generator.scheduler.schedule
        scheduler: Any = generator.scheduler
        scheduler.schedule = self._watched_schedule
        # the numbers of drafts, rows and prompt tokens do not depend on the machine's speed
        measured: list[Any] = [generator._speculation, generator._budget.times]
        for estimate in filter(None, measured):
            estimate.learn = lambda *_: None

    def _watched_schedule(self, *arguments: Any) -> list[Chunk]:
        chunks: list[Chunk] = self._schedule(*arguments)
        self.partial += sum(not chunk.reaches_end for chunk in chunks)
        return chunks

    def add(self, item: GenerationItem) -> Served:
        prepare(self.generator, item)
        served = self.served[item] = Served(item, item.prepared[0].prepared.ids)
        self.generator.add(item)
        served.sequences = list(self.generator.live[item])
        return served

    def step(self) -> StepReport:
        step, others = cast(Any, self.generator.step), cast(Any, self.generator.others)
        while (outcome := step()) is None:  # a prefix is read
            assert others.event.wait(60)
            others.event.clear()
        assert isinstance(outcome.report, StepReport)
        deltas = [(item, output.take_delta()) for item, output in outcome.deltas]
        for item, delta in deltas:
            served = self.served[item]
            assert item.open, "a delta for a cancelled request"
            assert not served.done, "a delta after the end"
            if delta.choice in served.deltas:
                assert served.deltas[delta.choice].finish_reason is None, "a delta after the last"
                served.deltas[delta.choice].merge(delta)
            else:
                served.deltas[delta.choice] = delta
        for item, error in outcome.done:
            served = self.served[item]
            assert not served.done, "done twice"
            served.done, served.error = True, error
            if error is None:
                assert len(served.deltas) == served.item.payload.n
                assert all(delta.finish_reason for delta in served.deltas.values())
            self.ended.append(item)
        self.deltas = [delta for _, delta in deltas]
        self.reports.append(outcome.report)
        return outcome.report

    def finish(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.generator.busy:
                break
            self.step()
        assert not self.generator.busy, "it does not finish"
        pool = self.generator.scheduler.pool
        assert pool.used == 0
        assert not pool.states or not pool.states.sequences
        assert not self.generator.scheduler.running
        assert not self.generator.scheduler.waiting

    def total(self, name: str) -> int:
        return sum(getattr(report, name) for report in self.reports)


def serve(
    generator: GenerationEngine, items: Iterable[GenerationItem], seed: int | None = None
) -> tuple[list[Served], Driver]:
    """Run all items to their ends. With a seed they arrive at random steps, else all at once."""
    driver = Driver(generator)
    chance = random.Random(seed)
    served = []
    for item in items:
        while seed is not None and chance.random() < 0.5:
            driver.step()
        served.append(driver.add(item))
    driver.finish()
    return served, driver


def prompts(seed: int, lengths: abc.Sequence[int], count: int = 4) -> list[list[int]]:
    """`count` prompts of every length in random order; half share a prefix with others."""
    chance = random.Random(seed)
    trunk = chance.choices(ORDINARY, k=max(lengths))
    result = []
    for length in lengths:
        for number in range(count):
            shared = chance.randrange(length) if number % 2 else 0
            result.append(trunk[:shared] + chance.choices(ORDINARY, k=length - shared))
    chance.shuffle(result)
    return result


# ── the reference: transformers ──


@cache
def reference_model(model: str) -> Any:
    return reference_of(tiny_decoders.folder(model))


def reference_of(folder: Path, **options: Any) -> Any:
    """Return transformers' own model of a folder, whose outputs have no end."""
    auto: Any = AutoModelForCausalLM
    reference = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    reference.generation_config.eos_token_id = None
    return reference.eval()


@torch.inference_mode()
def raw_logits(model: str, ids: abc.Sequence[int]) -> torch.Tensor:
    """Return the logits [L, V] of the model's own forward, in float64."""
    logits: torch.Tensor = reference_model(model)(
        torch.tensor([list(ids)]), use_cache=False
    ).logits[0]
    return logits.double()


def generate(model: Any, prompts: abc.Sequence[abc.Sequence[int]], count: int) -> list[list[int]]:
    """Return `count` tokens after each of prompts of one length, by the model's own `generate`."""
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=2,
    )
    return [tokens[ids.shape[1] :] for tokens in output.tolist()]


def greedy(model: str, prompts: Iterable[abc.Sequence[int]], count: int) -> list[list[int]]:
    """Return `count` tokens after each prompt."""
    return _greedy(model, tuple(map(tuple, prompts)), count)


@cache
def _greedy(model: str, prompts: abc.Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """By `generate`, in batches of equal length."""
    expected: dict[tuple[int, ...], list[int]] = {}
    for length in sorted(set(map(len, prompts))):
        rows = [prompt for prompt in prompts if len(prompt) == length]
        expected |= zip(rows, generate(reference_model(model), rows, count), strict=True)
    return [expected[prompt] for prompt in prompts]


def assert_greedy(model: str, served: abc.Sequence[Served], count: int) -> None:
    """Compare outputs token for token with those of `generate`; report the logits' difference at
    the first mismatch."""
    expected = greedy(model, [request.prompt for request in served], count)
    for request, wanted in zip(served, expected, strict=True):
        assert request.choices[0].finish_reason == "length"
        output = request.ids[0]
        if output == wanted:
            continue
        index = next(i for i, (a, b) in enumerate(zip(output, wanted, strict=True)) if a != b)
        logits = raw_logits(model, [*request.prompt, *wanted[:index]])[-1]
        margin = float(logits[wanted[index]] - logits[output[index]])
        raise AssertionError(
            f"{model}: the output of a prompt of {len(request.prompt)} tokens differs at {index}: "
            f"{output[index]} for {wanted[index]}, whose logit is {margin:.2e} larger"
        )
