"""Compare a PipelineRunner's batches with the transformers pipeline called on each input alone."""

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
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.engines.pipeline.runner import PipelineItem, PipelineRunner
from worker.messages.protocol import PipelineInput

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


def item(inputs: Any, **parameters: Any) -> PipelineItem:
    return WorkItem(PipelineInput(inputs, parameters), float("inf"), 0.0)


def serve(run: PipelineRunner, items: Sequence[PipelineItem]) -> list[Any]:
    """Return the results of all items; items with equal keys share a forward, as in the batcher."""
    groups: dict[Hashable, list[PipelineItem]] = {}
    for item in items:
        run.prepare(item)
        groups.setdefault(item.key, []).append(item)
    outputs: dict[int, Any] = {}
    for group in groups.values():
        raw = run.forward([item.prepared for item in group])
        assert len(raw) == len(group)
        for item, output in zip(group, raw, strict=True):
            item.batch_size = len(group)
            outputs[id(item)] = output
    return [orjson.loads(run.finish(item, outputs[id(item)])) for item in items]


def refusal(task: str, model: str, inputs: Any, /, **parameters: Any) -> InvalidInput:
    run = runner(task, model)
    with pytest.raises(InvalidInput) as caught:
        run.prepare(item(inputs, **parameters))
    return caught.value


def plain(value: Any) -> Any:
    """Convert a pipeline's output to plain values, as JSON does."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return plain(value.tolist())
    return value


def assert_same(actual: Any, expected: Any, where: str = "answer") -> None:
    """Assert that numbers are equal within 1e-4, and everything else exactly."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-4, rel=1e-4), where
    elif isinstance(expected, list):
        assert isinstance(actual, list), where
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert set(actual) == set(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    else:
        assert actual == expected, where
        assert type(actual) is type(expected), where


def assert_parity(
    task: str, model: str, calls: Sequence[tuple[Any, dict[str, Any]]], max_rows: int = 8
) -> list[PipelineItem]:
    """Assert that each (inputs, parameters) gives in a batch what the pipeline gives alone."""
    items = [item(inputs, **parameters) for inputs, parameters in calls]
    run, call = runner(task, model, max_rows), oracle(task, model)
    answers = serve(run, items)
    for answer, (inputs, parameters) in zip(answers, calls, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = plain(call(inputs, **parameters))
        if run.task.wraps_string and isinstance(inputs, str) and "top_k" not in parameters:
            [expected] = expected  # the endpoint wraps it
        assert_same(answer, expected)
    return items


def mixed(inputs: list[Any], *parameters: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return every input with every set of parameters, in alternation."""
    return [(value, chosen) for value in inputs for chosen in parameters]
