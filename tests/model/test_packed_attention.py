"""Packed batches give the model's own output; a packing that does not is refused at load."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests import tiny
from tests.parity import assert_same, item, runner, serve
from tests.threads import run_together
from tests.tiny_tokenizers import SENTENCES
from worker.backends.cuda import varlen
from worker.device.self_check import TOLERANCE, CannotRun
from worker.engines.embedding.single_pass import STATES, SinglePassModel
from worker.engines.pipeline import packed_attention as packing_module
from worker.engines.pipeline.loading import check_packing, random_rows
from worker.engines.pipeline.packed_attention import (
    AttentionConfig,
    Packing,
    PackingPlan,
    _enable_native_kernels,
    attend_by_flash,
    attend_natively,
    check_attention,
    plan_batch,
    similar_lengths,
)
from worker.engines.pipeline.runner import PipelineRunner, split_output

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
    "fnet-mlm": ("single", "outputs in a batch differ"),
    "gpt2-nopad-classify": ("single", "no padding token"),
    "gpt2-lm": ("single", ""),
}


def load(model: str) -> PipelineRunner:
    return runner(tiny.TASKS[model], model)


def fresh_model(model: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model again: the cached one is attached to a packing."""
    model_class: Any = type(load(model).pipe.model)
    loaded: PreTrainedModel = model_class.from_pretrained(tiny.folder(model), dtype=dtype)
    return loaded


def own_outputs(
    model: PreTrainedModel, rows: dict[str, Tensor], counts: Sequence[int]
) -> list[Any]:
    with torch.no_grad():
        return [
            model(**{name: value[row : row + 1, :n] for name, value in rows.items()})
            for row, n in enumerate(counts)
        ]


def packed_outputs(packing: Packing, rows: dict[str, Tensor], counts: Sequence[int]) -> list[Any]:
    with packing.batch(counts, max(counts)), torch.no_grad():
        output = packing.model(**rows)
    return split_output(output, len(counts), counts)


