"""CUDA graphs: the same output, which batches they run, and what happens without them.

A recorder stands in for the capture and Python functions for the kernels: no GPU is needed.
"""

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batching.sequence import Batch, Span
from tests.decode_kernels import attend, write
from tests.generating import (
    Driver,
    assert_greedy,
    engine,
    loaded,
    prompts,
    request,
    runner_of,
    serve,
)
from tests.matrix import matrix
from tests.threads import run_together
from worker.backends import cuda as cuda_package
from worker.backends.cuda import cuda_graphs, varlen
from worker.backends.cuda.cuda_graphs import (
    MAX_PROMPT_READS,
    CudaGraphs,
    RowsMetadata,
    Run,
)
from worker.backends.cuda.mixed import MAX_SPAN_WIDTH, MixedMetadata
from worker.backends.cuda.varlen import VarlenMetadata
from worker.device.self_check import CannotRun
from worker.engines.generation.engine import RUNS_AHEAD, GenerationEngine
from worker.model import paged_runner
from worker.model.attention.kv_cache import BLOCK, LayerShape
from worker.model.attention.paged import AttentionMetadata
from worker.model.paged_runner import PagedRunner

pytestmark = pytest.mark.usefixtures("poisoned_cache")
BLOCKS = 60


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps ahead, as on a GPU."""
    monkeypatch.setitem(RUNS_AHEAD, "cpu", True)


@pytest.fixture(autouse=True)
def python_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(write=write, attend=attend)
    monkeypatch.setattr(cuda_package, "triton_decode", kernels, raising=False)


@pytest.fixture(autouse=True)
def gpu_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out KV caches as on a GPU."""
    monkeypatch.setattr(LayerShape, "fits_panels", lambda shape, dtype: False)


class Recorder:
    """Stands in for a capture: a replay runs the function again. Counts both."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        logits = run()

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode():
                logits.copy_(run())

        return replay, logits


def captured(runner: PagedRunner, recorder: Any, rows: int = 32) -> CudaGraphs:
    metadata = RowsMetadata(runner.cache, rows, -(-runner.max_model_len // BLOCK))
    graphs = CudaGraphs(runner.language, runner.model, metadata, runner._run, recorder)
    while not graphs.is_complete:
        graphs.capture_next()
    return graphs


def supported(graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return a list of the batches that graphs run from now on."""
    supports, batches = graphs.supports, list[Batch]()

    def recorded(batch: Batch) -> bool:
        if is_supported := supports(batch):
            batches.append(batch)
        return is_supported

    monkeypatch.setattr(graphs, "supports", recorded)
    return batches


