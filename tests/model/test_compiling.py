"""The compiled model and native attention replace the eager ones between steps, if they agree."""

import gc
import logging
import re
import shutil
import threading
import time
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from batching.sequence import Batch, Span
from tests import tiny, tiny_decoders
from tests.generating import engine, load_paged, runner_of
from tests.matrix import matrix
from tests.serving import wait_until
from tests.threads import compute_threads, run_together
from worker.backends.native_attention import NativeMetadata
from worker.cores import use_one_core
from worker.device.self_check import CannotRun, compare
from worker.model import compiling
from worker.model.attention import paged
from worker.model.attention.kv_cache import KVCache
from worker.model.attention.paged import AttentionBackend, AttentionMetadata
from worker.model.compiling import NoSharedGraph, compile_model, with_compiled_layers
from worker.model.language_model import LanguageModel
from worker.model.paged_runner import PagedRunner, new_cache, run_model


def loaded(quantization: str = "none") -> PagedRunner:
    return load_paged(tiny.folder("llama-lm"), quantization=quantization, kv_cache_gb=0.001)


def run_tokens(runner: PagedRunner, span: Span) -> Tensor:
    """Return the logits of a span whose tokens depend on their positions only."""
    ids = range(span.start + 1, span.start + span.width + 1)
    return runner.forward(Batch([span], ids, range(span.width)))


def compile_state(runner: PagedRunner) -> str:
    """Compile in the thread and return the final state."""
    runner.compile()
    deadline = time.monotonic() + 1200
    while runner.compile_state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return runner.compile_state


