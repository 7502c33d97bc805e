"""Random requests, with steps launched ahead or not: both give the same outputs, and placeholders
leave no trace."""

import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batching import step_times
from batching.errors import ItemFailed
from batching.fair_share import Priority, WorkOwner
from batching.sequence import Batch
from tests.generating import ORDINARY, Driver, Served, engine, request
from tests.matrix import matrix
from tests.scheduling import assert_sound
from worker.device.async_copy import fill_placeholders
from worker.engines.generation import engine as module
from worker.engines.generation.engine import GenerationEngine
from worker.messages.generation import Sampling
from worker.model import sampler
from worker.model.attention.kv_cache import BLOCK

POISON = 310  # a step with this token raises
TOKENS = 12  # so few that texts repeat and prefixes are shared
BLOCKS = 9
OWNERS = {priority: WorkOwner(None, priority=priority) for priority in Priority}


class FakeRunner:
    """A model runner whose logits are a function of the tokens, read through the block tables."""

    idempotent = True
    compile_state = "off"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.memory: dict[int, int] = {}

    def forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        ids = fill_placeholders(torch.tensor(batch.ids), sampled).tolist()
        assert min(ids) >= 0, "a placeholder without a sampled token"
        states: list[int] = []
        for (blocks, start, width), offset in zip(batch.spans, batch.offsets, strict=True):
            slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start + width)]
            state = self.memory[slots[start - 1]] if start else 0
            for slot, token in zip(slots[start:], ids[offset : offset + width], strict=True):
                state = self.memory[slot] = zlib.crc32(b"%d %d" % (state, token))
                states.append(state)
        if POISON in ids:
            raise ItemFailed("not this one")
        logits = torch.full((len(batch.rows), self.vocab_size), -20.0)
        for row, index in enumerate(batch.rows):
            likely = np.random.default_rng(states[index]).normal(size=TOKENS)
            logits[row, ORDINARY[0] : ORDINARY[0] + TOKENS] = torch.from_numpy(likely).float()
        return logits


def items_of(seed: int) -> list[Any]:
    chance = random.Random(seed)
    trunk = [chance.randrange(TOKENS) + ORDINARY[0] for _ in range(50)]
    items = []
    for _ in range(12):
        prompt = trunk[: chance.randrange(1, 50)] + chance.choices(trunk, k=chance.randrange(3))
        if chance.random() < 0.15:
            prompt[-1] = POISON
        penalty = chance.choice((0.0, 0.7))
        sampling = Sampling(
            temperature=chance.choice((0.0, 1.0)), seed=chance.randrange(9), top_p=0.9,
            top_k=chance.choice((0, 3)), frequency_penalty=penalty,
            logprobs=chance.choice((None, 2)),
        )  # fmt: skip
        stop_tokens = tuple(chance.sample(trunk, chance.randrange(3)))
        item = request(
            prompt, sampling, chance.choice((1, 2, 5, 30)), n=chance.choice((1, 1, 3)),
            stop_token_ids=stop_tokens, min_tokens=chance.choice((0, 1)),
        )  # fmt: skip
        item.payload = replace(
            item.payload, token_ids=True, prompt_logprobs=chance.choice((None, None, 1)),
        )  # fmt: skip
        priority = chance.choices([*Priority], (8, 1, 1))[0]
        item.owner = OWNERS[priority]
        items.append(item)
    return items


def play(seed: int, cancels: bool) -> list[Served]:
    chance = random.Random(seed)
    generator = engine(
        "llama", BLOCKS, chance.choice(("auto", "off")), max_running=chance.choice((2, 5, 16))
    )
    generator.runner = FakeRunner(generator.runner.language.vocab_size)  # type: ignore[assignment]
    driver, served = Driver(generator), list[Served]()
    to_come = items_of(seed)
    while to_come or generator.busy:
        if to_come and chance.random() < 0.4:
            served.append(driver.add(to_come.pop()))
        if cancels and served and chance.random() < 0.1:
            chance.choice(served).item.open = False
        driver.step()
        check(generator)
    driver.finish()
    assert_sound(generator.scheduler.pool, [])
    return served


def check(generator: GenerationEngine) -> None:
    scheduler = generator.scheduler
    pool, running = scheduler.pool, scheduler.running
    sequences = (*running, *scheduler.waiting)  # paused ones wait with their blocks
    assert_sound(pool, [sequence.table for sequence in sequences if sequence.table])
    keys = pool._computed | pool.computing
    assert not any(isinstance(token, int) and token < 0 for _, held in keys for token in held)
    for sequence in sequences:
        assert min([0, *sequence.tokens[:-1]]) == 0
        assert sequence.has_placeholder <= (
            generator._in_flight is not None and sequence in running
        )


def deltas_of(served: Served) -> list[Any]:
    return [served.deltas[number] for number in sorted(served.deltas)]


@pytest.mark.parametrize("seed", matrix(range(16), *range(2)))
def test_outputs_are_the_same_with_steps_ahead_or_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "MAX_PREFILL_TOKENS", {"cpu": 20})
    monkeypatch.setattr(step_times, "MIN_PREFILL_TOKENS", 20)
    at_once = play(seed, False)
    monkeypatch.setitem(module.RUNS_AHEAD, "cpu", True)
    monkeypatch.setattr(sampler, "CANDIDATES", 2)  # steps are run again for rows that need more
    ahead = play(seed, False)
    assert [type(one.error) for one in ahead] == [type(one.error) for one in at_once]
    for some, others in zip(ahead, at_once, strict=True):
        if some.error is None:
            for a, b in zip(deltas_of(some), deltas_of(others), strict=True):
                a.cached_tokens = b.cached_tokens = 0  # depends on the order of admissions
                assert a == b
    cancelled = play(seed, True)
    for some, others in zip(cancelled, at_once, strict=True):
        for output, whole in zip(some.ids, others.ids, strict=True):
            assert min([0, *output]) == 0
            if others.error is None:
                assert output == whole[: len(output)]
