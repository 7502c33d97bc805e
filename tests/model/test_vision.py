"""Images in chat, on tiny models of eight families: what `generate` makes of them, whatever else is
in a step, found in the cache or put back."""

import shutil
import threading
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any

import pytest
from torch._dynamo.utils import counters

from batching.block_pool import Content
from batching.sequence import MultimodalInputs
from tests import tiny_seeing
from tests.generating import Driver, Served, runner_of, serve
from tests.model.test_compiling import compile_state
from tests.seeing import (
    assert_generated,
    engine,
    in_small_chunks,
    loaded,
    png,
    request,
    scored,
    unpaged,
)
from worker.device.self_check import CannotRun
from worker.generation.engine import GenerationEngine
from worker.model.attention.kv_cache import BLOCK
from worker.model.cpu.linear import PackedLinear
from worker.model.decoder_hook import DecoderHook, Rows
from worker.vision import multimodal_prompt as prompts
from worker.vision.encoder import ENTRY_BYTES, VisionEncoder
from worker.vision.encoder_scheduler import EncoderScheduler
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import ImageFeatures, MultimodalItem, Processor
from worker.vision.self_check import check_multimodal

FAMILIES = [name for name in tiny_seeing.BUILDERS if name not in tiny_seeing.UNPAGED]
ONE, OTHER, TALL = png(0), png(1), png(2, 40, 72)
LONG = "Tell me all that you see in these two, and then some more of it: "


def viewing(generator: GenerationEngine) -> EncoderScheduler:
    assert generator._encoder_scheduler is not None
    return generator._encoder_scheduler


def scene_of(served: Served) -> MultimodalPrompt:
    multimodal = served.item.prepared[0].prepared.multimodal
    assert isinstance(multimodal, MultimodalPrompt)
    return multimodal


def in_common(one: Sequence[Content], other: Sequence[Content]) -> int:
    """How many they begin with."""
    return sum(takewhile(bool, map(eq, one, other)))


@pytest.mark.parametrize("model", FAMILIES)
def test_a_picture_alone_is_answered_as_generate_does(model: str) -> None:
    served, _ = serve(engine(model), [request("What is ", ONE, "here?")])
    assert_generated(model, served)


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("tokens", [None, 5])
def test_pictures_beside_text_and_in_chunks_change_nothing(model: str, tokens: int | None) -> None:
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    items = [
        request("No picture here, but a number of words."),
        request("What is ", ONE, "here?"),
        request(LONG, TALL, " and of ", ONE, "now", n=2),
        request("Nor here."),
        request(OTHER, "this?"),
    ]
    served, driver = serve(generator, items, seed=1)
    assert_generated(model, served)
    assert bool(driver.partial) == bool(tokens)


@pytest.mark.parametrize("model", FAMILIES)
def test_the_same_picture_is_found_and_another_in_its_place_is_not(model: str) -> None:
    generator = engine(model)
    question = "What are these, and what are they for? "
    known: list[Sequence[Content]] = []
    asked = ((ONE, ""), (OTHER, ""), (ONE, " And more?"), (OTHER, " And more?"), (ONE, ""))
    for number, (picture, more) in enumerate(asked):
        item = request(question, picture, " Tell me what you see here, please!" + more)
        served, driver = serve(generator, [item])
        assert_generated(model, served)
        contents = scene_of(served[0]).contents
        shared = max((in_common(contents, each) for each in known), default=0)
        found = driver.total("cached_tokens")
        assert found == min(shared, len(contents) - 1) // BLOCK * BLOCK
        if number == 1:
            assert shared <= scene_of(served[0]).spans[0][0]
        if number == 4:
            assert shared == len(contents)
        known.append(contents)


@pytest.mark.parametrize("model", FAMILIES)
def test_prompts_that_are_put_back_go_on_as_before(model: str) -> None:
    generator = engine(model, blocks=22)
    items = [request("One ", png(seed), "or two", max_tokens=40 + seed) for seed in range(6)]
    served, driver = serve(generator, items)
    assert driver.total("preempted")
    assert_generated(model, served)


