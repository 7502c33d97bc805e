"""Native operations of recurrent modules give the outputs of transformers' functions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_decoders
from tests.generating import built
from tests.matrix import matrix
from worker.backends.native_recurrent import use_native_recurrence
from worker.device.self_check import CannotRun
from worker.model.language_model import LanguageModel
from worker.model.paging import PagingCheck

pytestmark = pytest.mark.usefixtures("native")

# a convolution alone; the delta rule: one decay a head; fewer key heads than value heads; one decay
# a key; Mamba-2
MODELS = (
    *("lfm2", "olmo-hybrid", "qwen3.5", "kimi-linear", "qwen3-next"),
    *("granite4", "bamba", "falcon-h1", "mamba2"),
)
CPU = torch.device("cpu")


def paged(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    language = built(name, tiny_decoders.RECURRENT[name])
    if dtype != torch.float32:
        model: Any = language.model
        model.to(dtype)
        language = LanguageModel(name, language.model, language.tokenizer)
    PagingCheck(language).enable()
    return language


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", matrix(MODELS, "qwen3.5", "kimi-linear", "lfm2", "granite4"))
def test_modules_run_them_where_they_give_the_same(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("falcon-h1", torch.bfloat16):
        pytest.skip("the tiny model amplifies rounding")
    language = paged(name, dtype)
    use_native_recurrence(language.recurrent, language.states, dtype)
    assert language.recurrent
    assert all(module.native for module in language.recurrent)


@pytest.mark.parametrize("replaced", ["short_conv", "gated_delta_rule"])
def test_a_module_with_other_results_keeps_its_own(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    language, ops = paged("qwen3.5"), torch.ops.onequeue
    right = getattr(ops, replaced)
    monkeypatch.setattr(ops, replaced, lambda *args: right(*args) * 1.01)
    with pytest.raises(CannotRun, match="products differ"):
        use_native_recurrence(language.recurrent, language.states, torch.float32)
    assert language.recurrent[0].native is None


def test_time_steps_are_limited_in_prompts_only_as_in_transformers() -> None:
    language = paged("granite4")
    module: Any = language.recurrent[0].module
    module.time_step_limit = (0.0, 0.5)
    use_native_recurrence(language.recurrent, language.states, torch.float32)
    assert language.recurrent[0].native


# ── the operations: all rows of a packed row, in one chain of segments or several ──

ROWS = 50


def conv(x: slice, states: Tensor, segments: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, ROWS, 37, generator=generator).transpose(1, 2)
    weight, bias = torch.randn(37, 4, generator=generator), torch.randn(37, generator=generator)
    out: Tensor = torch.ops.onequeue.short_conv(
        inputs[..., x], weight, bias, states, torch.tensor(segments), True
    )
    return out.transpose(1, 2)


def rule(x: slice, states: Tensor, segments: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, ROWS, 2, 19, generator=generator) for _ in range(2))
    value = torch.randn(1, ROWS, 4, 80, generator=generator)
    decay, beta = (torch.rand(1, ROWS, 4, generator=generator) for _ in range(2))
    inputs = (tensor[:, x] for tensor in (query, key, value, -decay, beta))
    out: Tensor = torch.ops.onequeue.gated_delta_rule(*inputs, states, torch.tensor(segments), True)
    return out


def scan(x: slice, states: Tensor, segments: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    hidden, dt = (torch.rand(1, ROWS, *size, generator=generator) for size in ((4, 21), (4,)))
    b, c = (torch.randn(1, ROWS, 2, 19, generator=generator) for _ in range(2))
    decay, skip = -torch.rand(4, generator=generator), torch.rand(4, generator=generator)
    hidden, dt, b, c = (tensor[:, x] for tensor in (hidden, dt, b, c))
    out: Tensor = torch.ops.onequeue.state_space(
        hidden, dt, decay, b, c, skip, states, torch.tensor(segments)
    )
    return out


OPERATIONS = [(conv, (37, 4)), (rule, (4, 19, 80)), (scan, (4, 21, 19))]
parametrized = pytest.mark.parametrize(("operation", "shape"), OPERATIONS)


@parametrized
def test_a_token_does_not_depend_on_the_chunks_before_it(operation: Any, shape: Any) -> None:
    states = torch.full((4, *shape), torch.nan)
    whole = operation(slice(None), states, [[0, ROWS, -1, 0]])
    parts, source = [], -1
    for start, end in ((0, 1), (1, 33), (33, 49), (49, 50)):
        target = 2 if source == 1 else 1
        segment = [0, end - start, source, target]
        parts.append(operation(slice(start, end), states, [segment]))
        source = target
    assert torch.equal(torch.cat(parts, 1), whole)
    ends = [[0, 20, -1, 1], [20, 1, 1, 2], [21, ROWS - 21, 2, 3]]
    assert torch.equal(operation(slice(None), states, ends), whole)
    following = [operation(slice(0, 4), states, [[0, 4, slot, 1]]) for slot in (0, 3)]
    assert torch.equal(*following)


@parametrized
def test_sequences_do_not_depend_on_each_other(operation: Any, shape: Any) -> None:
    states = torch.zeros(6, *shape)
    first = operation(slice(0, 20), states, [[0, 20, -1, 0]])
    second = operation(slice(20, 47), states, [[0, 27, 0, 1]])
    both = operation(slice(0, 47), states, [[0, 20, -1, 2], [20, 27, 0, 3]])
    assert torch.equal(both, torch.cat([first, second], 1))


@parametrized
def test_rows_of_no_sequence_are_zeros(operation: Any, shape: Any) -> None:
    out = operation(slice(None), torch.zeros(4, *shape), [[3, 5, -1, 0], [20, 7, -1, 1]])
    written = out.flatten(2).any(2)[0].nonzero().flatten().tolist()
    assert written == [*range(3, 8), *range(20, 27)]


@parametrized
def test_rows_and_slots_outside_are_refused(operation: Any, shape: Any) -> None:
    for segment in ([0, 51, -1, 0], [50, 1, -1, 0], [0, 0, -1, 0], [-1, 2, -1, 0]):
        with pytest.raises(RuntimeError, match="of 50"):
            operation(slice(None), torch.zeros(4, *shape), [segment])
    for segment in ([0, 5, 4, 0], [0, 5, -2, 0], [0, 5, 0, 4], [0, 5, 0, -1]):
        with pytest.raises(RuntimeError, match="slots"):
            operation(slice(None), torch.zeros(4, *shape), [segment])
    with pytest.raises(RuntimeError, match="of 50"):
        operation(slice(None), torch.zeros(4, *shape), [[0, 9, -1, 0], [8, 2, -1, 1]])
