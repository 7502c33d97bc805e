"""The native gated delta rule gives the outputs and states of transformers' functions."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_decoders
from tests.generating import built
from tests.matrix import matrix
from worker.model.attention import delta_rule
from worker.model.attention.delta_rule import use_native_delta_rule
from worker.model.language_model import LanguageModel
from worker.model.paging import PagingCheck

pytestmark = pytest.mark.usefixtures("native")

# one decay a head; fewer key heads than value heads; one decay a key
MODELS = ("olmo-hybrid", "qwen3.5", "kimi-linear")
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
@pytest.mark.parametrize("name", matrix(MODELS, "qwen3.5", "kimi-linear"))
def test_modules_run_it_where_it_gives_the_same(name: str, dtype: torch.dtype) -> None:
    language = paged(name, dtype)
    use_native_delta_rule(language.recurrent, language.states, dtype)
    assert [module.in_place is not None for module in language.recurrent] == [True]


def test_a_module_with_other_results_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    language = paged("qwen3.5")
    right = delta_rule.delta_rule

    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, state = right(*args, **kwargs)
        return out * 1.01, state

    monkeypatch.setattr(delta_rule, "delta_rule", wrong)
    own = language.recurrent[0].forward
    with caplog.at_level(logging.WARNING):
        use_native_delta_rule(language.recurrent, language.states, torch.float32)
    assert language.recurrent[0].forward is own
    assert language.recurrent[0].in_place is None
    assert "native delta rule disabled" in caplog.text


def rows(tokens: int, heads: int = 4, columns: int = 80) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query, key = torch.randn(2, tokens, 2, 19), torch.randn(2, tokens, 2, 19)
    value = torch.randn(2, tokens, heads, columns)
    return query, key, value, -torch.rand(2, tokens, heads), torch.rand(2, tokens, heads)


def run(inputs: tuple[Tensor, ...], states: Tensor, sources: Any, targets: list[int]) -> Tensor:
    known = None if sources is None else torch.tensor(sources)
    out: Tensor = torch.ops.onequeue.gated_delta_rule(
        *inputs, states, known, torch.tensor(targets), True
    )
    return out


def test_a_token_does_not_depend_on_the_chunks_before_it() -> None:
    inputs, states = rows(50), torch.full((4, 4, 19, 80), torch.nan)
    whole = run(inputs, states, None, [0, 1])
    last = states[:2].clone()
    parts, source = [], None
    for start, end in ((0, 1), (1, 33), (33, 49), (49, 50)):
        target = [2, 3] if source != [2, 3] else [0, 1]
        part = tuple(tensor[:, start:end] for tensor in inputs)
        parts.append(run(part, states, source, target))
        source = target
    assert torch.equal(torch.cat(parts, 1), whole)
    assert source is not None
    assert torch.equal(states[source], last)


def test_a_row_does_not_depend_on_other_rows() -> None:
    inputs, states = rows(5), torch.zeros(4, 4, 19, 80)
    both = run(inputs, states, None, [0, 1])
    second = tuple(tensor[1:] for tensor in inputs)
    assert torch.equal(run(second, states, None, [2]), both[1:])
    assert torch.equal(states[1], states[2])


def test_slots_outside_of_the_states_are_refused() -> None:
    for sources, targets in (([0, 4], [1, 2]), ([0, 1], [2, -1])):
        with pytest.raises(RuntimeError, match="slot"):
            run(rows(1), torch.zeros(4, 4, 19, 80), sources, targets)
