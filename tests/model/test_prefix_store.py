"""Prefixes on disk: a prompt continues from what another engine has computed, with the same bits,
and from nothing that would have had others."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.scheduler import ContinuousScheduler
from tests import multimodal, tiny_adapters, tiny_decoders
from tests.generating import ORDINARY, Driver, Request, Served, engine, loaded, request, runner_of
from tests.matrix import matrix
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import paged_engine, record_weights
from worker.engines.generation.stored_engine import StoredEngine
from worker.messages.adapters import Adapter
from worker.messages.protocol import NoOtherModels
from worker.model import fingerprint
from worker.model.language_model import GeneratorOptions
from worker.segment_store import SegmentStore

MODELS = ("llama", "qwen3.5", "deepseek-v3", "gemma3", "granite4", "lfm2")
PROMPT = [ORDINARY[n * n % 290] for n in range(160)]
READ = 176  # tokens of full blocks of a turn
NEXT = [ORDINARY[n * 7 % 290] for n in range(30)]


class Woken(NoOtherModels):
    """Lets a test wait for the end of a read as the worker's thread does."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wake(self) -> None:
        self.event.set()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., StoredEngine]:
    """Return a function that makes an engine, as after a restart; the engines share a folder."""

    def make(model: str, blocks: int = 400) -> StoredEngine:
        generator = multimodal.engine(model) if "-vl" in model else engine(model, blocks)
        runner, preprocessor = runner_of(generator), generator.input_processor.media_preprocessor
        record_weights(runner.language)
        options = GeneratorOptions("", kv_cache_dir=str(tmp_path / "kv"))
        generator = paged_engine(runner, options, preprocessor)
        runner.language.digest = b""  # other tests share it
        assert isinstance(generator, StoredEngine)
        generator.others = Woken()
        return generator

    return make


def turn(generator: GenerationEngine, item: Request) -> tuple[Served, Driver]:
    driver = Driver(generator)
    served = driver.add(item)
    driver.finish()
    return served, driver


def first_turn(generator: StoredEngine, **changes: Any) -> list[int]:
    """Run a turn and end the engine; return the next turn's prompt."""
    served, _ = turn(generator, changed(request(PROMPT, max_tokens=20), **changes))
    generator.flush()
    return [*PROMPT, *served.ids[0], *NEXT]


def changed(item: Request, **changes: Any) -> Request:
    item.payload = replace(item.payload, **changes)
    return item


@pytest.mark.parametrize("model", matrix(MODELS, "llama", "qwen3.5", "deepseek-v3"))
def test_the_second_turn_after_a_restart_reads_the_first(
    model: str, stored: Callable[..., StoredEngine]
) -> None:
    prompt = first_turn(stored(model))
    expected, computed = turn(engine(model), request(prompt, max_tokens=20))
    served, driver = turn(stored(model), request(prompt, max_tokens=20))
    assert served.ids == expected.ids
    assert driver.total("read_tokens") >= READ
    assert driver.total("prefill_tokens") == len(prompt) - driver.total("cached_tokens")
    assert computed.total("prefill_tokens") == len(prompt)
    assert served.item.read_s > 0
    assert driver.total("read_bytes") > 0


def test_the_third_turn_writes_what_is_new(stored: Callable[..., StoredEngine]) -> None:
    prompt = first_turn(stored("qwen3.5"))
    generator = stored("qwen3.5")
    served, _ = turn(generator, request(prompt, max_tokens=20))
    generator.flush()
    third = [*prompt, *served.ids[0], *NEXT[:8]]
    expected, _ = turn(engine("qwen3.5"), request(third))
    again, driver = turn(stored("qwen3.5"), request(third))
    assert again.ids == expected.ids
    assert driver.total("read_tokens") >= len(prompt) // 16 * 16


