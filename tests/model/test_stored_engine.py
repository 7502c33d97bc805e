"""Prefixes on disk: a prompt continues from what another engine has computed, with the same bits,
and from nothing that would have had others."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.scheduler import ContinuousScheduler
from tests import multimodal
from tests.generating import (
    ORDINARY,
    Driver,
    Request,
    Served,
    Woken,
    engine,
    loaded,
    request,
    runner_of,
)
from tests.matrix import matrix
from worker.engines.generation import stored_engine
from worker.engines.generation.engine import GenerationEngine
from worker.engines.generation.loading import paged_engine
from worker.engines.generation.stored_engine import Reading, StoredEngine
from worker.model import fingerprint
from worker.model.fingerprint import weights_digest
from worker.model.language_model import GeneratorOptions
from worker.segment_store import SegmentStore

MODELS = ("llama", "qwen3.5", "deepseek-v3", "gemma3", "granite4", "lfm2")
PROMPT = [ORDINARY[n * n % 290] for n in range(160)]
READ = 176  # tokens of full blocks of a turn
NEXT = [ORDINARY[n * 7 % 290] for n in range(30)]
PARTS = "What are these, and for what? ", multimodal.png(0), " Tell me, please, all of it!"

Stored = Callable[..., StoredEngine]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Return a function that makes an engine, as after a restart; the engines share a folder."""
    monkeypatch.setattr(stored_engine, "NICENESS", 0)  # other processes may take all cores

    def make(model: str, blocks: int = 400) -> StoredEngine:
        generator = multimodal.engine(model) if "-vl" in model else engine(model, blocks)
        runner, preprocessor = runner_of(generator), generator.input_processor.media_preprocessor
        runner.language.digest = weights_digest(runner.language.model.state_dict())
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
def test_the_second_turn_after_a_restart_reads_the_first(model: str, stored: Stored) -> None:
    prompt = first_turn(stored(model))
    expected, computed = turn(engine(model), request(prompt, max_tokens=20))
    served, driver = turn(stored(model), request(prompt, max_tokens=20))
    assert served.ids == expected.ids
    assert driver.total("read_tokens") >= READ
    assert driver.total("prefill_tokens") == len(prompt) - driver.total("cached_tokens")
    assert computed.total("prefill_tokens") == len(prompt)
    assert served.item.read_s > 0
    assert driver.total("read_bytes") > 0


def test_the_third_turn_writes_what_is_new(stored: Stored) -> None:
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
def test_a_prefix_with_an_image_is_read_for_this_image_alone(model: str, stored: Stored) -> None:
    expected, _ = turn(stored(model), multimodal.request(*PARTS))
    generator = stored(model)
    turn(generator, multimodal.request(*PARTS))
    generator.flush()
    served, driver = turn(stored(model), multimodal.request(*PARTS))
    assert served.ids == expected.ids
    read = driver.total("read_tokens")
    assert read >= 48
    _, driver = turn(stored(model), multimodal.request(PARTS[0], multimodal.png(1), PARTS[2]))
    assert driver.total("read_tokens") < read


