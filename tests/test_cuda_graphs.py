"""Steps of captured size: what they say, when they are taken, and what happens without them."""

import copy
import logging
import shutil
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import worker
from tests.generating import assert_greedy, engine, loaded, prompts, request, serve
from worker.generation.engine import GenerationEngine
from worker.model import compiling, cuda_graphs
from worker.model.attention_interface import CannotPage
from worker.model.cuda_graphs import SPARE, WIDEST, DecodeGraphs, Run
from worker.model.paged_attention import BLOCK, PagedCache

pytestmark = pytest.mark.usefixtures("poisoned_cache")
BLOCKS = 60


def write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, rests: Tensor
) -> None:
    """What the kernel of this name does."""
    for stored, new in ((keys, key), (values, value)):
        flat = stored.view(-1, *stored.shape[2:])
        for row in range(len(slots)):
            flat[slots[row]] = new[row]
            flat[slots[row] + 1 : slots[row] + 1 + rests[row]] = 0


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, *,
    programs: int, scale: float, window: int, chunk: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """What the kernel of this name does."""
    out = []
    for q, table, position in zip(query, tables, positions.tolist(), strict=True):
        first = max(0, position - window + 1) if window else 0
        first = max(first, position // chunk * chunk) if chunk else first
        blocks = table[: position // BLOCK + 1].long()
        k, v = (s[blocks].flatten(0, 1)[first : position + 1] for s in (keys, values))
        k, v = (each.repeat_interleave(len(q) // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("hd,khd->hk", q, k) * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(k)]
        out.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(out)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(write=write, attend=attend)
    monkeypatch.setattr(worker, "decode_kernel", kernels, raising=False)


class Recorder:
    """Does again what it was given to capture; says how often."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        logits = run().clone()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(run())

        return replay, logits


def runner_of(generator: GenerationEngine) -> Any:
    return generator.runner


def captured(generator: GenerationEngine, recorder: Any, most: int = 32) -> DecodeGraphs:
    language, runner = generator.language, runner_of(generator)
    runner.cache = PagedCache(language.layers, BLOCKS + SPARE, torch.float32, language.device)
    table = -(-generator.max_model_len // BLOCK)
    return DecodeGraphs(language, runner.cache, BLOCKS, table, most, recorder)


@pytest.mark.parametrize("model", ["llama", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v3"])
def test_output_is_the_same_with_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine(model, blocks=BLOCKS)
    recorder = Recorder()
    runner_of(generator)._graphs = captured(generator, recorder)
    assert recorder.captured == recorder.replayed == 6  # each is tried once
    given = prompts(1, (1, 7, 17, 48), each=2)
    served, driver = serve(generator, [request(each) for each in given], seed=3)
    assert_greedy(model, served, 12)
    assert len(driver.reports) > recorder.replayed - 6 > 10  # prompts are too wide for them


def test_a_block_that_a_graph_began_can_be_read_by_a_plain_step() -> None:
    """Memory is full of what are no numbers; drafts make some steps wide, others not."""
    generator = engine("llama", blocks=BLOCKS)
    runner_of(generator)._graphs = captured(generator, Recorder())
    for stored in (*runner_of(generator).cache.keys, *runner_of(generator).cache.values):
        stored.fill_(float("nan"))
    takes, turn = runner_of(generator)._graphs.takes, iter(range(10_000))
    runner_of(generator)._graphs.takes = lambda chunks: next(turn) % 2 == 0 and takes(chunks)
    given = prompts(2, (3, 30), each=3)
    served, _ = serve(generator, [request(each, max_tokens=40) for each in given], seed=1)
    assert_greedy("llama", served, 40)


def test_what_is_wide_or_many_goes_another_way() -> None:
    graphs = captured(engine("llama", blocks=BLOCKS), Recorder(), most=20)
    table = [0, 1, 2]
    assert graphs.takes([(table, 5, 1)] * 20)
    assert not graphs.takes([(table, 5, 1)] * 21)
    assert graphs.takes([(table, 5, WIDEST), (table, 5, 4)])
    assert not graphs.takes([(table, 5, WIDEST + 1)])


def test_a_graph_that_says_something_else_is_not_used() -> None:
    def wrong(run: Run) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, run() + 1

    with pytest.raises(CannotPage, match="differ"):
        captured(engine("llama", blocks=BLOCKS), wrong)


def test_where_capturing_fails_steps_are_launched_one_by_one_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")

    monkeypatch.setattr(cuda_graphs, "CudaCapture", broken)
    language: Any = SimpleNamespace(device=torch.device("cuda"))
    caplog.set_level(logging.WARNING, "onequeue.decode_graphs")
    assert cuda_graphs.decode_graphs(language, Any, 0, 1, 1) is None  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "no CUDA graphs, steps are launched one by one: "
        "operation not permitted when stream is capturing"
    ]


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
def test_what_was_compiled_in_its_thread_is_captured_without_compiling_more() -> None:
    """It would be on the worker's thread, while streams wait."""
    language = copy.copy(loaded("llama").language)
    finished = threading.Event()
    compiling.compile_in_background(language, lambda compiled: finished.set())
    assert finished.wait(1200)
    assert language.call is not loaded("llama").language.call
    cache = PagedCache(language.layers, BLOCKS + SPARE, torch.float32, language.device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        DecodeGraphs(language, cache, BLOCKS, 16, 32, Recorder())


def test_on_a_cpu_there_are_none() -> None:
    assert runner_of(loaded("llama"))._graphs is None


def test_a_model_that_is_compiled_meanwhile_is_captured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = engine("llama", blocks=BLOCKS)
    first = runner_of(generator)._graphs = captured(generator, Recorder())
    again = Recorder()
    monkeypatch.setattr(
        "worker.model.paged_runner.decode_graphs",
        lambda language, cache, spare, table, most: DecodeGraphs(
            language, cache, spare, table, 8, again
        ),
    )
    language = generator.language
    plain = language.call
    try:
        served, _ = serve(generator, [request([7, 8, 9])])
        assert again.captured == 0
        language.call = lambda **inputs: plain(**inputs)
        more, _ = serve(generator, [request([7, 8, 9])])
    finally:
        language.call = plain
    assert runner_of(generator)._graphs is not first
    assert again.captured == 4
    assert again.replayed > 4
    assert more[0].ids == served[0].ids