@pytest.mark.parametrize("model", matrix(("qwen2-vl", "qwen3.5-vl"), "qwen3.5-vl"))
def test_a_prefix_with_an_image_is_read_for_this_image_alone(
    model: str, stored: Callable[..., StoredEngine]
) -> None:
    parts = "What are these, and for what? ", multimodal.png(0), " Tell me, please, all of it!"
    expected, _ = turn(stored(model), multimodal.request(*parts))
    generator = stored(model)
    turn(generator, multimodal.request(*parts))
    generator.flush()
    served, driver = turn(stored(model), multimodal.request(*parts))
    assert served.ids == expected.ids
    read = driver.total("read_tokens")
    assert read >= 48
    _, driver = turn(stored(model), multimodal.request(parts[0], multimodal.png(1), parts[2]))
    assert driver.total("read_tokens") < read


def test_another_decoder_of_media_reads_nothing(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = "What are these, and for what? ", multimodal.png(0), " Tell me, please, all of it!"
    generator = stored("qwen2-vl")
    turn(generator, multimodal.request(*parts))
    generator.flush()
    versions = [(name, version + ".1") for name, version in fingerprint.media_versions()]
    assert "pillow" in dict(versions)
    monkeypatch.setattr(fingerprint, "media_versions", lambda: versions)
    _, driver = turn(stored("qwen2-vl"), multimodal.request(*parts))
    assert driver.total("read_tokens") == 0


@pytest.mark.parametrize("file", ["batching/sequence.py", "worker/media/images.py"])
def test_all_code_that_numbers_depend_on_is_in_the_digest(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "worker/model/fingerprint.py"))
    digest = fingerprint.code_digest.__wrapped__
    before, path = digest(), tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("x = 1")
    assert digest() != before


def test_another_namespace_reads_nothing(stored: Callable[..., StoredEngine]) -> None:
    prompt = first_turn(stored("llama"), cache_namespace=b"alice")
    for namespace, expected in ((b"bob", 0), (b"", 0), (b"alice", READ)):
        item = changed(request(prompt), cache_namespace=namespace)
        assert turn(stored("llama"), item)[1].total("read_tokens") == expected


def test_other_weights_read_nothing(stored: Callable[..., StoredEngine]) -> None:
    prompt = first_turn(stored("llama"))
    model = loaded("llama").runner.language.model
    bias = next(iter(model.parameters())).data.view(-1)[-1:]
    bias += 1e-3
    try:
        assert turn(stored("llama"), request(prompt))[1].total("read_tokens") == 0
    finally:
        bias -= 1e-3