def test_a_picture_goes_through_the_tower_once() -> None:
    generator = engine("qwen2-vl")
    items = [request(f"Number {n} ", ONE, " and ", ONE) for n in range(3)]
    serve(generator, items)
    assert viewing(generator).tower.runs == 1


@pytest.mark.parametrize("model", FAMILIES)
def test_a_picture_that_was_seen_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Nor does it wait for those that are; beside a new one, the new one alone is."""
    generator = engine(model)
    serve(generator, [request("What is ", TALL, "here?")])
    runs, looked, original = viewing(generator).tower.runs, [], Processor.look

    def look(self: Processor, image: Any, digest: bytes, *given: Any) -> ImageFeatures:
        looked.append(digest)
        return original(self, image, digest, *given)

    monkeypatch.setattr(Processor, "look", look)
    assert generator.image_preprocessor
    assert generator.image_preprocessor.held.enter()
    once_more, _ = serve(generator, [request("Once more: ", TALL, " what of ", TALL, "?")])
    generator.image_preprocessor.held.leave()
    assert (viewing(generator).tower.runs, looked) == (runs, [])
    beside, _ = serve(generator, [request("And ", OTHER, " beside ", TALL)])
    assert len(looked) == 1
    monkeypatch.undo()
    assert_generated(model, [*once_more, *beside])


@pytest.mark.parametrize(("namespaces", "looks"), [((b"one", b"one"), 1), ((b"one", b"two"), 2)])
def test_image_features_are_shared_within_a_cache_namespace_alone(
    monkeypatch: pytest.MonkeyPatch, namespaces: Sequence[bytes], looks: int
) -> None:
    """Times tell nobody what others have sent."""
    generator, looked, original = engine("smolvlm"), [], Processor.look

    def look(self: Processor, image: Any, *given: Any) -> ImageFeatures:
        looked.append(image)
        return original(self, image, *given)

    monkeypatch.setattr(Processor, "look", look)
    frames = []
    for namespace in namespaces:
        before = viewing(generator).tower.runs
        serve(generator, [request("What is ", ONE, cache_namespace=namespace)])
        frames.append(viewing(generator).tower.runs - before)
    assert len(looked) == looks
    assert [bool(each) for each in frames] == [True, looks > 1]


def test_a_picture_that_was_seen_and_then_given_up_is_looked_at_again() -> None:
    generator = engine("smolvlm")
    driver, rows = Driver(generator), viewing(generator).tower.album.rows
    driver.add(request("What is ", TALL, "here?"))
    driver.finish()
    later = driver.add(request("Once more: ", TALL))
    assert not any(each.whole for each in scene_of(later).made().pieces)
    rows.most_bytes = 0
    rows.keep(b"last", {}, 0)
    driver.finish()
    assert_generated("smolvlm", [later])


def test_a_picture_that_is_cut_into_frames_goes_through_frame_by_frame() -> None:
    generator = engine("smolvlm")
    driver, tower = Driver(generator), viewing(generator).tower
    driver.add(request("Words.", max_tokens=40))
    driver.step()
    beside = driver.add(request("What is ", png(7, 64, 64), "?"))
    frames = len(scene_of(beside).spans)
    assert frames == 5  # four quarters, and the whole
    for seen in range(1, frames + 1):
        driver.step()
        assert tower.runs == seen
    driver.finish()
    assert_generated("smolvlm", [beside])


def test_while_somebody_streams_a_turn_looks_at_one_picture() -> None:
    generator = engine("llava")
    driver, tower = Driver(generator), viewing(generator).tower
    driver.add(request("Words.", max_tokens=40))
    driver.step()
    beside = driver.add(request(*(png(seed) for seed in range(4)), "?"))
    for seen in (1, 2, 3, 4):
        driver.step()
        assert tower.runs == seen
        assert driver.deltas  # of the stream
    driver.finish()
    assert_generated("llava", [beside])


def test_pictures_of_several_requests_are_looked_at_together() -> None:
    generator = engine("qwen3-vl")
    driver, tower = Driver(generator), viewing(generator).tower
    served = [driver.add(request(png(seed), "?")) for seed in range(4)]
    driver.step()
    assert tower.runs == 4
    driver.finish()
    assert_generated("qwen3-vl", served)


def test_rows_are_dropped_once_the_prompt_has_run() -> None:
    generator = engine("qwen3-vl")
    driver = Driver(generator)
    served = driver.add(request(ONE, "?", max_tokens=6))
    assert scene_of(served).processed is not None
    generator._encoder_scheduler, watched = None, viewing(generator)
    watched.turn(generator.scheduler, streaming=False)
    assert scene_of(served).processed is None
    assert scene_of(served).rows
    generator._encoder_scheduler = watched
    driver.step()
    assert scene_of(served).rows == ()
    driver.finish()


def test_the_tower_keeps_no_more_than_it_may() -> None:
    generator = engine("llava")
    rows = viewing(generator).tower.album.rows
    rows.most_bytes = 3 * (16 * 32 * 4 + ENTRY_BYTES)  # of three pictures
    served, _ = serve(generator, [request(*(png(seed) for seed in range(5)), "?")])
    assert_generated("llava", served)
    assert [digest in rows for digest in scene_of(served[0]).digests] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_a_prompt_put_back_after_its_rows_are_gone_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = engine("qwen2-vl", blocks=22)
    viewing(generator).tower.album.rows.most_bytes = 0
    items = [request("One ", png(n), "or two", max_tokens=40 + n) for n in range(6)]
    driver, original, threads = Driver(generator), Processor.look, set()
    served = [driver.add(item) for item in items]

    def look(self: Processor, *given: Any) -> ImageFeatures:
        threads.add(threading.current_thread().name.partition("_")[0])
        return original(self, *given)

    monkeypatch.setattr(Processor, "look", look)
    driver.finish()
    assert driver.total("preempted")
    assert threads == {"pictures"}  # never that which steps
    assert_generated("qwen2-vl", served)


def test_a_picture_that_fails_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine("llava")
    driver, original = Driver(generator), VisionEncoder.look
    served = [driver.add(request(png(seed), "?")) for seed in range(4)]
    guilty = scene_of(served[2]).digests[0]

    def look(self: VisionEncoder, pieces: Sequence[MultimodalItem]) -> Sequence[Rows]:
        if any(each.digest == guilty for each in pieces):
            raise RuntimeError("too odd a picture")
        return original(self, pieces)

    monkeypatch.setattr(VisionEncoder, "look", look)
    driver.finish()
    assert served[2].error is not None
    assert_generated("llava", [served[0], served[1], served[3]])


def test_who_leaves_in_the_middle_of_a_prompt_leaves_nothing() -> None:
    generator = in_small_chunks(engine("gemma3"), 5)
    driver = Driver(generator)
    gone = driver.add(request(LONG, ONE, LONG, OTHER, "?"))
    unseen = driver.add(request(png(5), "?"))
    stays = driver.add(request("What is ", ONE, "here?"))
    driver.step()
    driver.step()
    gone.item.open = unseen.item.open = False
    driver.finish()
    assert_generated("gemma3", [stays])
    assert scene_of(gone).rows == ()


def test_usage_counts_the_tokens_that_pictures_fill() -> None:
    served, _ = serve(engine("llava"), [request("What is ", ONE, "here?")])
    [delta] = served[0].choices
    assert delta.prompt_tokens == len(served[0].prompt) > 16


@pytest.mark.parametrize("model", [*tiny_seeing.BUILDERS])
def test_tokens_of_a_prompt_with_pictures_are_scored(model: str) -> None:
    generator = unpaged(model) if model in tiny_seeing.UNPAGED else engine(model)
    asked = [request("What is ", ONE, " here?", prompt_logprobs=1), request("Nor here.")]
    (pictured, beside), _ = serve(generator, asked)
    first, *told = [each.logprob for each in pictured.choices[0].prompt_logprobs]
    assert first is None
    assert told == pytest.approx(scored(model, pictured), abs=1e-3)
    assert_generated(model, [pictured, beside])


# Run anew, LLaVA says "<image>" itself here, which then stands for no picture.
CACHED = [
    (model, True) for model in ("llava", "qwen2-vl", "gemma3", "smolvlm", *tiny_seeing.UNPAGED)
]


@pytest.mark.parametrize(
    ("model", "keeps"),
    [*CACHED, ("qwen2-vl", False), ("gemma3", False), ("smolvlm", False), ("mllama", False)],
)
def test_a_model_that_is_not_paged_runs_pictures_on_its_own_cache(model: str, keeps: bool) -> None:
    if model == "mllama" and tiny_seeing.hf.__version__.startswith("5.17."):
        pytest.skip("with pictures its cache does not go on in this version of transformers")
    generator = unpaged(model)
    runner = generator.runner
    assert isinstance(runner, MultimodalCachedRunner)
    assert runner._keeps
    runner._keeps = keeps
    items = [
        request("No picture here, but a number of words."),
        request("What is ", ONE, "here?"),
        request(LONG, TALL, " and of ", ONE, "now", n=2),
        request(OTHER, "this?"),
    ]
    served, _ = serve(generator, items, seed=2)
    runner._keeps = True
    assert_generated(model, served)


def test_a_block_seen_in_both_directions_is_not_divided() -> None:
    multimodal = MultimodalInputs(blocks=[(4, 10), (12, 14)])
    assert [multimodal.align_chunk(0, count) for count in (3, 4, 7, 10, 13)] == [3, 4, 4, 10, 12]
    assert [multimodal.align_chunk(4, count) for count in (1, 6, 9)] == [6, 6, 8]
    assert multimodal.align_chunk(6, 1) == 4


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(
    "model", ["smolvlm", "qwen3-vl", pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_pictures_join_on_the_way_to_the_compiled_decoder(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """But for what it was not made with, for which the eager one is there: nothing is compiled
    while it serves."""
    generator = engine(model)
    runner = runner_of(generator)
    assert compile_state(runner) == "done"
    entered, original = [], DecoderHook.inject

    def inject(self: DecoderHook, *given: Any) -> Any:
        if self is runner._quick:
            entered.append(given)
        return original(self, *given)

    monkeypatch.setattr(DecoderHook, "inject", inject)
    made = {**counters["stats"]}
    items = [request("What is ", ONE, "here?"), request(LONG, TALL, " and of ", ONE, "now")]
    served, _ = serve(generator, [*items, request("No picture here.")], seed=3)
    assert_generated(model, served)
    assert {**counters["stats"]} == made
    assert bool(entered) == (model != "qwen3-vl")


def test_a_model_says_that_it_runs_paged() -> None:
    assert all(loaded(model).info.batching == "continuous" for model in FAMILIES)


def test_a_tower_that_asks_for_a_weights_type_is_packed_too() -> None:
    tower = loaded("gemma4-small").language.model.model.vision_tower
    assert isinstance(tower.patch_embedder.input_proj, PackedLinear)


def test_rows_that_come_out_wrong_are_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    language, image_preprocessor = (
        loaded("qwen2-vl").language,
        loaded("qwen2-vl").image_preprocessor,
    )
    assert image_preprocessor
    right = prompts._positions
    flat = lambda given, width: right(None, width)  # noqa: E731
    monkeypatch.setattr(prompts, "_positions", flat)
    with pytest.raises(CannotRun, match="logits differ"):
        check_multimodal(language, image_preprocessor.processor)
