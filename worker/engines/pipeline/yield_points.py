"""Yield points: places within a model's step at which the other models run theirs.

A step lets them run between two forward passes, as of generation, and within a forward pass between
two layers once it has taken MAX_TURN_S. A batch of long rows, and the prompts of generation, then
stop a stream of another model for little longer than that. The results do not change.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from batching.step_times import MAX_TURN_S
from worker.messages.protocol import OtherModels


class StepCancelled(Exception):
    """All items of the step are cancelled."""


class YieldPoints:
    """Hooks on a model, which do something only inside of `with yield_points.active(...)`.

    `model`: None for the part before a decoder, whose operations are yield points (encoder.py). All
    steps may run at these, also the decoder's own, after half of MAX_TURN_S."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._clock: Callable[[], float] = time.monotonic
        self._others: OtherModels | None = None  # None: not active
        self._is_wanted: Callable[[], bool] = lambda: True
        self._is_first = True  # no forward pass of the step has begun
        self._turn_started = 0.0
        self._started = 0.0  # of the step, in time without the steps of other models
        self.first_forward_s = 0.0  # of the last step, without the steps of other models
        # entered while other models run
        self.outside: Callable[[], AbstractContextManager[object]] = nullcontext
        self._runs_own = model is None
        self._max_turn_s = MAX_TURN_S if model else MAX_TURN_S / 2
        for inner in innermost_models(model) if model else ():
            inner.register_forward_pre_hook(self._before_forward)
        modules = model.modules() if model else ()
        stacks = [[*module] for module in modules if isinstance(module, nn.ModuleList)]
        self.depth = max(map(len, stacks), default=1)  # layers of the longest stack
        for layer in dict.fromkeys(itertools.chain(*stacks)):
            layer.register_forward_pre_hook(self.before_layer)

    @contextmanager
    def active(
        self, others: OtherModels, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Let `others` run during the step inside. Raise StepCancelled once it is not wanted."""
        self._others, self._is_wanted = others, is_wanted
        self._is_first, self._turn_started = True, self._clock()
        self._started, self.first_forward_s = self._turn_started - others.total_s, 0.0
        try:
            yield
        finally:
            self._others, self._is_wanted = None, lambda: True  # the last one holds the inputs
            self._end_first_forward(others)

    def _before_forward(self, *_: Any) -> None:
        if self._others is None or self._is_first:
            self._is_first = False
            return
        self._end_first_forward(self._others)
        self._run_others(self._others)

    def before_layer(self, *_: Any) -> None:
        if self._others is None or self._clock() - self._turn_started < self._max_turn_s:
            return
        self._run_others(self._others)

    def _end_first_forward(self, others: OtherModels) -> None:
        own_time_s = self._clock() - others.total_s
        self.first_forward_s = self.first_forward_s or own_time_s - self._started

    def _run_others(self, others: OtherModels) -> None:
        if not self._is_wanted():
            raise StepCancelled
        self._others = None
        try:
            with torch.inference_mode(False), self.outside():  # as outside of the step
                (others.run_all_steps if self._runs_own else others.run_steps)()
        finally:
            self._others = others
        self._turn_started = self._clock()


def innermost_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models that contain no other one. A forward pass of `model`, or each step of its
    `generate`, runs some of them."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [
        model
        for model in models
        if sum(isinstance(m, PreTrainedModel) for m in model.modules()) == 1
    ]