def test_another_form_reads_nothing(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    generator.prefixes.form_digests[""] = b"another compilation"
    assert turn(generator, request(prompt))[1].total("read_tokens") == 0
    generator = stored("llama")
    generator.prefixes.form_digests.clear()  # not known yet
    assert turn(generator, request(prompt))[1].total("read_tokens") == 0


def test_an_adapter_reads_its_own_keys(tmp_path: Path, stored: Callable[..., StoredEngine]) -> None:
    base = tiny_decoders.folder("llama")
    folders = [tiny_adapters.make(tmp_path / str(seed), base, seed) for seed in (1, 2)]

    def adapted(number: int) -> tuple[StoredEngine, Adapter]:
        generator = stored("llama")
        adapter = Adapter("name", folders[number].name, str(tmp_path))
        generator.load_adapter(adapter)
        return generator, adapter

    generator, adapter = adapted(0)
    prompt = first_turn(generator, adapter=adapter)
    for number, expected in ((0, READ), (1, 0)):
        generator, adapter = adapted(number)
        item = changed(request(prompt), adapter=adapter)
        assert turn(generator, item)[1].total("read_tokens") == expected
    assert turn(stored("llama"), request(prompt))[1].total("read_tokens") == 0
    generator.prefixes._adapters.clear()
    with pytest.raises(KeyError):  # not the key of the model's own weights
        generator.prefixes.key_of(b"", "", adapter.weights)


@pytest.mark.parametrize("model", ["llama", "qwen3.5"])
def test_damaged_segments_are_computed(
    model: str, tmp_path: Path, stored: Callable[..., StoredEngine]
) -> None:
    prompt = first_turn(stored(model))
    expected, _ = turn(engine(model), request(prompt))
    for file in (tmp_path / "kv").glob("*.segment"):
        content = bytearray(file.read_bytes())
        for place in range(4096, len(content), 4096):  # where records begin
            content[place] ^= 1
        file.write_bytes(content)
    served, driver = turn(stored(model), request(prompt))
    assert served.ids == expected.ids
    assert driver.total("read_tokens") == 0
    assert driver.total("prefill_tokens") > len(NEXT)


class Gate:
    """Holds the reads of a store until it is opened. `counts`: of the records of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.counts: list[int] = []
        read = SegmentStore.read

        def gated(store: SegmentStore, keys: list[bytes]) -> Iterator[memoryview]:
            self.counts.append(len(keys))
            for data in read(store, keys):
                self.reached.set()
                assert self.opened.wait(60)
                yield data

        monkeypatch.setattr(SegmentStore, "read", gated)


def test_others_run_while_a_prefix_is_read(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    expected, _ = turn(engine("llama"), request(prompt))
    gate, driver = Gate(monkeypatch), Driver(stored("llama"))
    waiting = driver.add(request(prompt))
    other = driver.add(request(NEXT, max_tokens=8))
    while not other.done:
        driver.step()
    assert gate.reached.wait(60)
    assert not waiting.deltas
    driver.generator.step()
    assert driver.generator.step() is None  # nothing to do
    assert driver.generator.due_at(1.0) is None
    gate.opened.set()
    driver.finish()
    assert waiting.ids == expected.ids
    assert driver.total("read_tokens") == READ


def test_nothing_is_to_be_done_while_a_prefix_with_an_image_is_read(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = "What are these, and for what? ", multimodal.png(0), " Tell me, please, all of it!"
    generator = stored("qwen3.5-vl")
    turn(generator, multimodal.request(*parts))
    generator.flush()
    gate, generator = Gate(monkeypatch), stored("qwen3.5-vl")
    driver = Driver(generator)
    driver.add(multimodal.request(*parts))
    while not generator.prefixes.is_reading:  # the image is encoded first
        driver.step()
    assert generator.step() is None
    assert generator.due_at(1.0) is None
    gate.opened.set()
    driver.finish()
    assert driver.total("read_tokens") >= 48


def test_a_read_takes_no_blocks_that_a_running_sequence_will_need(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    gate, driver = Gate(monkeypatch), Driver(stored("llama", blocks=24))
    running = driver.add(request(PROMPT[::-1], max_tokens=60))
    driver.step()
    driver.add(request(prompt))
    while not running.done:
        assert not driver.step().preempted
    gate.opened.set()
    driver.finish()
    assert driver.total("read_tokens") == READ


def test_the_shortest_prefix_is_read_next(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = stored("llama")
    lengths = 100, 160, 80
    prompts = [[token, *PROMPT[: length - 1]] for token, length in zip(NEXT, lengths, strict=False)]
    for prompt in prompts:
        turn(generator, request(prompt))
    generator.flush()
    gate, driver = Gate(monkeypatch), Driver(stored("llama"))
    for prompt in prompts:
        driver.add(request(prompt))
        driver.step()
        assert gate.reached.wait(60)
    gate.opened.set()
    driver.finish()
    assert gate.counts == [6, 4, 9]  # the first one had begun


def test_reads_are_tried_again_after_a_slow_one(stored: Callable[..., StoredEngine]) -> None:
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    generator.times.learn(512, 0, 1.0)
    prefixes = generator.prefixes
    speed = prefixes._block_bytes / 16 / generator.times.token_s  # of computing
    prefixes._bytes_per_s = 0.9 * speed
    _, driver = turn(generator, request(prompt))
    assert driver.total("read_tokens") == 0
    while prefixes._bytes_per_s < speed:
        generator.scheduler.pool.drop_cached()
        assert turn(generator, request(prompt))[1].total("read_tokens") == 0
    generator.scheduler.pool.drop_cached()
    assert turn(generator, request(prompt))[1].total("read_tokens") >= READ


def test_a_client_may_leave_while_its_prefix_is_read(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("qwen3.5"))
    gate, driver = Gate(monkeypatch), Driver(stored("qwen3.5"))
    waiting = driver.add(request(prompt))
    driver.step()
    assert gate.reached.wait(60)
    waiting.item.open = False
    gate.opened.set()
    driver.finish()
    again = driver.add(request(prompt))
    driver.finish()
    assert again.sequences[0].cached == READ  # what was read is in memory


def test_blocks_are_left_alone_after_the_pool_is_replaced(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    gate, generator = Gate(monkeypatch), stored("llama")
    driver = Driver(generator)
    driver.add(request(prompt))
    driver.step()
    assert gate.reached.wait(60)
    generator.clear()  # as after an error that belongs to no item
    before = [keys.clone() for keys in runner_of(generator).cache.keys]
    gate.opened.set()
    generator.prefixes.close()
    for keys, old in zip(runner_of(generator).cache.keys, before, strict=True):
        assert keys.isnan().equal(old.isnan())


def test_a_full_pool_computes_and_serves(stored: Callable[..., StoredEngine]) -> None:
    prompt = first_turn(stored("llama"))
    expected, _ = turn(engine("llama"), request(prompt))
    generator = stored("llama", blocks=20)
    driver = Driver(generator)
    served = [driver.add(request(tokens)) for tokens in (PROMPT[::-1], prompt)]
    driver.finish()
    assert served[1].ids == expected.ids
    assert isinstance(generator.scheduler, ContinuousScheduler)


def test_a_full_disk_is_no_failure(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentStore, "write", fail)
    prompt = first_turn(stored("llama"))
    monkeypatch.undo()
    served, driver = turn(stored("llama"), request(prompt))
    assert served.done
    assert driver.total("read_tokens") == 0


def test_blocks_that_were_reused_are_not_written(
    stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer copies late: the pool has given the blocks to another prompt by then."""
    generator = stored("qwen3.5", blocks=24)
    opened, submit = threading.Event(), generator.prefixes._writer.submit
    monkeypatch.setattr(
        generator.prefixes._writer, "submit", lambda run: submit(lambda: opened.wait(60) and run())
    )
    served, _ = turn(generator, request(PROMPT, max_tokens=20))
    turn(generator, request(PROMPT[::-1], max_tokens=20))
    opened.set()
    generator.flush()
    prompt = [*PROMPT, *served.ids[0], *NEXT]
    expected, _ = turn(engine("qwen3.5"), request(prompt))
    again, driver = turn(stored("qwen3.5"), request(prompt))
    assert again.ids == expected.ids
    assert driver.total("read_tokens") < 100


def test_prefixes_that_wait_to_be_written_share_a_segment(
    tmp_path: Path, stored: Callable[..., StoredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = stored("llama")
    monkeypatch.setattr(generator.prefixes._writer, "submit", lambda run: None)  # it is busy
    for rest in (NEXT, NEXT[::-1]):
        turn(generator, request([*PROMPT, *rest]))
    generator.prefixes._write()
    assert len([*(tmp_path / "kv").glob("*.segment")]) == 1
    blocks = (len(PROMPT) + 2 * (len(NEXT) + 11 + len(PROMPT) % 16)) // 16
    store = SegmentStore(tmp_path / "kv", 1 << 30)
    store.refresh()
    assert blocks - 1 <= len(store._index) <= blocks  # the shared ones once
    generator.flush()
    for rest in (NEXT, NEXT[::-1]):
        _, driver = turn(stored("llama"), request([*PROMPT, *rest]))
        assert driver.total("read_tokens") == (len(PROMPT) + len(rest) - 1) // 16 * 16
