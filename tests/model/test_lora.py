"""LoRA adapters: as the merged model, alone and beside others in a step."""

from collections import abc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_adapters, tiny_decoders
from tests.generating import (
    Request,
    Served,
    engine,
    generate,
    greedy,
    prompts,
    request,
    runner_of,
    serve,
)
from tests.matrix import matrix
from worker.backends import lora
from worker.backends.cached_runner import CachedRunner
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import cached_engine
from worker.messages.adapters import Adapter, InvalidAdapter
from worker.model.language_model import GeneratorOptions, load_language_model

TOKENS = 12
LENGTHS = (3, 20, 41)


def with_adapter(item: Request, adapter: Adapter | None) -> Request:
    item.payload = replace(item.payload, adapter=adapter)
    return item


def load(generator: GenerationEngine, folder: Path, name: str = "adapter") -> Adapter:
    adapter = Adapter(name, folder.name, str(folder.parent))
    generator.load_adapter(adapter)
    return adapter


def expected(model: Any, rows: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    return [generate(model, [row], TOKENS)[0] for row in rows]


def outputs(served: abc.Sequence[Served]) -> list[list[int]]:
    assert all(one.choices for one in served)
    return [one.ids[0] for one in served]


ATTENTION = ("q_proj", "qkv_proj", "o_proj", "down_proj", "c_attn", "query_key_value")
ALL = ("",)
OF_HYBRIDS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.out_proj",
    "mlp.up_proj", "mlp.down_proj", "feed_forward.w1", "feed_forward.down_proj",
)  # fmt: skip
# The layers that each of two adapters changes.
FAMILIES = {
    **dict.fromkeys(("llama", "gpt2", "qwen2-moe", "qwen3", "gpt-neox", "phi3"), (ATTENTION, ALL)),
    **dict.fromkeys(
        ("qwen3.5", "qwen3-next", "lfm2", "bamba", "olmo-hybrid"), (OF_HYBRIDS, OF_HYBRIDS)
    ),
}


@pytest.mark.parametrize("name", matrix(FAMILIES, "llama", "gpt2", "qwen2-moe", "qwen3.5"))
def test_rows_with_adapters_are_as_of_the_merged_models(name: str, tmp_path: Path) -> None:
    base, (first, second) = tiny_decoders.folder(name), FAMILIES[name]
    folders = [
        tiny_adapters.make(tmp_path / "a", base, 1, first, use_rslora=True),
        tiny_adapters.make(tmp_path / "b", base, 2, second, r=5),
    ]
    generator = engine(name)
    adapters = [None, *(load(generator, folder) for folder in folders)]
    models = [tiny_adapters.merged(base, folder) for folder in folders]
    rows = prompts(3, LENGTHS, 1)
    wanted = [greedy(name, rows, TOKENS), *(expected(model, rows) for model in models)]
    assert wanted[0] != wanted[1] != wanted[2]
    for adapter, results in zip(adapters, wanted, strict=True):  # one at a time
        items = [with_adapter(request(row, max_tokens=TOKENS), adapter) for row in rows]
        for item, result in zip(items, results, strict=True):
            assert outputs(serve(generator, [item])[0]) == [result]
    mixed = [(row, n) for row in range(len(rows)) for n in range(3)]
    items = [with_adapter(request(rows[row], max_tokens=TOKENS), adapters[n]) for row, n in mixed]
    served, driver = serve(generator, items, seed=4)
    assert outputs(served) == [wanted[n][row] for row, n in mixed]
    # prefixes of the first part, each of its own adapter; states are cached at ends of prompts
    assert driver.total("cached_tokens") or runner_of(generator).language.recurrent


def test_adapters_of_recurrent_layers_are_refused(tmp_path: Path) -> None:
    folder = tiny_adapters.make(tmp_path / "a", tiny_decoders.folder("qwen3.5"), 1)
    with pytest.raises(InvalidAdapter, match=r"linear_attn.*recurrent layers cannot"):
        load(engine("qwen3.5"), folder)


def test_another_file_under_a_name_finds_no_prefixes_of_the_first(tmp_path: Path) -> None:
    base = tiny_decoders.folder("llama")
    generator = engine("llama")
    [row] = prompts(6, (40,), 1)
    for seed in (1, 2):
        folder = tiny_adapters.make(tmp_path / "a", base, seed)
        adapter = load(generator, folder)
        wanted = expected(tiny_adapters.merged(base, folder), [row])
        for turn in range(2):
            item = with_adapter(request(row, max_tokens=TOKENS), adapter)
            served, driver = serve(generator, [item])
            assert outputs(served) == wanted
            assert (driver.total("cached_tokens") > 0) == (turn > 0)


def test_rows_of_a_compiled_base_run_apart_from_those_with_adapters(tmp_path: Path) -> None:
    base = tiny_decoders.folder("llama")
    folder = tiny_adapters.make(tmp_path / "a", base, 1)
    generator = engine("llama")
    runner, adapter = runner_of(generator), load(generator, folder)
    widths: dict[str, list[int]] = {"compiled": [], "eager": []}
    model: Any = runner.language.model

    def compiled(**inputs: Any) -> Any:
        widths["compiled"].append(inputs["input_ids"].shape[1])
        return model(**inputs)

    runner.model, runner.compile_state = compiled, "done"
    hook = model.register_forward_pre_hook(
        lambda _, args, inputs: widths["eager"].append(inputs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    rows = prompts(7, (9, 12), 1)
    try:
        items = [
            with_adapter(request(row, max_tokens=3), one) for row in rows for one in (None, adapter)
        ]
        served, _ = serve(generator, items)
    finally:
        hook.remove()
    assert widths == {"compiled": [21, 2, 2], "eager": [21, 21, 2, 2, 2, 2]}  # both, in turn
    changed = expected(tiny_adapters.merged(base, folder), rows)
    plain = greedy("llama", rows, TOKENS)
    wanted = [one[:3] for pair in zip(plain, changed, strict=True) for one in pair]
    assert outputs(served) == wanted


def test_layers_that_do_not_see_all_rows_are_refused(tmp_path: Path) -> None:
    generator = engine("qwen2-moe")
    layers = {"lm_head": (32, 300), "model.layers.0.mlp.gate": (32, 4), "model.missing": (2, 2)}
    for name, size in layers.items():
        folder = tiny_adapters.write(tmp_path / name, tiny_adapters.tensors_for({name: size}, 1))
        with pytest.raises(InvalidAdapter, match=f"target_modules: {name}"):
            load(generator, folder)


def test_a_model_on_its_own_cache_takes_no_adapters(tmp_path: Path) -> None:
    language = load_language_model(
        GeneratorOptions(str(tiny_decoders.folder("llama")), device="cpu", dtype="float32")
    )
    generator = cached_engine(CachedRunner(language, 64), GeneratorOptions(""), "a reason")
    folder = tiny_adapters.make(tmp_path / "a", tiny_decoders.folder("llama"), 1)
    with pytest.raises(InvalidAdapter, match="takes no adapters: a reason"):
        load(generator, folder)


@pytest.mark.usefixtures("native")
def test_a_native_operation_that_leaves_out_a_row_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lora.native_matches(torch.float32)
    add = torch.ops.onequeue.add_lora

    def without_last_row(x: Any, out: Any, down: Any, up: Any, rows: Any) -> None:
        add(x, out, down, up, [*rows[:-1], rows[-1] - 1])

    monkeypatch.setattr(torch.ops.onequeue, "add_lora", without_last_row)
    assert not lora.native_matches(torch.float32)
