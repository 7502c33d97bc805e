"""Adapters that are read and refused, without a model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_adapters
from worker.backends.adapter_file import LoraWeights, read_weights
from worker.messages.adapters import InvalidAdapter

LAYERS = {"model.layers.0.mlp.up_proj": (6, 10), "model.layers.0.self_attn.q_proj": (6, 6)}
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_"


def read(folder: Path, free_bytes: float = 1e9, dtype: torch.dtype = torch.float32) -> LoraWeights:
    return read_weights(folder, LAYERS, dtype, torch.device("cpu"), free_bytes)


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    return tiny_adapters.tensors_for(LAYERS, 1, rank)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 8}, (2, 2)),
        ({"lora_alpha": 8, "use_rslora": True}, (4, 4)),
        ({"lora_alpha": 8, "r": 16}, (2, 2)),  # the file's rank counts
        ({"alpha_pattern": {"up_proj": 12}}, (3, 2)),
        ({"alpha_pattern": {r".*\.0\.mlp\.[a-z_]+": 12, "q_proj": 4}}, (3, 1)),
        ({"alpha_pattern": {"proj": 12, "^up_proj": 12}}, (2, 2)),
        ({"rank_pattern": {"q_proj": 4}, "target_modules": ".*proj", "use_dora": False}, (2, 2)),
    ],
)
def test_scales_follow_the_configuration(
    tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]
) -> None:
    written = tensors()
    weights = read(tiny_adapters.write(tmp_path, written, **config))
    assert weights.pairs.keys() == LAYERS.keys()
    for (name, pair), scale in zip(sorted(weights.pairs.items()), scales, strict=True):
        prefix = f"base_model.model.{name}.lora_"
        torch.testing.assert_close(pair.down, written[f"{prefix}A.weight"])
        torch.testing.assert_close(pair.up, written[f"{prefix}B.weight"].T * scale)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 1]]),
        ("init_lora_weights", "pissa_niter_16"),
        ("a_field_of_a_later_version", {"x": 1}),
        ("r", 0),
        ("r", 1 << 30),
        ("r", "8"),
        ("lora_alpha", "8"),
        ("lora_alpha", float("nan")),
        pytest.param("lora_alpha", 10**4000, id="large alpha"),
        ("lora_alpha", -1e9),
        ("alpha_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "1"}),
        ("alpha_pattern", {"q_proj": 10**4000}),
        ("alpha_pattern", {"(": 1}),
        ("alpha_pattern", {"(" * 490 + ")" * 490: 1}),
        ("alpha_pattern", {"q" * 1001: 1}),
    ],
)
def test_fields_that_are_not_supported_are_named(tmp_path: Path, field: str, value: object) -> None:
    tiny_adapters.write(tmp_path, tensors(), **{field: value})
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # a library of another test may have raised it
    try:
        with pytest.raises(InvalidAdapter, match=field):
            read(tmp_path)
    finally:
        sys.setrecursionlimit(limit)


def changed(name: str, shape: tuple[int, ...], dtype: Any = torch.float32) -> dict[str, Any]:
    return tensors() | {name: torch.zeros(shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "no tensors"),
        (changed(UP + "A.weight", (4, 5)), "another base"),
        (changed(UP + "B.weight", (10, 3)), "another base"),
        (changed(UP + "A.weight", (0, 6)), "another base"),
        (changed(UP + "A.weight", (4,)), "a matrix"),
        (changed(UP + "A.weight", (4, 6), torch.int8), "a matrix"),
        (changed("base_model.model.lm_head.lora_A.weight", (4, 6)), "target_modules: lm_head"),
        (changed("base_model.model.model.embed_tokens.lora_embedding_A", (4, 6)), "not supported"),
        (changed("base_model.model.lm_head.weight", (4, 6)), "lm_head.weight is not supported"),
        (changed(UP + "magnitude_vector", (10,)), "not supported"),
        (changed(UP[len("base_model.model.") :] + "A.weight", (4, 6)), "two matrices"),
        ({UP + "A.weight": torch.zeros(4, 6)}, "another base"),
        (tensors(513), "r: must be 1 to 512"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, written: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        read(tiny_adapters.write(tmp_path, written))


def test_an_adapter_without_room_is_refused_before_it_is_read(tmp_path: Path) -> None:
    tiny_adapters.write(tmp_path, tensors())
    size = 4 * (4 * 6 + 10 * 4 + 4 * 6 + 6 * 4)
    assert read(tmp_path, size).nbytes == size
    with pytest.raises(InvalidAdapter, match="are free"):
        read(tmp_path, size - 1)
    assert read(tmp_path, size / 2, torch.bfloat16).nbytes == size / 2


WEIGHTS = (b"", b"x" * 50, b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}")
CONFIGS = (b"", b"[]", b"{", b'{"a": NaN', b"[" * 100_000, b'"' + b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("adapter_model.safetensors", content) for content in WEIGHTS),
        *(("adapter_config.json", content) for content in CONFIGS),
        ("adapter_config.json", json.dumps({"r": 1}).encode("utf-16")),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    tiny_adapters.write(tmp_path, tensors())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidAdapter, match=name.partition(".")[0]):
        read(tmp_path)
