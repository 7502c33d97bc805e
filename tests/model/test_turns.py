"""The batches of encoders are cut to a turn. Other models run in the middle of long ones, between
two tokens of generation, and between two layers. Results are those of an uncut batch."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import orjson
import pytest
import torch

from batching.request_queue import WorkItem
from batching.step_times import MAX_TURN_S, PrefillBudget, StepTimes
from tests import tiny_media as tiny_media  # adds its models to the list
from tests.fakes import BusyModels
from tests.matrix import matrix
from tests.model.test_pipelines_media import noise, png, wav
from tests.parity import assert_same, item, runner, serve, text
from tests.tiny_embedders import NEW, checkpoint, embedded, load
from tests.transcribing import CTC, WHISPER, new_speech_engine, saved, transcribed
from tests.transcribing import noise as sound
from worker.engines.embedding.single_pass import SinglePassModel
from worker.engines.embedding.tokenization import TokenRow
from worker.engines.pipeline.runner import PipelineItem, PipelineRunner
from worker.messages.protocol import ALONE, CUT
from worker.messages.scoring import EmbeddingInput
from worker.messages.transcription import TranscriptionInput

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
LABELS = {"candidate_labels": ["a cat", "food", "paris"]}


@pytest.fixture
def rows_per_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make bounded steps of two rows; return how many each had to choose from."""
    counts: list[int] = []

    def fitting(self: StepTimes, sizes: Sequence[int], max_turn_s: float, layers: int = 1) -> int:
        if max_turn_s == math.inf:
            return len(sizes)
        counts.append(len(sizes))
        return 2

    monkeypatch.setattr(StepTimes, "fitting", fitting)
    return counts


def serve_in_steps(run: PipelineRunner, items: list[PipelineItem]) -> list[Any]:
    """Pass cut items again, as the engine does."""
    for one in items:
        run.prepare(one)
    raw: dict[PipelineItem, Any] = {}
    while waiting := [one for one in items if one not in raw]:
        outputs = run.forward([one.prepared for one in waiting])
        raw |= {
            one: output for one, output in zip(waiting, outputs, strict=True) if output is not CUT
        }
    return [orjson.loads(run.finish(one, raw[one])) for one in items]


TEXTS = [text(3), text(9, 4), text(30, 2), text(1), text(12, 7)]
ENCODERS: list[tuple[str, str, list[Any], dict[str, Any], list[int]]] = [
    ("fill-mask", "bert-mlm", [f"{one} [MASK]" for one in TEXTS], {}, [5, 3, 1]),
    ("zero-shot-classification", "bert-nli", TEXTS[:3], LABELS, [9, 7, 5, 3, 1]),
    ("token-classification", "bert-ner", TEXTS, {}, [5, 3, 1]),
    ("image-classification", "vit", [png(n, (32, 32)) for n in range(3)], {}, [3, 1]),
]


