"""Packed batches give the model's own output, and a packing that does not is found at load."""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests import tiny
from tests.parity import item, runner, same, serve
from tests.tiny_tokenizers import SENTENCES
from worker.device.self_check import TOLERANCE, CannotRun
from worker.pipeline import packed_attention as packing_module
from worker.pipeline.loading import Rows, check_packing, random_rows
from worker.pipeline.packed_attention import (
    Attention,
    Packing,
    PackingPlan,
    _take,
    attend_natively,
    check_native_packing,
    plan_batch,
)
from worker.pipeline.runner import PipelineRunner, split_rows

PACKED = [
    "bert-base",
    "bert-classify",
    "bert-mlm",
    "bert-ner",
    "bert-nli",
    "distilbert-mlm",
    "electra-classify",
    "gpt2-base",
    "gpt2-classify",
    "llama-classify",
    "mistral-classify",
    "modernbert-mlm",
    "roberta-mlm",
]
NOT_PACKED = {
    "deberta-mlm": ("padded", "it takes no attention function"),
    "xlnet-base": ("padded", "no single stack|attention function"),
    "albert-base": ("padded", "no single stack of layers"),
    "fnet-mlm": ("single", "differ in a batch"),
    "gpt2-nopad-classify": ("single", "no padding token"),
    "gpt2-nopad-lm": ("single", "no padding token"),
    "gpt2-lm": ("padded", ""),
}


def load(model: str) -> PipelineRunner:
    return runner(tiny.TASKS[model], model)


