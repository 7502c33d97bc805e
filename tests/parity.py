"""Runs inputs through a PipelineRunner as the batcher would, and alone through the pipeline."""

import itertools
import warnings
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import pipeline

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from tests import tiny
from tests.tiny_tokenizers import SENTENCES
from worker.messages.protocol import PipelineInput
from worker.pipeline.loading import PipelineOptions, load_runner
from worker.pipeline.runner import PipelineRunner

torch.set_num_threads(1)


WORDS = " ".join(SENTENCES).split()


def text(count: int, start: int = 0) -> str:
    return " ".join(itertools.islice(itertools.cycle(WORDS), start, start + count))


def runner(task: str, model: str, max_rows: int = 8, dtype: str = "float32") -> PipelineRunner:
    return _runner(task, model, max_rows, dtype)


@cache
def _runner(task: str, model: str, max_rows: int, dtype: str) -> PipelineRunner:
    options = PipelineOptions(str(tiny.folder(model)), task=task, device="cpu", dtype=dtype)
    return load_runner(options, max_rows)


@cache
def oracle(task: str, model: str) -> Any:
    make: Any = pipeline
    return make(task, model=str(tiny.folder(model)), device="cpu")


def item(inputs: Any, **parameters: Any) -> WorkItem:
    return WorkItem(PipelineInput(inputs, parameters), float("inf"), 0.0)


def serve(run: PipelineRunner, items: Sequence[WorkItem]) -> list[Any]:
    """The answers, and on the way the batches: only items with equal keys share a forward."""
    groups: dict[Hashable, list[WorkItem]] = {}
    for each in items:
        run.prepare(each)
        groups.setdefault(each.key, []).append(each)
    for group in groups.values():
        raw = run.forward([each.prepared for each in group])
        assert len(raw) == len(group)
        for each, output in zip(group, raw, strict=True):
            each.batch_size = len(group)
            each.payload = PipelineInput(each.payload.inputs, each.payload.parameters)
            each.prepared = (each.prepared, output)
    answers = []
    for each in items:
        each.prepared, output = each.prepared
        answers.append(orjson.loads(run.finish(each, output)))
    return answers


def refusal(task: str, model: str, inputs: Any, /, **parameters: Any) -> InvalidInput:
    run = runner(task, model)
    with pytest.raises(InvalidInput) as caught:
        run.prepare(item(inputs, **parameters))
    return caught.value


def plain(value: Any) -> Any:
    """What JSON makes of a pipeline's output."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return plain(value.tolist())
    return value


def same(got: Any, expected: Any, where: str = "answer") -> None:
    """Numbers within 1e-4, everything else exactly."""
    if isinstance(expected, float):
        assert got == pytest.approx(expected, abs=1e-4, rel=1e-4), where
    elif isinstance(expected, list):
        assert isinstance(got, list), where
        assert len(got) == len(expected), where
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(expected, dict):
        assert isinstance(got, dict), where
        assert set(got) == set(expected), where
        for key in expected:
            same(got[key], expected[key], f"{where}.{key}")
    else:
        assert got == expected, where
        assert type(got) is type(expected), where


def assert_parity(
    task: str, model: str, calls: Sequence[tuple[Any, dict[str, Any]]], max_rows: int = 8
) -> list[WorkItem]:
    """Each (inputs, parameters), served in batches, is what the pipeline makes of it alone."""
    items = [item(inputs, **parameters) for inputs, parameters in calls]
    answers = serve(runner(task, model, max_rows), items)
    call = oracle(task, model)
    for answer, (inputs, parameters) in zip(answers, calls, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(answer, plain(call(inputs, **parameters)))
    return items


def mixed(inputs: list[Any], *parameters: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Every input with every set of parameters, neighbours having different ones."""
    return [(each, chosen) for each in inputs for chosen in parameters]
