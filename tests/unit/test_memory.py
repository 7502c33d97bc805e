"""The memory check before loading, and the KV cache's reservation of memory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker.device.device import free_bytes
from worker.model import loading
from worker.model.attention.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")


def checkpoint(folder: Path) -> str:
    """Write 1,600 numbers in bfloat16, the largest tensor of 1,000, twice under two names."""
    tensors = {"embedding": torch.zeros(10, 100), "layer": torch.zeros(600)}
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    save_file(halves, folder / "consolidated.safetensors")
    return str(folder)


@pytest.mark.parametrize(("dtype", "needed"), [("auto", 5200), ("float32", 10400)])
def test_a_checkpoint_needs_its_weights_and_the_largest_twice(
    dtype: str, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed)
    loading.check_fits(checkpoint(tmp_path), dtype, CPU)
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed - 1)
    with pytest.raises(loading.LoadingFailed, match="its weights need"):
        loading.check_fits(checkpoint(tmp_path), dtype, CPU)


@pytest.mark.parametrize("kind", ["whole", "shards", "old"])
def test_files_that_are_not_loaded_are_not_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of another dtype beside a checkpoint, or files of its training."""
    folder = Path(checkpoint(tmp_path))
    whole, needed = folder / "model.safetensors", 5200
    shutil.copy(whole, folder / "model.fp32-00001-of-00002.safetensors")
    for name in ("optimizer.bin", "pytorch_model.bin"):
        (folder / name).write_bytes(bytes(1000))
    if kind == "shards":
        whole.rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(("a", "b"), "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "old":
        whole.unlink()
        needed = 2000
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed)
    loading.check_fits(str(folder), "auto", CPU)
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed - 1)
    with pytest.raises(loading.LoadingFailed):
        loading.check_fits(str(folder), "auto", CPU)


def test_an_unknown_amount_of_memory_is_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.device._lines", lambda path: [])
    assert free_bytes(CPU) > 1 << 60


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_a_cache_uses_no_memory_before_its_first_write() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    cache = KVCache([LayerShape(8, 64, 64)], 8192, torch.float32, CPU)  # half a gigabyte
    assert resident() - before < 50e6
    cache.keys[0][:1024] = 1
    assert resident() - before > 30e6