def fresh_model(model: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Not the cached one, which is attached to a packing."""
    kind: Any = type(load(model).pipe.model)
    made: PreTrainedModel = kind.from_pretrained(tiny.folder(model), dtype=dtype)
    return made


def own_outputs(model: PreTrainedModel, rows: Rows) -> list[Any]:
    with torch.no_grad():
        return [model(**alone) for alone in rows.alone]


def packed_outputs(packing: Packing, rows: Rows) -> list[Any]:
    with packing.batch(rows.counts, max(rows.counts)), torch.no_grad():
        output = packing.model(**rows.batch)
    return split_rows(output, len(rows.counts), rows.counts)


def off(got: Any, expected: Any) -> float:
    """The largest difference of any score, in terms of the largest score."""
    worst = 0.0
    for name in ("logits", "last_hidden_state", "pooler_output"):
        if (value := expected.get(name)) is not None:
            assert got[name].shape == value.shape
            difference = (got[name].float() - value.float()).abs().max() / value.abs().max()
            worst = max(worst, float(difference))
    return worst


@pytest.mark.parametrize("name", PACKED)
def test_packed_equals_the_models_own_forward(name: str) -> None:
    run = load(name)
    assert run.info.batching == "packed", run.info.why
    assert run.packing is not None
    model = fresh_model(name)
    for lengths in (
        [1],
        [5, 5, 5],
        [1, 64, 2, 33, 7, 8],
        list(range(1, 24)),
        [64, 1],
        [9, 11, 10, 40, 41],
    ):
        rows = random_rows(model, run.pipe.tokenizer, lengths, left=False)
        for got, expected in zip(
            packed_outputs(run.packing, rows), own_outputs(model, rows), strict=True
        ):
            assert off(got, expected) < 1e-4


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", PACKED)
def test_with_native_attention_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = load(name).packing
    assert packing is not None
    load(name).warm_up()
    assert packing.kinds
    for kind in packing.kinds:
        check_native_packing(kind, torch.float32)
        check_native_packing(kind, torch.bfloat16)
    monkeypatch.setattr(packing, "native", True)
    monkeypatch.setattr(packing_module, "attend_in_groups", None)
    test_packed_equals_the_models_own_forward(name)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("size", [8, 24, 64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [0, 1, 9, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_of_packed_rows_is_torchs(
    size: int, heads: tuple[int, int], window: int, causal: bool, dtype: torch.dtype
) -> None:
    check_native_packing(Attention(*heads, size, size**-0.5, window, causal), dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "wrong"), [(9, 8), (9, 10), (9, 0), (0, 9), (128, 127)])
def test_native_attention_with_another_window_is_not_used(
    window: int, wrong: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(
        query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, look: Attention
    ) -> Tensor:
        return attend_natively(query, key, value, plan, replace(look, window=wrong))

    monkeypatch.setattr("worker.pipeline.packed_attention.attend_natively", other)
    with pytest.raises(CannotRun, match="sums differ"):
        check_native_packing(Attention(4, 2, 8, 0.5, window, causal), torch.float32)


def taken_by(packing: Packing) -> None:
    thread = threading.Thread(target=_take, args=(packing,))
    thread.start()
    thread.join()


def test_without_a_compiler_torchs_attention_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("worker.pipeline.packed_attention.load_native_ops", broken)
    caplog.set_level(logging.WARNING, "onequeue.native_packing")
    packing = Packing(fresh_model("bert-mlm"))
    taken_by(packing)
    assert not packing.native
    assert [record.message for record in caplog.records] == [
        "no native attention, torch's serves: no compiler here"
    ]


@pytest.mark.parametrize("name", PACKED)
def test_models_tell_inputs_apart(name: str) -> None:
    """Otherwise nothing would show in the other tests."""
    model = fresh_model(name)
    rows = random_rows(model, load(name).pipe.tokenizer, [12, 12], left=False)
    one, other = own_outputs(model, rows)
    assert off(one, other) > 0.01


@pytest.mark.parametrize("name", sorted(NOT_PACKED))
def test_models_that_do_not_pack_say_why_and_answer_right(name: str) -> None:
    run = load(name)
    batching, why = NOT_PACKED[name]
    assert run.info.batching == batching
    assert re.search(why, run.info.why), run.info.why
    texts: Sequence[str] = SENTENCES
    if "mlm" in name:
        texts = ["one [MASK]", "a [MASK] and [MASK] then something else", "the [MASK] of"]
    parameters = {"do_sample": False, "max_new_tokens": 3} if run.generates else {}
    together = serve(run, [item(text, **parameters) for text in texts])
    for answer, text in zip(together, texts, strict=True):
        same(answer, serve(run, [item(text, **parameters)])[0])


# ── what the check at load finds ──


def group_with(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    made = packing_module._group
    patch.setattr(packing_module, "_group", lambda *args: replace(made(*args), **changes))


def padding_is_seen(patch: pytest.MonkeyPatch) -> None:
    group_with(patch, real=None)


def neighbours_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def joined(lengths: Sequence[int], width: int, *rest: Any) -> Any:
        plan = plan_batch(lengths, width, *rest)
        one_row = plan_batch([sum(lengths)], sum(lengths), *rest)
        return replace(plan, groups=one_row.groups)

    patch.setattr(packing_module, "plan_batch", joined)


def rows_are_returned_in_another_order(patch: pytest.MonkeyPatch) -> None:
    made = packing_module._group

    def turned(*args: Any) -> Any:
        group = made(*args)
        return replace(group, target=group.target.flip(0))

    patch.setattr(packing_module, "_group", turned)


def window_is_ignored(patch: pytest.MonkeyPatch) -> None:
    made = packing_module._band
    patch.setattr(packing_module, "_band", lambda group, _, *rest: made(group, 0, *rest))


def window_is_one_wider(patch: pytest.MonkeyPatch) -> None:
    made = packing_module._band
    patch.setattr(
        packing_module, "_band", lambda group, width, *rest: made(group, (width or 98) + 1, *rest)
    )


def later_tokens_are_seen(patch: pytest.MonkeyPatch) -> None:
    made = packing_module._band
    patch.setattr(
        packing_module, "_band", lambda group, width, _, device: made(group, width, False, device)
    )


def positions_stay_behind(patch: pytest.MonkeyPatch) -> None:
    def hidden_states_alone(self: Packing, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.layers[0]:
            return args, kwargs
        if args:
            return (self._gather(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gather(kwargs["hidden_states"])}

    patch.setattr(Packing, "_pack", hidden_states_alone)


@pytest.mark.parametrize(
    ("break_it", "models"),
    [
        (padding_is_seen, ["bert-mlm", "roberta-mlm", "modernbert-mlm"]),
        (neighbours_see_each_other, ["bert-base", "electra-classify", "llama-classify"]),
        (rows_are_returned_in_another_order, ["bert-ner", "gpt2-base"]),
        (window_is_ignored, ["modernbert-mlm", "mistral-classify"]),
        (window_is_one_wider, ["modernbert-mlm", "mistral-classify"]),
        (later_tokens_are_seen, ["gpt2-base", "llama-classify"]),
        (positions_stay_behind, ["llama-classify", "modernbert-mlm"]),
    ],
)
def test_broken_packing_is_refused(
    break_it: Callable[[pytest.MonkeyPatch], None], models: Sequence[str]
) -> None:
    for name in models:
        tokenizer, model = load(name).pipe.tokenizer, fresh_model(name)
        check_packing(Packing(model), tokenizer, limit=64)
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch)
            with pytest.raises((CannotRun, RuntimeError)):
                check_packing(Packing(model), tokenizer, limit=64)


def test_a_failed_check_leaves_the_model_as_it_was() -> None:
    model, tokenizer = fresh_model("bert-base"), load("bert-base").pipe.tokenizer
    rows = random_rows(model, tokenizer, [9], left=False)
    before = own_outputs(model, rows)[0]
    with pytest.MonkeyPatch.context() as patch:
        neighbours_see_each_other(patch)
        with pytest.raises(CannotRun):
            check_packing(Packing(model), tokenizer, limit=64)
    assert off(own_outputs(model, rows)[0], before) == 0


@pytest.mark.parametrize("name", ["bert-base", "bert-classify", "modernbert-mlm", "llama-classify"])
def test_bfloat16_is_accepted_and_near_float32(name: str) -> None:
    run = runner(tiny.TASKS[name], name, dtype="bfloat16")
    assert run.info.batching == "packed", run.info.why
    assert run.packing is not None
    half, full = fresh_model(name, torch.bfloat16), fresh_model(name)
    rows = random_rows(full, run.pipe.tokenizer, [3, 40, 17, 16], left=False)
    rounding = max(map(off, own_outputs(half, rows), own_outputs(full, rows)))
    for got, expected in zip(
        packed_outputs(run.packing, rows), own_outputs(full, rows), strict=True
    ):
        assert off(got, expected) < 2 * rounding + TOLERANCE[torch.bfloat16]
