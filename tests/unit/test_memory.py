"""The memory check before loading, and the KV cache's reservation of memory."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import save_file

from server import entries
from server.app import count_later_caches, served_models
from server.core.settings import Settings
from server.entries import model_entries
from tests.cgroups import process
from worker.device import device
from worker.device.device import cgroup_free_bytes, free_bytes, unreserved_bytes
from worker.engines.generation import loading as generation_loading
from worker.engines.speech.loading import ROWS_MEMORY_SHARE, max_rows
from worker.engines.speech.row_cache import row_bytes
from worker.model import loading, paging
from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape
from worker.model.language_model import GeneratorOptions, LanguageModel
from worker.model.paging import cache_blocks, cache_bytes
from worker.worker import trim_heap

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


@pytest.mark.parametrize("kind", ["whole", "shards"])
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
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed)
    loading.check_fits(str(folder), "auto", CPU)
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed - 1)
    with pytest.raises(loading.LoadingFailed):
        loading.check_fits(str(folder), "auto", CPU)


def test_an_unknown_amount_of_memory_is_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.device.lines_of", lambda path: [])
    assert free_bytes(CPU) > 1 << 60


# ── control groups ──

V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


def group(folder: Path, files: tuple[str, str, str], limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files[2]} {inactive}\n")


def test_the_limit_of_version_2_is_the_least_up_to_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup root"
    group(root / "system.slice", V2, "3000", used=2000, inactive=100)
    group(root / "system.slice/onequeue.service", V2, "max", used=500, inactive=0)
    group(root / "system.slice/other.service", V2, "10", used=0, inactive=0)
    of = process(
        tmp_path, ["0::/system.slice/onequeue.service"], [("/", root, "cgroup2 nsdelegate")]
    )
    assert cgroup_free_bytes(of) == 1100
    group(root / "system.slice/onequeue.service", V2, "900", used=500, inactive=10)
    assert cgroup_free_bytes(of) == 410
    (root / "system.slice/onequeue.service/memory.high").write_text("700\n")
    assert cgroup_free_bytes(of) == 210


def test_the_limit_of_version_1_is_that_of_its_controller(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    group(memory, V1, "9223372036854771712", used=90, inactive=0)
    group(memory / "pod", V1, "3000", used=2000, inactive=300)
    group(memory / "pod/one", V1, "9223372036854771712", used=100, inactive=0)
    group(cpu / "pod/one", V1, "5", used=0, inactive=0)
    mounts = [("/", cpu, "cgroup cpu,cpuacct"), ("/", memory, "cgroup memory")]
    of = process(tmp_path, ["4:cpu,cpuacct:/pod/one", "3:memory:/pod/one", "0::/"], mounts)
    assert cgroup_free_bytes(of) == 1300


def test_of_both_versions_the_least_limit_counts(tmp_path: Path) -> None:
    """A hybrid system: the memory controller is version 1's, or version 2's."""
    v1, v2 = tmp_path / "memory", tmp_path / "unified"
    mounts = [("/", v1, "cgroup memory"), ("/", v2, "cgroup2 rw")]
    of = process(tmp_path, ["3:memory:/a", "1:name=systemd:/a", "0::/b"], mounts)
    assert cgroup_free_bytes(of) == sys.maxsize
    group(v2 / "b", V2, "800", used=100, inactive=0)
    assert cgroup_free_bytes(of) == 700
    group(v1 / "a", V1, "600", used=100, inactive=0)
    assert cgroup_free_bytes(of) == 500


@pytest.mark.parametrize("root", ["/docker/0123", "/", "/elsewhere"])
def test_a_container_reads_its_own_mount(root: str, tmp_path: Path) -> None:
    """The path is the host's; the mount shows the container's group, or the whole tree of it."""
    mount = tmp_path / "memory"
    group(mount, V1, "5000", used=1000, inactive=0)
    if root == "/docker/0123":
        group(mount / "inner", V1, "2000", used=500, inactive=0)
    of = process(tmp_path, ["3:memory:/docker/0123/inner"], [(root, mount, "cgroup memory")])
    assert cgroup_free_bytes(of) == (1500 if root == "/docker/0123" else 4000)


def test_paths_in_another_encoding_are_read(tmp_path: Path) -> None:
    name = b"caf\xe9".decode(errors="surrogateescape")
    group(tmp_path / name, V2, "800", used=100, inactive=0)
    of = process(tmp_path, [], [("/", tmp_path, "cgroup2 rw")])
    (of / "cgroup").write_bytes(b"0::/caf\xe9\n")
    assert cgroup_free_bytes(of) == 700


@pytest.mark.skipif(trim_heap is None, reason="glibc alone returns memory on request")
def test_a_cache_uses_no_memory_before_its_first_write() -> None:
    assert trim_heap
    trim_heap(0)  # or the cache is in memory that an earlier test has freed
    cache = KVCache([LayerShape(8, 64, 64)], 8192, torch.float32, CPU)  # half a gigabyte
    keys = cache.keys[0]

    def resident() -> int:
        """The bytes of `keys` in memory: pagemap has 8 bytes for each page, with a bit for pages
        that are there, and one for those that the kernel moves."""
        first, pages = keys.data_ptr() // 4096, keys.nbytes // 4096
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(8 * first)
            flags: bytes = pagemap.read(8 * pages)[7::8]
            return 4096 * sum(flag >= 0x40 for flag in flags)

    huge_page = 2 << 20  # the allocator's headers at both ends may each be in one
    assert resident() <= 2 * huge_page
    keys[:1024] = 1
    assert keys[:1024].nbytes <= resident() + 4096 < 50e6


def language_on_cpu() -> LanguageModel:
    layers = [LayerShape(8, 64, 64)]
    language: Any = SimpleNamespace(layers=layers, dtype=torch.float32, device=CPU)
    return language  # type: ignore[no-any-return]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_engines_share_the_free_memory(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory includes what a cache has reserved and not touched."""
    monkeypatch.setattr(device, "_reservations", WeakKeyDictionary())
    monkeypatch.setattr(device, "free_bytes", lambda _: 64 << 20)
    language, caches = language_on_cpu(), list[KVCache]()
    for later in reversed(range(engines)):
        blocks = cache_blocks(language, cache_bytes(language, None, later), 1 << 30)
        caches.append(KVCache(language.layers, blocks, language.dtype, CPU))
    sizes = [sum(tensor.nbytes for tensor in (*c.keys, *c.values)) for c in caches]
    expected = (64 << 20) / (engines + 1)
    assert sizes == pytest.approx([expected] * engines, rel=0.02)
    assert max_rows(whisper()) == ROWS_MEMORY_SHARE * expected // row_bytes(whisper())
    assert cache_blocks(language, cache_bytes(language, 0.05), 1 << 30) == 0.05e9 // (
        BLOCK * 8 * 128 * 4
    )
    caches.clear()
    assert unreserved_bytes(CPU) == 64 << 20


