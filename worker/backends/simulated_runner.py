"""A stand-in for the model's forward, to measure the host: SIMULATED_MODEL.

A step takes its time on a device that runs beside the host and has a queue, as on a GPU: a step
starts when it is launched and the one before it has ended. The tokens of that are read after the
launch, and so the launch waits for them.
"""

import itertools
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from batching.sequence import Batch
from worker.model.language_model import GeneratorOptions
from worker.model.paged_runner import PagedRunner

VOCABULARY = 1024  # ids that are sampled: sampling costs its calls, hardly its numbers
IMPOSSIBLE = -1e4  # of a logit
SPARE_ROWS = 257  # rows of logits that a step begins at another of


class SimulatedRunner(PagedRunner):
    """The steps of a loaded runner without their computation.

    `options.simulated_model`: milliseconds of a step, and after a comma microseconds of a prompt's
    token. Logits are random, and those of `stop_token_ids` impossible."""

    idempotent = False  # resampled tokens are known before the next step is launched
    runs_ahead = True

    def __init__(
        self, runner: PagedRunner, options: GeneratorOptions, stop_token_ids: Iterable[int]
    ) -> None:
        vars(self).update(vars(runner))
        step_ms, _, prompt_token_us = options.simulated_model.partition(",")
        self.step_s, self.prompt_token_s = float(step_ms) / 1e3, float(prompt_token_us or 0) / 1e6
        width = min(VOCABULARY, self.language.vocab_size)
        self._logits = torch.randn(
            options.max_running + SPARE_ROWS, width, generator=torch.Generator().manual_seed(0)
        )
        self._logits[:, [token for token in stop_token_ids if token < width]] = IMPOSSIBLE
        self._first_rows = itertools.cycle(range(SPARE_ROWS))
        self._done_at = 0.0

    def forward(self, batch: Batch, sampled: Tensor | None = None) -> Tensor:
        launched_at, before_s = time.monotonic(), self._done_at
        prompt = sum(chunk.count for chunk in batch.chunks if chunk.is_prefill)
        duration_s = self.step_s + prompt * self.prompt_token_s
        self._done_at = max(launched_at, before_s) + duration_s
        if before_s > launched_at:
            time.sleep(before_s - launched_at)
        first = next(self._first_rows)
        return self._logits[first : first + len(batch.rows)]
