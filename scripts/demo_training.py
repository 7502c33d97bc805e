"""The training loop of all demo models."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR


def one_cycle(model: torch.nn.Module, rate: float, steps: int, warm_up: float) -> list[LRScheduler]:
    """Return AdamW with a rate that rises for the `warm_up` share of the steps, then falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    return [OneCycleLR(optimizer, rate, steps, pct_start=warm_up)]


def train(
    model: Any,
    losses: Iterator[Tensor],
    steps: int,
    schedules: Sequence[LRScheduler],
    max_norm: float = 1.0,
) -> None:
    """Take steps with the optimizers of the schedules; print the mean loss every hundred steps."""
    model.train()
    start, mean = time.monotonic(), 0.0
    for step, loss in zip(range(1, steps + 1), losses, strict=False):
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        mean += (loss.item() - mean) / min(step, 100)
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - start
            print(f"step {step}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
    model.eval()