@pytest.mark.parametrize("is_frozen", [True, False])
def test_collections_skip_what_compiling_leaves_where_the_process_is_the_servers(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, calls = loaded(), list[tuple[str, str]]()
    monkeypatch.setattr("worker.model.compiling.compile_model", lambda *_: runner.model)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1000 if is_frozen else 0)
    for name in ("collect", "freeze"):
        record = partial(lambda name: calls.append((name, runner.compile_state)), name)
        monkeypatch.setattr(gc, name, record)
    runner.compile_state = "running"
    thread = threading.Thread(target=runner._compile, args=(1,))
    thread.start()
    thread.join()
    assert calls == ([("collect", "running"), ("freeze", "running")] if is_frozen else [])
    assert str(runner.compile_state) == "done"


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(
    ("quantization", "rounding"),
    [
        ("none", 1e-4),
        pytest.param("int8", 5e-2, marks=pytest.mark.slow),
        pytest.param("int4", 5e-2, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_model_is_used_and_gives_the_same_logits(
    quantization: str, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.fx, "symbolic_trace", None)  # modules in other threads would raise
    runner = loaded(quantization)
    language = runner.language
    assert language.tolerance == rounding
    eager, graphs = runner.model, counters["stats"]["unique_graphs"]
    assert compile_state(runner) == "done"
    assert runner.model is eager, "it is used before the next step"
    assert runner.metadata is NativeMetadata
    fallback_cache = new_cache(language, 8, 2)
    # a prompt with a chunk of another, then a token each, then one alone
    for spans in (
        [Span([0, 1, 2], 0, 40), Span([3, 4], 0, 5)],
        [Span([0, 1, 2], 40, 1), Span([3, 4], 5, 1)],
        [Span([3, 4], 6, 1)],
        [Span([3, 4], 7, 3)],  # with drafts
    ):
        width = sum(span.width for span in spans)
        batch = Batch(spans, [1 + n % 50 for n in range(width)], range(width))
        logits = runner.forward(batch)
        assert runner.model is not eager
        torchs = run_model(language, batch, AttentionMetadata(runner.cache, batch))
        compare(logits, torchs, language.tolerance)
        # the operation in the graph falls back to torch's attention in steps of that backend
        metadata = AttentionMetadata(fallback_cache, batch)
        compiled = run_model(language, batch, metadata, model=runner.model)
        compare(logits, compiled, language.tolerance)
    spans = [Span([3, 4], start, end - start) for start, end in pairwise((0, 5, 6, 7, 10))]
    logits = torch.cat([run_tokens(runner, span) for span in spans])
    assert torch.equal(logits, run_tokens(runner, Span([3, 4], 0, 10)))
    assert counters["stats"]["unique_graphs"] == graphs + 1, "a single token has its own graph"


@pytest.mark.parametrize("setting", ["on", "off"])
def test_the_cache_has_the_order_of_native_attention_where_it_is_to_serve(setting: str) -> None:
    runner = load_paged(tiny.folder("llama-lm"), kv_cache_gb=0.001, compile=setting)
    assert {*map(bool, runner.cache.panels)} == {setting == "on"}


def test_code_is_compiled_for_the_workers_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, seen = loaded(), []
    monkeypatch.setattr(
        "worker.model.compiling.compile_model", lambda *_: seen.append(torch.get_num_threads())
    )
    with compute_threads(3):
        run_together(use_one_core)  # as threads of a pool do
        compile_state(runner)
    assert seen == [3]


def test_a_failed_compilation_is_logged_and_the_eager_model_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = loaded()
    eager = runner.model

    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr("worker.model.compiling.compile_model", broken)
    monkeypatch.setattr("worker.backends.native_attention.load_native_ops", broken)
    caplog.set_level(logging.WARNING, "onequeue.language_model")
    assert compile_state(runner) == "off"
    runner.forward(Batch([Span([0], 0, 1)], [1], [0]))
    assert runner.model is eager
    assert runner.metadata is AttentionMetadata
    logged = [record for record in caplog.records if record.name == "onequeue.language_model"]
    assert [record.message for record in logged] == [
        "native attention refused: no compiler here; torch's attention serves instead: "
        "outputs depend on the batch; steps are about 2.5 times slower",
        "compilation refused: no compiler here; the eager model serves instead: "
        "steps are about 1.6 times slower",
    ]
    hidden = "see the server's log"  # the reason may name folders
    assert [(f.refused, f.reason) for f in runner.language.fallbacks] == [
        ("native attention", hidden),
        ("compilation", hidden),
    ]


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
def test_torchs_operations_serve_until_the_native_ones_are_built(
    monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    runner, is_built = loaded(), threading.Event()
    monkeypatch.setattr("worker.backends.native_attention.try_load_native_ops", lambda build: False)
    monkeypatch.setattr("worker.backends.native_attention.load_native_ops", is_built.wait)
    monkeypatch.setattr("worker.model.compiling.compile_model", lambda *_: runner.model)
    span = Span([0, 1], 0, 20)
    before = run_tokens(runner, span)
    runner.compile()
    assert re.fullmatch("building native operations, [0-9]+ s so far, once", runner.stage)
    assert (runner.form(False), runner.compile_state) == ("torch", "running")
    assert torch.equal(run_tokens(runner, span), before)
    assert runner.metadata is AttentionMetadata
    is_built.set()
    wait_until(lambda: runner.compile_state != "running", 600)
    assert (runner.form(False), runner.form(True), runner.stage) == ("", "eager", "")
    backend: Any = runner.metadata
    assert backend is NativeMetadata


class Scaled(nn.Module):
    """A model whose body multiplies by a scale, and adds one if `adds` is set."""

    device = torch.device("cpu")

    def __init__(self, scale: float) -> None:
        super().__init__()
        body: Any = nn.Module()
        body.weight = nn.Parameter(torch.full((4,), scale), requires_grad=False)
        body.adds = True
        body.forward = lambda x: x * body.weight + 1 if body.adds else x * body.weight
        self.base_model: Any = body

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base_model.forward(x=x)
        return output


@pytest.mark.matrix
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@torch.inference_mode()
def test_two_models_run_their_own_graphs_with_guards_on_inputs_only() -> None:
    def check(compiled: Any) -> None:
        for width in (7, 1):
            compiled(torch.ones(width, 4))

    models = [Scaled(scale) for scale in (2.0, 3.0)]
    compiled = [compile_model(model, check) for model in models]
    for model in models:
        model.base_model.adds = False  # guards on this would compile again
    for width in (1, 5, 7, 1):
        assert [float(model(torch.ones(width, 4)).mean()) for model in compiled] == [3.0, 4.0]


class Rotated(nn.Module):
    """A model whose body rotates each second number of a head with the next: x [T, heads, 8]."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.base_model: Any = nn.Module()
        self.base_model.forward = self._rotate

    @staticmethod
    def _rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = self.base_model.forward(x=x, positions=positions)
        return output


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@torch.inference_mode()
def test_compiled_rotations_have_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(40, 4, 8), torch.arange(100, 140.0)
    rotated: list[Tensor] = []

    def check(compiled: Any) -> None:
        rotated.extend(compiled(x[:width], positions[:width]) for width in (40, 24, 7, 1))

    model = Rotated()
    compile_model(model, check)
    torch.testing.assert_close(rotated[0], model(x, positions))
    assert all(torch.equal(rows, rotated[0][: len(rows)]) for rows in rotated)


@pytest.mark.parametrize("name", ["llama", "llama4", "gpt2"])
def test_the_body_is_compiled_whatever_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = runner_of(engine(name)).language.model
    bodies: list[Any] = []

    def compile_(forward: Any, **_: Any) -> Any:
        bodies.append(forward)
        return forward

    def check(compiled: Any) -> None:
        if len(bodies) == 1:
            raise NoSharedGraph("the layers are tried first")

    monkeypatch.setattr(torch, "compile", compile_)
    compiled = compile_model(model, check)
    assert len(bodies) == 2
    assert bodies[-1] in [part.forward for part in compiled.children()]
    assert bodies[-1] not in [part.forward for part in model.children()]


@pytest.mark.parametrize("name", matrix(["gemma3", "deepseek-v3"], "gemma3"))
def test_layers_of_a_kind_share_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for several tokens and one for a single token. The models have two kinds of layers."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(LanguageModel, "pack_weights", lambda *_, **__: None)  # as on a GPU
    runner = load_paged(tiny_decoders.folder(name))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled = with_compiled_layers(runner.language.model, "model")
    runner._check_compiled(compiled)
    assert counters["stats"]["unique_graphs"] - before == 2 * 2


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.get_submodule("body.layers").children():
            x = layer(x)
        return x


class Dense(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.weight = layer_idx, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        assert scale is not None
        return torch.tanh(scale * x @ self.weight)


class Decoder(nn.Module):
    """Layers, of which some get another scale, or another input than the last one's output."""

    def __init__(self, count: int, scales: Sequence[int] = (), added_after: int = -1) -> None:
        super().__init__()
        self.body: Any = nn.Module()
        self.body.layers = nn.ModuleList(Dense(n) for n in range(count))
        self.scales, self.added_after = [*scales] or [0] * count, added_after

    def forward(self, x: Tensor) -> Tensor:
        scales = [torch.tensor(1.0), torch.tensor(2.0)]
        layers = self.body.layers[: len(self.scales)]
        pairs = zip(layers, self.scales, strict=False)  # a compiled copy may have one layer to call
        for number, (layer, scale) in enumerate(pairs):
            x = layer(x, scale=scales[scale])
            x = x + 1 if number == self.added_after else x
        return x


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled layers run outside of a step."""
    monkeypatch.setattr(paged._context, "backend", AttentionBackend, raising=False)
    monkeypatch.setattr(AttentionBackend, "begin_layers", lambda number: None)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("count", "types", "sizes"),
    [
        (30, None, [6] * 5),
        (28, None, [4] * 7),
        (7, None, [1] * 7),
        (12, "sssssfsssssf", [5, 1, 5, 1]),
        (4, "sf", [4]),  # those of another list
    ],
)
def test_layers_of_a_type_run_in_groups_of_one_size(
    count: int, types: str | None, sizes: list[int], no_step: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = Decoder(count)
    if types:
        vars(model.body)["config"] = SimpleNamespace(layer_types=[*types])
    seen: list[int] = []

    def call(number: int, run: Any, layers: Sequence[nn.Module], *args: Any) -> Any:
        assert number == sum(seen) % count
        seen.append(len(layers))
        return run(layers, *args)

    monkeypatch.setattr(compiling, "call_as_layers", call)
    compiled = with_compiled_layers(model, "body", 6, is_general=True)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for width in (3, 7, 1):
        x = torch.randn(width, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert seen == sizes * 3
    called = [*compiled.body.layers]
    assert called == [*compiled.body.layers[:count]]
    assert len(called) == 1, "the first layer runs all groups"
    assert counters["stats"]["unique_graphs"] - before == len({*sizes}), "for any number of rows"


@torch.inference_mode()
@pytest.mark.parametrize(
    "model", [Decoder(4, [0, 0, 1, 0]), Decoder(4, added_after=1)], ids=["argument", "hidden"]
)
def test_layers_with_other_inputs_do_not_run_in_groups(
    model: Decoder, no_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    x = torch.randn(3, 8)
    with pytest.raises(NoSharedGraph, match="do not have the same inputs"):
        with_compiled_layers(model, "body", 6, is_general=True)(x)
    torch.testing.assert_close(with_compiled_layers(model, "body")(x), model(x))


@torch.inference_mode()
@pytest.mark.parametrize(
    "model",
    [Decoder(8, [0] * 4 + [1] * 4), Decoder(8, added_after=3)],
    ids=["argument", "hidden"],
)
def test_all_layers_are_called_where_groups_have_other_inputs(
    model: Decoder, no_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = with_compiled_layers(model, "body", 4, is_general=True)
    for x in torch.randn(2, 3, 8):
        torch.testing.assert_close(compiled(x), model(x))


class Masked(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor, mask: tuple[Tensor | None, bool], factor: int) -> Tensor:
        added, is_negative = mask
        x = x * factor + (1 if added is None else added)
        return -x if is_negative else x


@torch.inference_mode()
def test_inputs_of_another_form_run_code_of_their_own(
    no_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that was run before runs without guards."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compiling, "MAX_FORMS", 5)
    layers = Layers(Masked(0), Masked(1))
    body = with_compiled_layers(layers, "body", 6, is_general=True).get_submodule("body.layers")
    [first, *_] = body.children()
    for _ in range(2):
        for dtype in (torch.float32, torch.float64):
            for mask in ((None, False), (None, True), (torch.tensor([2.0, 3.0]), False)):
                for factor in (2, 3):
                    x = torch.randn(2, dtype=dtype)
                    expected = x
                    for layer in layers.get_submodule("body.layers").children():
                        expected = layer(expected, mask, factor=factor)
                    assert torch.equal(first(x, mask, factor=factor), expected)


class Shared(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor, shared: UserDict[str, int]) -> Tensor:
        return x + shared["factor"]


@torch.inference_mode()
def test_an_object_among_the_inputs_keeps_its_guards(
    no_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gemma 4 passes to each layer: it has no hash."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    body = with_compiled_layers(Layers(Shared(0), Shared(1)), "body", 6, is_general=True)
    [first, *_] = body.get_submodule("body.layers").children()
    shared = UserDict(factor=1)
    for factor in (1, 1, 5):
        shared["factor"] = factor
        assert first(torch.zeros(2), shared=shared).tolist() == [2.0 * factor] * 2


class Operation(Enum):
    PLUS, MINUS = 1, -1


class Configured(nn.Module):
    """Adds by a function, an enumeration, a list and a dictionary that it holds."""

    def __init__(
        self, layer_idx: int, function: Any = torch.sin, operation: Operation = Operation.PLUS,
        terms: Sequence[float] = (), options: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer_idx, self.function, self.operation = layer_idx, function, operation
        self.terms, self.options = [*terms], {**(options or {})}

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1 + self.function(x) + 10 * sum(self.terms) + 100 * ("more" in self.options)
        return x if self.operation is Operation.PLUS else x - 1000


class Doubled(Configured):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@torch.inference_mode()
def test_layers_that_differ_do_not_share_a_graph(
    no_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six kinds of layers: torch allows eight graphs by default."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kinds: list[dict[str, Any]] = [
        {}, {"function": torch.cos}, {"operation": Operation.MINUS}, {"terms": [1.0]},
        {"options": {"more": 1}},
    ]  # fmt: skip
    layers = [Configured(n, **given) for n, given in enumerate([{}, *kinds])]
    model = Layers(*layers, Doubled(len(layers)), Doubled(len(layers) + 1))
    compiled = with_compiled_layers(model, "body")
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for width in (3, 7, 1):
        x = torch.linspace(-1, 1, width)
        torch.testing.assert_close(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] - before == 2 * (len(kinds) + 1)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((Dense(0),), "not in one list"),
        ((Dense(0), nn.Identity()), "more than once, or not"),
        ((Dense(0), nn.Sequential(Dense(1), Dense(2))), "more than once, or not"),
    ],
)
def test_layers_are_compiled_if_each_has_one_number(
    layers: tuple[nn.Module, ...], why: str
) -> None:
    with pytest.raises(CannotRun, match=why):
        with_compiled_layers(Layers(*layers), "body")


def test_a_model_without_a_body_is_not_compiled() -> None:
    model = Scaled(1.0)
    model.base_model = None
    with pytest.raises(CannotRun, match="body"):
        compile_model(model, lambda compiled: None)


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
def test_a_compiled_model_must_not_depend_on_the_batch_where_the_eager_one_does_not() -> None:
    runner = loaded()
    runner._use_native_ops()
    model = runner.language.model

    def compiled(**inputs: Any) -> Any:
        output = model(**inputs)
        if inputs["input_ids"].shape[-1] == 1:
            output.logits = output.logits * (1 + 1e-6)
        return output

    runner._check_compiled(model)
    with pytest.raises(CannotRun, match="depend on its batch"):
        runner._check_compiled(compiled)


def test_without_a_cpp_wrapper_kernels_are_called_from_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[bool, bool]] = []
    model: Any = Scaled(1.0)

    def check(compiled: Any) -> None:
        config: Any = torch._inductor.config
        tried.append((config.cpp_wrapper, config.freezing))
        if config.cpp_wrapper:
            raise RuntimeError("not here")

    monkeypatch.setattr(compiling, "_with_compiled_body", lambda *_, **__: model)
    assert compile_model(model, check) is model
    assert tried == [(True, True), (False, True)]


def attending(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """`change` maps the arguments (step, query, …, sinks, layer, scale, window, softcap)."""
    original = NativeMetadata.attend
    return lambda patch: patch.setattr(
        NativeMetadata, "attend", lambda *arguments: original(*change(*arguments))
    )


def with_spans(change: Callable[[Tensor], object]) -> Callable[[pytest.MonkeyPatch], None]:
    """`change` alters the spans: row, width, start and table offset of each."""
    original = NativeMetadata.__init__

    def init(step: NativeMetadata, cache: KVCache, batch: Batch) -> None:
        original(step, cache, batch)
        change(step._spans)

    return lambda patch: patch.setattr(NativeMetadata, "__init__", init)


FAULTS: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("llama", "another sequence's blocks", with_spans(lambda spans: spans[:, 3].zero_())),
    ("llama", "a token earlier", with_spans(lambda spans: spans[:, 2].sub_(1).clamp_(min=0))),
    ("llama", "another scale", attending(lambda *a: (*a[:6], a[6] * 1.1, *a[7:]))),
    ("mistral", "window too long", attending(lambda *a: (*a[:7], a[7] + 1, a[8]))),
    ("mistral", "window too short", attending(lambda *a: (*a[:7], a[7] - 1, a[8]))),
    ("gpt-oss", "window ignored", attending(lambda *a: (*a[:7], 0, a[8]))),
    ("gpt-oss", "sinks ignored", attending(lambda *a: (*a[:4], None, *a[5:]))),
    ("gemma2", "capping ignored", attending(lambda *a: (*a[:8], 0.0))),
]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("model", "patch"),
    [pytest.param(model, patch, id=f"{model}: {fault}") for model, fault, patch in FAULTS],
)
def test_native_attention_with_other_logits_is_not_used(
    model: str,
    patch: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = runner_of(engine(model))
    runner._use_native_ops()
    assert runner.metadata is NativeMetadata
    runner.metadata = AttentionMetadata
    patch(monkeypatch)
    caplog.clear()
    runner._use_native_ops()
    assert runner.metadata is AttentionMetadata
    [record] = caplog.records
    assert record.message.startswith("native attention refused: logits differ by")
    fallback = runner.language.fallbacks[-1]
    assert fallback.reason.startswith("logits differ by")


def test_what_is_refused_for_its_logits_is_not_compiled_again() -> None:
    tried: list[Any] = []

    def check(compiled: Any) -> None:
        tried.append(compiled)
        raise CannotRun("logits differ")

    with pytest.raises(CannotRun, match="logits differ"):
        compile_model(Scaled(1.0), check)
    assert len(tried) == 1


@pytest.mark.parametrize(("name", "waits"), [("llama", False), ("deepseek-v3", True)])
def test_models_whose_native_layers_hold_other_weights_wait_for_the_build(
    name: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(engine(name))
    monkeypatch.setattr("worker.backends.native_attention.try_load_native_ops", lambda build: False)
    assert runner._builds_later() is not waits