def relative_error(output: Any, expected: Any) -> float:
    """Return the largest difference of any score, relative to the largest score."""
    worst = 0.0
    for name in ("logits", "last_hidden_state", "pooler_output"):
        if (value := expected.get(name)) is not None:
            assert output[name].shape == value.shape
            difference = (output[name].float() - value.float()).abs().max() / value.abs().max()
            worst = max(worst, float(difference))
    return worst


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_equal_the_models_own_forward(name: str) -> None:
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
        rows = random_rows(model, run.pipe.tokenizer, lengths)
        for output, expected in zip(
            packed_outputs(run.packing, rows, lengths),
            own_outputs(model, rows, lengths),
            strict=True,
        ):
            assert relative_error(output, expected) < 1e-4


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_with_native_attention_equal_the_models_own_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = load(name).packing
    assert packing is not None
    load(name).warm_up()
    assert packing.attention_configs
    for config in packing.attention_configs:
        check_attention(attend_natively, config, torch.float32)
        check_attention(attend_natively, config, torch.bfloat16)
    monkeypatch.setattr(packing, "attend", attend_natively)
    monkeypatch.setattr(packing_module, "attend_in_groups", None)
    test_packed_rows_equal_the_models_own_forward(name)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("size", [8, 24, 64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [0, 1, 9, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_of_packed_rows_equals_torch(
    size: int, heads: tuple[int, int], window: int, causal: bool, dtype: torch.dtype
) -> None:
    config = AttentionConfig(*heads, size, size**-0.5, window, causal)
    check_attention(attend_natively, config, dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "wrong"), [(9, 8), (9, 10), (9, 0), (0, 9), (128, 127)])
def test_native_attention_with_a_wrong_window_is_refused(
    window: int, wrong: int, causal: bool
) -> None:
    def other(
        query: Tensor, key: Tensor, value: Tensor, plan: PackingPlan, config: AttentionConfig
    ) -> Tensor:
        return attend_natively(query, key, value, plan, replace(config, window=wrong))

    with pytest.raises(CannotRun, match="sums differ"):
        check_attention(other, AttentionConfig(4, 2, 8, 0.5, window, causal), torch.float32)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_gets_the_sequences_of_a_packed_row(
    heads: tuple[int, int], window: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    config = AttentionConfig(*heads, 8, 0.3, window, causal)
    check_attention(attend_by_flash, config, torch.float32)


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int,
    longest_key: int, *, scale: float, window_size: tuple[int, int], **_: Any,
) -> Tensor:  # fmt: skip
    """Stand in for torch's operator, which GPUs have."""
    assert bounds is key_bounds
    assert bounds.dtype == torch.int32
    assert longest == longest_key == int(bounds.diff().max())
    parts = []
    for start, end in pairwise(bounds.tolist()):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = window_size
        hidden = (distance > left if left >= 0 else distance < -longest) | (
            -distance > right if right >= 0 else distance < -longest
        )
        qs, ks, vs = (x[start:end].transpose(0, 1) for x in (q, k, v))
        groups = len(qs) // len(ks)
        scores = qs @ ks.repeat_interleave(groups, 0).mT * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append((weights @ vs.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(parts)


def test_few_texts_of_all_lengths_share_a_call_on_a_gpu() -> None:
    counts = [100, 3, 40, 4096]
    assert similar_lengths(counts, on_gpu=True) == [[1, 2, 0, 3]]
    assert similar_lengths([*counts, 41], on_gpu=True) == [[1, 2, 4, 0], [3]]
    assert similar_lengths([*counts, 41], on_gpu=False) == [[1], [2, 4], [0], [3]]


def enable_native_kernels(packing: Packing) -> None:
    run_together(partial(_enable_native_kernels, packing))


def test_torch_attention_serves_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("worker.backends.native_attention.load_native_ops", broken)
    caplog.set_level(logging.WARNING, "onequeue.packed_attention")
    packing = Packing(fresh_model("bert-mlm"))
    enable_native_kernels(packing)
    assert packing.attend is packing_module.attend_in_groups
    assert [record.message for record in caplog.records] == [
        "native attention disabled, using torch: no compiler here"
    ]


@pytest.mark.parametrize("name", sorted(NOT_PACKED))
def test_models_that_do_not_pack_report_why_and_give_correct_outputs(name: str) -> None:
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
        assert_same(answer, serve(run, [item(text, **parameters)])[0])


# ── errors that the check at load detects ──


Patch = Callable[[pytest.MonkeyPatch], None]


def regrouped(change: Callable[[Any], Any]) -> Patch:
    original = packing_module._group
    return lambda patch: patch.setattr(
        packing_module, "_group", lambda *args: change(original(*args))
    )


def masked(change: Callable[[int, bool], tuple[int, bool]]) -> Patch:
    """`change` maps the width of a window, and whether later tokens are hidden."""
    original = packing_module._band_mask
    return lambda patch: patch.setattr(
        packing_module,
        "_band_mask",
        lambda group, width, causal, device: original(group, *change(width, causal), device),
    )


def sequences_attend_to_each_other(patch: pytest.MonkeyPatch) -> None:
    def joined(lengths: Sequence[int], width: int, *rest: Any) -> Any:
        plan = plan_batch(lengths, width, *rest)
        one_row = plan_batch([sum(lengths)], sum(lengths), *rest)
        return replace(plan, groups=one_row.groups)

    patch.setattr(packing_module, "plan_batch", joined)


def positions_are_not_packed(patch: pytest.MonkeyPatch) -> None:
    def pack_hidden_states_only(self: Packing, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.layers[0]:
            return args, kwargs
        if args:
            return (self._gather(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gather(kwargs["hidden_states"])}

    patch.setattr(Packing, "_pack", pack_hidden_states_only)


FAULTS: dict[str, tuple[Patch, Sequence[str]]] = {
    "padding is attended": (
        regrouped(lambda group: replace(group, key_mask=None)),
        ["bert-mlm", "roberta-mlm", "modernbert-mlm"],
    ),
    "sequences attend to each other": (
        sequences_attend_to_each_other,
        ["bert-base", "electra-classify", "llama-classify"],
    ),
    "outputs are reordered": (
        regrouped(lambda group: replace(group, scatter_index=group.scatter_index.flip(0))),
        ["bert-ner", "gpt2-base"],
    ),
    "window is ignored": (
        masked(lambda width, causal: (0, causal)),
        ["modernbert-mlm", "mistral-classify"],
    ),
    "window is one wider": (
        masked(lambda width, causal: ((width or 98) + 1, causal)),
        ["modernbert-mlm", "mistral-classify"],
    ),
    "later tokens are attended": (
        masked(lambda width, causal: (width, False)),
        ["gpt2-base", "llama-classify"],
    ),
    "positions are not packed": (positions_are_not_packed, ["llama-classify", "modernbert-mlm"]),
}


@pytest.mark.parametrize(("break_it", "models"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_packing_is_refused(
    break_it: Patch, models: Sequence[str], dtype: torch.dtype
) -> None:
    for name in models:
        tokenizer, model = load(name).pipe.tokenizer, fresh_model(name, dtype)
        check_packing(Packing(model), tokenizer, limit=64)
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch)
            with pytest.raises((CannotRun, RuntimeError)):
                check_packing(Packing(model), tokenizer, limit=64)


def test_a_failed_check_leaves_the_model_unchanged() -> None:
    model, tokenizer = fresh_model("bert-base"), load("bert-base").pipe.tokenizer
    rows = random_rows(model, tokenizer, [9])
    before = own_outputs(model, rows, [9])[0]
    with pytest.MonkeyPatch.context() as patch:
        sequences_attend_to_each_other(patch)
        with pytest.raises(CannotRun):
            check_packing(Packing(model), tokenizer, limit=64)
    assert relative_error(own_outputs(model, rows, [9])[0], before) == 0


@pytest.mark.parametrize("name", ["bert-base", "bert-classify", "modernbert-mlm", "llama-classify"])
def test_packed_bfloat16_is_accepted_and_close_to_float32(name: str) -> None:
    run = runner(tiny.TASKS[name], name, dtype="bfloat16")
    assert run.info.batching == "packed", run.info.why
    assert run.packing is not None
    half, full = fresh_model(name, torch.bfloat16), fresh_model(name)
    counts = [3, 40, 17, 16]
    rows = random_rows(full, run.pipe.tokenizer, counts)
    own = own_outputs(full, rows, counts)
    rounding = max(map(relative_error, own_outputs(half, rows, counts), own))
    for output, expected in zip(packed_outputs(run.packing, rows, counts), own, strict=True):
        assert relative_error(output, expected) < 2 * rounding + TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_texts_that_attend_to_each_other_are_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load("bert-base").pipe.tokenizer
    right = SinglePassModel(fresh_model("bert-base", dtype), tokenizer, 64, STATES)
    assert right.batching == "packed"
    sequences_attend_to_each_other(monkeypatch)
    wrong = SinglePassModel(fresh_model("bert-base", dtype), tokenizer, 64, STATES)
    assert wrong.batching == "padded"