@pytest.mark.parametrize(
    ("task", "model", "inputs", "parameters", "counts"), matrix(ENCODERS, *ENCODERS[:2])
)
def test_a_cut_batch_gives_the_results_of_an_uncut_one(
    task: str,
    model: str,
    inputs: list[Any],
    parameters: dict[str, Any],
    counts: list[int],
    rows_per_step: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = runner(task, model, 16)
    expected = serve(run, [item(one, **parameters) for one in inputs])
    assert rows_per_step == []
    monkeypatch.setattr(run, "others", BusyModels())
    answers = serve_in_steps(run, [item(one, **parameters) for one in inputs])
    assert rows_per_step == counts
    assert_same(answers, expected)


def test_a_warm_up_completes_beside_other_models(
    rows_per_step: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner("zero-shot-classification", "bert-nli")
    monkeypatch.setattr(run, "others", BusyModels())
    monkeypatch.setattr(StepTimes, "fitting", lambda self, sizes, *_: 1)
    run.warm_up()


def test_an_embedders_cut_batch_gives_the_vectors_of_an_uncut_one(
    tmp_path: Path, rows_per_step: list[int]
) -> None:
    embedder = load(checkpoint(tmp_path / "m", pooling={"pooling_mode": "mean"}, prefix=NEW))
    expected = embedded(embedder, EmbeddingInput(TEXTS, 0)).vectors
    embedder.others = BusyModels()
    items: list[WorkItem[EmbeddingInput, list[TokenRow]]] = [
        WorkItem(EmbeddingInput(part, 0), 1e9, 0.0) for part in (TEXTS[:3], TEXTS[3:])
    ]
    for one in items:
        embedder.prepare(one)
    assert embedder.forward([one.prepared for one in items]) == [CUT, CUT]
    first, second = embedder.forward([one.prepared for one in items])
    assert second is CUT
    [second] = embedder.forward([items[1].prepared])
    assert rows_per_step == [5, 3, 1]
    assert isinstance(first, list)
    assert isinstance(second, list)
    vectors = [embedder.finish(items[0], first).vectors, embedder.finish(items[1], second).vectors]
    np.testing.assert_allclose(np.concatenate(vectors), expected, atol=1e-5)
    assert embedder.others.steps == 0


GENERATING: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("text-generation", "llama-lm", text(6), GREEDY),
    ("text-generation", "llama-lm", text(6), {**GREEDY, "num_beams": 3}),
    ("automatic-speech-recognition", "whisper", wav(noise(1, 4.0)), {"max_new_tokens": 5}),
]


@pytest.mark.parametrize(
    ("task", "model", "inputs", "parameters"), GENERATING, ids=["greedy", "beams", "whisper"]
)
def test_other_models_run_between_two_tokens(
    task: str,
    model: str,
    inputs: Any,
    parameters: dict[str, Any],
    rows_per_step: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, states = runner(task, model), set()

    class Others(BusyModels):
        def run_steps(self) -> None:
            super().run_steps()
            states.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            for model in run.pipe.model.modules():  # which the other model may share
                for hook in model._forward_pre_hooks.values():
                    hook(model, ())

    expected = serve(run, [item(inputs, **parameters) for _ in range(3)])
    assert rows_per_step == []  # alone their batch is not cut
    others = Others()
    monkeypatch.setattr(run, "others", others)
    assert serve_in_steps(run, [item(inputs, **parameters) for _ in range(3)]) == expected
    assert others.steps >= 4
    assert states == {(False, True)}  # as outside of a pipeline
    monkeypatch.setattr(run, "others", ALONE)


def ticks(step_s: float) -> Callable[[], float]:
    """Return a clock that advances with each call."""
    times = itertools.count(0.0, step_s)
    return lambda: next(times)


@pytest.mark.parametrize(("step_s", "runs"), [(0.0, False), (2 * MAX_TURN_S, True)])
@pytest.mark.parametrize(
    ("task", "model", "inputs", "parameters", "counts"), matrix(ENCODERS, ENCODERS[0])
)
def test_other_models_run_between_the_layers_of_a_long_batch(
    task: str,
    model: str,
    inputs: list[Any],
    parameters: dict[str, Any],
    counts: list[int],
    step_s: float,
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, others = runner(task, model, 16), BusyModels()
    expected = serve(run, [item(one, **parameters) for one in inputs])
    monkeypatch.setattr(run._yield_points, "_clock", ticks(step_s))
    monkeypatch.setattr(run, "others", others)
    monkeypatch.setattr(StepTimes, "fitting", lambda self, sizes, *_: len(sizes))
    answers = serve_in_steps(run, [item(one, **parameters) for one in inputs])
    assert_same(answers, expected)
    layers = run.pipe.model.config.num_hidden_layers
    assert others.steps == (layers if runs else 0)


def test_a_cancelled_batch_ends_between_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    run, one = runner("fill-mask", "bert-mlm"), item(f"{text(3)} [MASK]")
    run.prepare(one)
    future = Mock(done=Mock(side_effect=[False, True]))  # before the model, and before a layer
    one.prepared.future = future
    monkeypatch.setattr(run._yield_points, "_clock", ticks(2 * MAX_TURN_S))
    assert run.forward([one.prepared]) == [None]
    assert future.done.call_count == 2


def test_other_models_run_between_the_layers_of_an_embedder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "fitting", lambda self, sizes, *_: len(sizes))
    embedder = load(checkpoint(tmp_path / "m", pooling={"pooling_mode": "mean"}, prefix=NEW))
    expected = embedded(embedder, EmbeddingInput(TEXTS, 0)).vectors
    others = BusyModels()
    assert isinstance(embedder.model, SinglePassModel)
    embedder.model.yield_points._clock = ticks(2 * MAX_TURN_S)
    vectors = embedded(embedder, EmbeddingInput(TEXTS, 0), others).vectors
    assert others.steps == embedder.model.model.config.num_hidden_layers
    np.testing.assert_array_equal(vectors, expected)


@pytest.mark.parametrize("name", [WHISPER, CTC])
def test_other_models_run_between_the_layers_of_a_recognizer(name: str, tmp_path: Path) -> None:
    inputs = [TranscriptionInput(saved(tmp_path, sound(2.0, n), f"{n}.wav")) for n in range(2)]
    expected = transcribed(new_speech_engine(name), inputs)
    engine, others = new_speech_engine(name), BusyModels()
    engine.others, engine._yield_points._clock = others, ticks(2 * MAX_TURN_S)
    assert transcribed(engine, inputs) == expected
    windows, config = len(inputs), engine.runner.model.config
    assert others.steps >= windows * config.num_hidden_layers


def test_the_time_of_other_models_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run, seconds = runner("zero-shot-image-classification", "clip"), []

    class Slow(BusyModels):
        def run_steps(self) -> None:
            self.total_s += 1000.0

    monkeypatch.setattr(run, "others", Slow())
    monkeypatch.setattr(StepTimes, "learn", lambda self, tokens, rows, s: seconds.append(s))
    serve_in_steps(run, [item(png(1, (32, 32)), candidate_labels=["a"]) for _ in range(2)])
    assert seconds
    assert max(seconds) < 500


def test_a_decoders_prompts_are_cut_to_the_time_beside_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, shared = load(checkpoint(tmp_path / "m", "qwen3-base")), []
    assert embedder.info.batching == "continuous"

    def prompt_tokens(
        self: PrefillBudget, streaming: bool, spent_s: float = 0.0, max_turn_s: float = math.inf
    ) -> int:
        shared.append((streaming, max_turn_s))
        return 512

    monkeypatch.setattr(PrefillBudget, "prompt_tokens", prompt_tokens)
    embedded(embedder, EmbeddingInput(TEXTS, 0))
    embedded(embedder, EmbeddingInput(TEXTS, 0), BusyModels())
    assert shared == [(False, math.inf), (True, MAX_TURN_S)]


def test_the_prompts_of_generation_take_a_turn_per_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, limits = runner("text-generation", "llama-lm"), []

    def fitting(self: StepTimes, sizes: Sequence[int], max_turn_s: float, layers: int = 1) -> int:
        limits.append((list(sizes), max_turn_s, layers))
        return len(sizes)

    monkeypatch.setattr(StepTimes, "fitting", fitting)
    monkeypatch.setattr(run, "others", BusyModels())
    serve(run, [item(text(6), **GREEDY, num_beams=3)])
    [([size], max_turn_s, layers)] = limits
    assert size % 3 == 0  # each beam has the prompt
    assert (max_turn_s, layers) == (MAX_TURN_S, run.pipe.model.config.num_hidden_layers)
