"""LoRA adapters: as the merged model, alone and beside others in a step."""

from collections import abc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_adapters, tiny_decoders
from tests.generating import Request, Served, engine, generate, greedy, prompts, request, serve
from worker.generation.engine import GenerationEngine
from worker.messages.adapters import Adapter

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


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-moe"])
def test_rows_with_adapters_are_as_of_the_merged_models(name: str, tmp_path: Path) -> None:
    base = tiny_decoders.folder(name)
    endings = ("q_proj", "o_proj", "down_proj", "c_attn", "shared_expert.up_proj")
    folders = [
        tiny_adapters.make(tmp_path / "a", base, 1, endings, use_rslora=True),
        tiny_adapters.make(tmp_path / "b", base, 2, r=5),
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
    assert driver.total("cached_tokens") > 0  # prefixes of the first part, each of its own adapter
