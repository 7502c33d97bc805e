"""The trainer of all demo models: it trains, saves and scores what a Demo describes.

A model is built by the configuration of the embedded one, in worker/demo/.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import environment
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import AutoConfig

SEED = 7
DEMO = environment.ROOT / "worker" / "demo"


class Demo(NamedTuple):
    model: Any
    processor: Any  # a tokenizer or a processor, saved beside the model
    losses: Iterator[Tensor]
    schedules: Sequence[LRScheduler]
    score: Callable[[], Iterator[tuple[bool, str]]]  # whether an answer is right, and its text
    max_norm: float = 1.0  # of the gradient
    dtype: torch.dtype = torch.float32  # as saved


def untrained(model_class: Any, name: str, size: int, **more: Any) -> Any:
    """Return a model of random weights for a vocabulary of `size`."""
    torch.manual_seed(SEED)
    return model_class(AutoConfig.from_pretrained(DEMO / name, vocab_size=size), **more)


def forget_origin(tokenizer: Any) -> Any:
    """Drop how a tokenizer was loaded, which would be saved with it."""
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def one_cycle(model: torch.nn.Module, rate: float, steps: int, warm_up: float) -> list[LRScheduler]:
    """Return AdamW with a rate that rises for the `warm_up` share of the steps, then falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    return [OneCycleLR(optimizer, rate, steps, pct_start=warm_up)]


def train(demo: Demo, steps: int, out: Path) -> None:
    """Take steps with the optimizers of the schedules; print the mean loss every hundred steps."""
    model = demo.model.train()
    print(f"{model.num_parameters()} parameters", flush=True)
    start, mean = time.monotonic(), 0.0
    for step, loss in zip(range(1, steps + 1), demo.losses, strict=False):
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), demo.max_norm)
        for schedule in demo.schedules:
            schedule.optimizer.step()
            schedule.step()
        mean += (loss.item() - mean) / min(step, 100)
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - start
            print(f"step {step}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
    model.eval().to(demo.dtype).save_pretrained(out)
    demo.processor.save_pretrained(out)
    model.float()
    results = []
    for is_right, text in demo.score():
        results.append(is_right)
        print(f"{'right' if is_right else 'WRONG'}: {text}", flush=True)
    print(f"score: {sum(results)} of {len(results)}")


def refuse_known(questions: list[str], texts: set[str]) -> None:
    """Refuse questions of the training text: they measure new phrasings."""
    if known := texts.intersection(questions):
        raise SystemExit(f"questions in the training text: {sorted(known)}")