def serve_mixed(generator: GenerationEngine, model: str) -> Driver:
    """Serve prompts of several lengths with the output of `generate`."""
    prompt_ids = prompts(1, (1, 7, 17, 48), count=2)
    served, driver = serve(generator, [request(ids) for ids in prompt_ids], seed=3)
    assert_greedy(model, served, 12)
    return driver


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "model", matrix(["llama", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v3"], "llama")
)
def test_output_is_the_same_with_graphs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, recorder = engine(model, blocks=BLOCKS), Recorder()
    runner = runner_of(generator)
    graphs = runner._graphs = captured(runner, recorder, rows=64)
    assert recorder.captured == recorder.replayed == 8  # each size is checked once
    batches = supported(graphs, monkeypatch)
    driver = serve_mixed(generator, model)
    assert len(driver.reports) > recorder.replayed - 8 > 5  # some steps are too wide for graphs
    widths = [span.width for batch in batches for span in batch.spans]
    assert sum(width for width in widths if width > MAX_SPAN_WIDTH) > 48


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "model", matrix(["qwen3.5", "mamba2", "mamba", "lfm2", "kimi-linear"], "qwen3.5", "mamba2")
)
def test_decodes_of_recurrent_layers_are_captured(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, recorder = engine(model, blocks=BLOCKS), Recorder()
    runner = runner_of(generator)
    graphs = runner._graphs = captured(runner, recorder)
    assert recorder.captured == recorder.replayed == 6
    batches = supported(graphs, monkeypatch)
    serve_mixed(generator, model)
    assert max(len(batch.ids) for batch in batches) > 3
    assert recorder.replayed - 6 == len(batches)


def test_a_batch_that_moves_fills_the_buffers_as_a_new_one() -> None:
    """Blocks that its rows begin are added to the tables of the step before."""
    cache = runner_of(engine("llama", blocks=BLOCKS)).cache
    moved, fresh = RowsMetadata(cache, 8, 12), RowsMetadata(cache, 8, 12)
    tables = [[1, 2], [3, 4], [5, 6, 7]]
    spans = [Span(table, start, 1) for table, start in zip(tables, (20, 31, 40), strict=True)]
    batch = Batch(spans, [-1, -2, -3], range(3))
    written = 0
    for step in range(100):
        if step:
            for number, span in enumerate(batch.spans):
                if (span.start + 1) % BLOCK == 0:
                    tables[number].append(10 + step % 40)
            batch.positions = [position + 1 for position in batch.positions]
            batch.spans = [Span(blocks, start + 1, 1) for blocks, start, _ in batch.spans]
        before = moved._filled[1]
        for rows in (moved, fresh):
            rows.fill(batch, 4, 58)
        written += moved._filled[1] is not before
        fresh._filled = (None, None, None, None)
        assert torch.equal(moved._buffer[:3], fresh._buffer[:3])
        assert torch.equal(moved._buffer[3:5], fresh._buffer[3:5])
        for row, position in enumerate(batch.positions):
            count = position // BLOCK + 1
            for rows in (moved, fresh):
                begin = int(rows.table_starts[row])
                assert rows.tables[begin : begin + count].tolist() == tables[row][:count]
    assert written <= 1 + 100 // 17


@pytest.mark.parametrize("model", ["qwen3.5", "mamba2"])
def test_a_graph_that_mixes_up_states_is_not_used(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RowsMetadata.first

    def wrong(self: RowsMetadata, rows: int) -> RowsMetadata:
        view = first(self, rows)
        view.sources = torch.zeros_like(view.sources)
        return view

    monkeypatch.setattr(RowsMetadata, "first", wrong)
    runner = runner_of(engine(model, blocks=BLOCKS))
    for stored in runner.cache.states:
        stored[0] = 1
    with pytest.raises(CannotRun, match="differ"):
        captured(runner, Recorder())


def test_an_eager_step_can_read_a_block_that_a_graph_started() -> None:
    """The cache is full of NaN; drafts make some steps wide."""
    generator = engine("llama", blocks=BLOCKS)
    runner = runner_of(generator)
    graphs = runner._graphs = captured(runner, Recorder())
    for stored in (*runner.cache.keys, *runner.cache.values):
        stored.fill_(float("nan"))
    supports, turn = graphs.supports, iter(range(10_000))
    graphs.supports = lambda batch: next(turn) % 2 == 0 and supports(batch)  # type: ignore[method-assign]
    prompt_ids = prompts(2, (3, 30), count=3)
    requests = [request(ids, max_tokens=40) for ids in prompt_ids]
    served, _ = serve(generator, requests, seed=1)
    assert_greedy("llama", served, 40)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "model", matrix(["llama", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v3"], "llama")
)
def test_decodes_beside_prompts_use_the_decode_kernel(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, attended, decoded = engine(model, blocks=BLOCKS), list[int](), list[int]()
    runner = runner_of(generator)
    runner._use_decode_kernel()
    assert runner.metadata is VarlenMetadata
    forward = runner.forward

    def counted(batch: Batch, sampled: Tensor | None = None) -> Tensor:
        short = sum(span.width for span in batch.spans if span.width <= MAX_SPAN_WIDTH)
        decoded.extend([short] * 2 if short else ())  # of two layers
        return forward(batch, sampled)

    runner.forward = counted  # type: ignore[method-assign]

    def recorded(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        attended.append(len(query))
        return attend(query, *arguments, **named)

    kernels = SimpleNamespace(write=write, attend=recorded)
    monkeypatch.setattr(cuda_package, "triton_decode", kernels)
    driver = serve_mixed(generator, model)
    assert any(report.prefill_tokens and report.decode_tokens for report in driver.reports)
    assert attended == decoded


def test_a_decode_kernel_with_other_logits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return attend(query, *arguments, **named) + 1

    kernels = SimpleNamespace(write=write, attend=wrong)
    monkeypatch.setattr(cuda_package, "triton_decode", kernels)
    runner = runner_of(engine("llama", blocks=BLOCKS))
    runner._use_decode_kernel()
    assert runner.metadata is AttentionMetadata
    assert "decode kernel beside prompts refused: logits differ" in caplog.text


def test_without_flash_attention_decodes_stay_on_the_decode_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(*arguments: Any, **named: Any) -> Tensor:
        raise RuntimeError("not compiled for this GPU")

    monkeypatch.setattr(varlen, "has_flash_attention", lambda q, v: True)
    monkeypatch.setattr(varlen, "varlen_attn", absent)
    runner = runner_of(engine("llama", blocks=BLOCKS))
    runner._use_decode_kernel()
    assert runner.metadata is MixedMetadata
    assert "flash attention refused: not compiled for this GPU" in caplog.text


def test_large_batches_and_prompts_that_read_many_keys_are_not_supported() -> None:
    graphs = captured(runner_of(engine("llama", blocks=BLOCKS)), Recorder(), rows=20)

    def supports(*widths: int, start: int = 0) -> bool:
        spans = [Span([0, 1, 2], start, width) for width in widths]
        return graphs.supports(Batch(spans, [0] * sum(widths), []))

    assert supports(*[1] * 20, start=100_000)
    assert not supports(*[1] * 21)
    assert supports(MAX_SPAN_WIDTH, 4, start=100_000)
    assert supports(20)
    assert supports(20, start=MAX_PROMPT_READS // 20 - 10)
    assert not supports(20, start=MAX_PROMPT_READS // 20)
    assert not supports(21)


def test_a_graph_with_other_logits_is_not_used() -> None:
    def wrong(run: Run) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, run() + 1

    with pytest.raises(CannotRun, match="differ"):
        captured(runner_of(engine("llama", blocks=BLOCKS)), wrong)


def test_a_failed_capture_is_logged_and_steps_are_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")

    monkeypatch.setattr(cuda_graphs, "CudaCapture", broken)
    runner = runner_of(engine("llama", blocks=BLOCKS))
    metadata = RowsMetadata(runner.cache, 1, 1)
    caplog.set_level(logging.WARNING, "onequeue.language_model")
    caplog.clear()
    assert cuda_graphs.capture_graphs(runner.language, runner.model, metadata, runner._run) is None
    assert [record.message for record in caplog.records] == [
        "CUDA graphs refused: operation not permitted when stream is capturing; "
        "launch by launch serves instead: small steps are slower"
    ]


@pytest.mark.matrix
def test_a_compiled_model_is_captured_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling again would block the worker's thread."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    runner = runner_of(engine("llama", blocks=BLOCKS))
    eager = runner.model
    run_together(partial(runner._compile, torch.get_num_threads()))
    assert runner.compile_state == "done"
    runner.forward(Batch([Span([0], 0, 1)], [7], [0]))
    assert runner.model is not eager
    with torch._dynamo.config.patch(error_on_recompile=True):
        captured(runner, Recorder())


def test_a_compiled_model_is_captured_one_size_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager model's graphs serve until then."""
    generator = engine("llama", blocks=BLOCKS, speculation="off", max_running=8)
    runner, first, again = runner_of(generator), Recorder(), Recorder()
    runner._rows = 8
    graphs = runner._graphs = captured(runner, first, 8)
    monkeypatch.setattr("worker.backends.cuda.cuda_graphs.CudaCapture", lambda checked: again)
    monkeypatch.setattr(paged_runner, "CAPTURE_REST", 0)
    eager, captures = runner.model, list[int]()
    served, _ = serve(generator, [request([7, 8, 9])])
    assert again.captured == 0
    runner._compiled = lambda **inputs: eager(**inputs)
    forward = runner.forward

    def counted(batch: Batch, sampled: Tensor | None = None) -> Tensor:
        logits = forward(batch, sampled)
        captures.append(again.captured)
        return logits

    runner.forward = counted  # type: ignore[method-assign]
    replayed = first.replayed
    more, _ = serve(generator, [request([7, 8, 9])])
    assert captures[:6] == [1, 2, 3, 4, 4, 4]
    assert first.replayed == replayed + 3  # the fourth step has all sizes
    assert runner._graphs not in (graphs, None)
    assert again.replayed > 4
    assert more[0].ids == served[0].ids


def test_a_compiled_model_is_captured_in_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, now, captured_at = runner_of(engine("llama", blocks=BLOCKS)), 100.0, list[float]()

    def slow(run: Run) -> tuple[Callable[[], None], Tensor]:
        nonlocal now
        captured_at.append(now)
        now += 0.25
        return lambda: None, run()

    monkeypatch.setattr(paged_runner, "time", SimpleNamespace(monotonic=lambda: now))
    runner._compiled_graphs = CudaGraphs(
        runner.language, runner.model, runner._rows_metadata(), runner._run, slow
    )
    while runner._compiled_graphs:
        runner.forward(Batch([Span([0], 0, 1)], [7], [0]))
        now += 0.125
    assert captured_at == [100 + 2.5 * n for n in range(14)]  # of 1 to 512 rows


def test_graphs_of_the_eager_model_stay_if_the_compiled_one_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(run: Run) -> Any:
        raise RuntimeError("CUDA out of memory")

    generator = engine("llama", blocks=BLOCKS, max_running=8)
    runner = runner_of(generator)
    graphs = runner._graphs = captured(runner, Recorder(), 8)
    monkeypatch.setattr(
        "worker.backends.cuda.cuda_graphs.CudaCapture", lambda checked: out_of_memory
    )
    eager = runner.model
    runner._compiled = lambda **inputs: eager(**inputs)
    caplog.clear()
    served, _ = serve(generator, [request([7, 8, 9])])
    assert_greedy("llama", served, 12)
    assert runner._graphs is graphs
    warnings = [record.message for record in caplog.records if "CUDA" in record.message]
    [warning] = warnings
    assert warning.startswith("CUDA graphs of the compiled model refused: CUDA out of memory; ")


def test_the_logits_of_all_sizes_take_the_memory_of_the_largest() -> None:
    outputs: list[Tensor] = []

    def recorded(run: Run) -> tuple[Callable[[], None], Tensor]:
        replay, logits = Recorder()(run)
        outputs.append(logits)
        return replay, logits

    captured(runner_of(engine("llama", blocks=BLOCKS)), recorded, rows=8)
    assert [len(logits) for logits in outputs] == [8, 4, 2, 1]
    assert {logits.data_ptr() for logits in outputs} == {outputs[0].data_ptr()}


def test_graphs_have_no_more_rows_than_the_largest_size() -> None:
    graphs = captured(runner_of(engine("llama", blocks=BLOCKS)), Recorder(), rows=320)
    assert graphs._sizes[-3:] == [192, 256, 320]
    assert graphs.supports(Batch([Span([0], 0, 1)] * 320, [0] * 320, []))
    assert PagedRunner(loaded("llama").runner.language, 4, 64, 1000)._rows == 512