def test_another_decoder_of_media_reads_nothing(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = stored("qwen2-vl")
    turn(generator, multimodal.request(*PARTS))
    generator.flush()
    versions = [(name, version + ".1") for name, version in fingerprint.versions()]
    assert "pillow" in dict(versions)
    monkeypatch.setattr(fingerprint, "versions", lambda: versions)
    _, driver = turn(stored("qwen2-vl"), multimodal.request(*PARTS))
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


def test_another_namespace_reads_nothing(stored: Stored) -> None:
    prompt = first_turn(stored("llama"), cache_namespace=b"alice")
    for namespace, expected in ((b"bob", 0), (b"", 0), (b"alice", READ)):
        item = changed(request(prompt), cache_namespace=namespace)
        assert turn(stored("llama"), item)[1].total("read_tokens") == expected


def test_other_weights_read_nothing(stored: Stored) -> None:
    prompt = first_turn(stored("llama"))
    model = loaded("llama").runner.language.model
    bias = next(iter(model.parameters())).data.view(-1)[-1:]
    bias += 1e-3
    try:
        assert turn(stored("llama"), request(prompt))[1].total("read_tokens") == 0
    finally:
        bias -= 1e-3


@pytest.mark.parametrize("forms", [{"": b"another compilation"}, {}], ids=["another", "unknown"])
def test_another_form_reads_nothing(forms: dict[Any, bytes], stored: Stored) -> None:
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    generator._forms = forms
    assert turn(generator, request(prompt))[1].total("read_tokens") == 0


@pytest.mark.parametrize("model", ["llama", "qwen3.5"])
def test_damaged_segments_are_computed(model: str, tmp_path: Path, stored: Stored) -> None:
    prompt = first_turn(stored(model))
    expected, _ = turn(engine(model), request(prompt))
    for file in (tmp_path / "kv").glob("*.segment"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    served, driver = turn(stored(model), request(prompt))
    assert served.ids == expected.ids
    assert driver.total("read_tokens") == 0
    assert driver.total("prefill_tokens") > len(NEXT)


class Gate:
    """Holds the reads of a store until it is opened. `counts`: of the blocks of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.counts: list[int] = []
        read, fill = SegmentStore.read, StoredEngine._fill

        def gated_fill(generator: StoredEngine, reading: Reading) -> None:
            self.counts.append(len(reading.contents) // 16)
            fill(generator, reading)

        def gated(store: SegmentStore, key: bytes, buffer: memoryview) -> bool:
            is_whole = read(store, key, buffer)
            self.reached.set()
            assert self.opened.wait(60)
            return is_whole

        monkeypatch.setattr(StoredEngine, "_fill", gated_fill)
        monkeypatch.setattr(SegmentStore, "read", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_others_run_while_a_prefix_is_read(stored: Stored, gate: Gate) -> None:
    prompt = first_turn(stored("llama"))
    expected, _ = turn(engine("llama"), request(prompt))
    driver = Driver(stored("llama"))
    waiting = driver.add(request(prompt))
    other = driver.add(request(NEXT, max_tokens=8))
    while not other.done:
        driver.step()
    assert gate.reached.wait(60)
    assert not waiting.deltas
    driver.generator.step()
    assert driver.generator.step() is None  # nothing to do
    assert (driver.generator.due_at(1.0) or 0.0) > time.monotonic()
    gate.opened.set()
    driver.finish()
    assert waiting.ids == expected.ids
    assert driver.total("read_tokens") == READ


def test_nothing_is_to_be_done_while_a_prefix_with_an_image_is_read(
    stored: Stored, gate: Gate
) -> None:
    generator = stored("qwen3.5-vl")
    turn(generator, multimodal.request(*PARTS))
    generator.flush()
    generator = stored("qwen3.5-vl")
    driver = Driver(generator)
    driver.add(multimodal.request(*PARTS))
    while not generator._readings:  # the image is encoded first
        driver.step()
    assert generator.step() is None
    assert (generator.due_at(1.0) or 0.0) > time.monotonic()
    gate.opened.set()
    driver.finish()
    assert driver.total("read_tokens") >= 48


def test_nothing_is_to_be_done_while_others_wait_for_the_blocks_of_a_read(
    stored: Stored, gate: Gate
) -> None:
    prompt = first_turn(stored("llama"))
    driver = Driver(stored("llama", blocks=20))
    driver.add(request(prompt))
    other = driver.add(request(PROMPT[::-1], max_tokens=8))
    driver.step()
    assert driver.generator.step() is None
    assert (driver.generator.due_at(1.0) or 0.0) > time.monotonic()
    late = driver.add(request(NEXT, max_tokens=8))
    assert driver.generator.due_at(1.0) == 1.0
    gate.opened.set()
    driver.finish()
    assert other.done
    assert late.done
    assert driver.total("read_tokens") == READ


def test_a_read_takes_no_blocks_that_a_running_sequence_will_need(
    stored: Stored, gate: Gate
) -> None:
    prompt = first_turn(stored("llama"))
    driver = Driver(stored("llama", blocks=24))
    running = driver.add(request(PROMPT[::-1], max_tokens=60))
    driver.step()
    driver.add(request(prompt))
    while not running.done:
        assert not driver.step().preempted
    gate.opened.set()
    driver.finish()
    assert driver.total("read_tokens") == READ


def test_the_shortest_prefix_is_read_next(stored: Stored, gate: Gate) -> None:
    generator = stored("llama")
    lengths = 100, 160, 80
    prompts = [[token, *PROMPT[: length - 1]] for token, length in zip(NEXT, lengths, strict=False)]
    prompts = [[*p, *turn(generator, request(p))[0].ids[0], *NEXT] for p in prompts]
    generator.flush()
    driver = Driver(stored("llama"))
    for prompt in prompts:
        driver.add(request(prompt))
        driver.step()
        assert gate.reached.wait(60)
    gate.opened.set()
    driver.finish()
    assert gate.counts == [6, 5, 10]  # the first one had begun


def test_reads_are_tried_again_after_a_slow_one(stored: Stored) -> None:
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    generator.times.learn(512, 0, 1.0)
    generator._read_token_s = 1.1 * generator.times.token_s
    _, driver = turn(generator, request(prompt))
    assert driver.total("read_tokens") == 0
    while generator._read_token_s > generator.times.token_s:
        generator.scheduler.pool.drop_cached()
        assert turn(generator, request(prompt))[1].total("read_tokens") == 0
    generator.scheduler.pool.drop_cached()
    assert turn(generator, request(prompt))[1].total("read_tokens") >= READ


def test_the_time_of_a_read_is_that_of_the_tokens_not_in_memory(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, now, read = first_turn(stored("llama")), [1.0], SegmentStore.read

    def take_a_second(store: SegmentStore, key: bytes, buffer: memoryview) -> bool:
        now[0] += 1.0
        return read(store, key, buffer)

    generator = stored("llama")
    turn(generator, request(PROMPT[:70]))
    monkeypatch.setattr(SegmentStore, "read", take_a_second)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    _, driver = turn(generator, request(prompt))
    assert driver.total("read_tokens") == READ - 64
    assert generator._read_token_s == 2 / (READ - 64)  # in two segments


def test_a_client_may_leave_while_its_prefix_is_read(stored: Stored, gate: Gate) -> None:
    prompt = first_turn(stored("qwen3.5"))
    driver = Driver(stored("qwen3.5"))
    waiting = driver.add(request(prompt))
    driver.step()
    assert gate.reached.wait(60)
    waiting.item.open = False
    gate.opened.set()
    driver.finish()
    again = driver.add(request(prompt))
    driver.finish()
    assert again.sequences[0].cached == READ  # the blocks that were read are in memory


def test_blocks_are_left_alone_after_the_pool_is_replaced(stored: Stored, gate: Gate) -> None:
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    driver = Driver(generator)
    driver.add(request(prompt))
    driver.step()
    assert gate.reached.wait(60)
    generator.clear()  # as after an error that belongs to no item
    before = [keys.clone() for keys in runner_of(generator).cache.keys]
    gate.opened.set()
    generator.flush()
    generator._reader.join(60)
    for keys, old in zip(runner_of(generator).cache.keys, before, strict=True):
        assert keys.isnan().equal(old.isnan())


def test_a_full_pool_computes_and_serves(stored: Stored) -> None:
    prompt = first_turn(stored("llama"))
    expected, _ = turn(engine("llama"), request(prompt))
    generator = stored("llama", blocks=20)
    driver = Driver(generator)
    served = [driver.add(request(tokens)) for tokens in (PROMPT[::-1], prompt)]
    driver.finish()
    assert served[1].ids == expected.ids
    assert isinstance(generator.scheduler, ContinuousScheduler)


def test_a_full_disk_is_no_failure(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    failed = threading.Event()
    monkeypatch.setattr(SegmentStore, "write", fail)
    prompt = first_turn(stored("llama"))
    generator = stored("llama")
    served, driver = turn(generator, request(prompt))
    assert served.done
    assert driver.total("read_tokens") == 0
    generator._writes.put(failed.set)  # after the write that fails
    assert failed.wait(60)
    monkeypatch.undo()  # there is room
    generator.flush()
    assert turn(stored("llama"), request([*prompt, *NEXT]))[1].total("read_tokens") >= READ


@pytest.mark.parametrize("limit", [2, 256])
def test_of_many_sequences_that_wait_to_be_written_the_last_are(
    limit: int, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_engine, "MAX_UNWRITTEN", limit)
    generator, prompts = stored("llama"), [[token, *PROMPT] for token in NEXT[:5]]
    write = generator._write
    monkeypatch.setattr(generator, "_write", lambda: None)  # the disk is slow
    for prompt in prompts:
        turn(generator, request(prompt))
    monkeypatch.setattr(generator, "_write", write)
    generator.flush()
    read = [
        turn(stored("llama"), request([*prompt, *NEXT]))[1].total("read_tokens") > 0
        for prompt in prompts
    ]
    assert read == [n >= len(prompts) - limit for n in range(len(prompts))]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_the_blocks_of_unfinished_requests_are_written_at_the_end(
    is_cancelled: bool, stored: Stored
) -> None:
    generator = stored("llama")
    driver = Driver(generator)
    unfinished = driver.add(request(PROMPT, max_tokens=60))
    driver.step()
    driver.step()
    if is_cancelled:
        unfinished.item.open = False
        driver.finish()
    generator.flush()
    assert turn(stored("llama"), request([*PROMPT, *NEXT]))[1].total("read_tokens") > 100


def test_a_prefix_is_computed_while_the_disk_hangs(
    stored: Stored, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    expected, _ = turn(engine("llama"), request(prompt))
    generator = stored("llama")
    monkeypatch.setattr(stored_engine, "READ_S", 0.0)
    driver = Driver(generator)
    for _ in range(2):  # no other read begins
        served = driver.add(request(prompt))
        if gate.counts:
            generator.scheduler.pool.drop_cached()
        driver.finish()
        assert served.ids == expected.ids
    assert driver.total("read_tokens") == 0
    assert len(gate.counts) == 1
    gate.opened.set()
    generator.flush()


def test_a_finished_read_counts_however_late_the_next_step_is(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(stored("llama"))
    generator, woken = stored("llama"), Woken()
    generator.others, driver = woken, Driver(generator)
    monkeypatch.setattr(stored_engine, "READ_S", 0.0)
    driver.add(request(prompt))
    driver.step()
    assert woken.event.wait(60)
    driver.finish()
    assert driver.total("read_tokens") == READ


def test_preparing_goes_on_while_the_disk_hangs(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, opened, hanging = stored("llama"), threading.Event(), threading.Semaphore(0)

    def hang(store: SegmentStore) -> None:
        hanging.release()
        assert opened.wait(60)

    monkeypatch.setattr(SegmentStore, "refresh", hang)
    monkeypatch.setattr(stored_engine, "REFRESH_S", 0.01)
    for _ in range(3):
        generator.prepare(request(PROMPT))
    assert hanging.acquire(timeout=60)
    assert not hanging.acquire(blocking=False)
    opened.set()


def test_blocks_that_were_reused_are_not_written(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer copies late: the pool has given the blocks to another prompt by then."""
    generator = stored("qwen3.5", blocks=24)
    opened, write = threading.Event(), generator._write
    monkeypatch.setattr(generator, "_write", lambda: opened.wait(60) and write())
    served, _ = turn(generator, request(PROMPT, max_tokens=20))
    turn(generator, request(PROMPT[::-1], max_tokens=20))
    opened.set()
    generator.flush()
    prompt = [*PROMPT, *served.ids[0], *NEXT]
    expected, _ = turn(engine("qwen3.5"), request(prompt))
    again, driver = turn(stored("qwen3.5"), request(prompt))
    assert again.ids == expected.ids
    assert driver.total("read_tokens") < 100