def test_a_cache_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "free_bytes", lambda _: 10**9)
    assert cache_bytes(language_on_cpu(), 1) == 1e9
    with pytest.raises(loading.LoadingFailed, match=r"KV_CACHE_GB=1\.5: 1\.0 GB are free"):
        cache_bytes(language_on_cpu(), 1.5)


def whisper() -> Any:
    config = SimpleNamespace(
        max_target_positions=40, max_source_positions=60, d_model=800, decoder_layers=4
    )
    return SimpleNamespace(config=config, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(("chat_model", "later_caches"), [("a", 1), ("none", 0)])
def test_a_language_model_at_the_root_leaves_memory_for_the_chat_model(
    chat_model: str, later_caches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, int]] = []

    def load(options: GeneratorOptions) -> SimpleNamespace:
        loaded.append((options.model, options.later_caches))
        raise LookupError

    monkeypatch.setattr(generation_loading, "load_generator", load)
    settings = replace(Settings(), chat_model=chat_model, pipeline_model="b")
    settings = replace(settings, embedding_model="none", pipeline_task="decision")
    monkeypatch.setattr(entries, "uses_language_model", lambda task, path: True)
    for model in served_models(settings, model_entries(settings, ()), {}):
        with pytest.raises(LookupError):
            model.load(lambda function: function())
        model.state = "ready"  # as if it was loaded
    assert loaded == [("b", later_caches), ("a", 0)][: 1 + later_caches]


def test_caches_leave_room_for_one_of_the_models_of_the_hub_cache() -> None:
    settings = Settings(chat_model="a,b", pipeline_model="none", models_from_cache=True)
    [first, second] = model_entries(settings, ())
    models = {model.name: model for model in served_models(settings, [first, second], {})}
    assert count_later_caches(models, first) == 2
    models[first.name].state = "ready"
    assert count_later_caches(models, second) == 1
