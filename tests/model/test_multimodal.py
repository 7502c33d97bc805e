"""Images in chats: when they are decoded, encoded and freed, and what fails alone.

tests/model/test_media_chats.py compares outputs with those of `generate`."""

import gc
import shutil
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torch._dynamo.utils import counters

from batching.sequence import MultimodalInputs
from tests import tiny_multimodal
from tests.generating import Driver, load, runner_of, serve
from tests.matrix import matrix
from tests.model.test_compiling import compile_state
from tests.multimodal import (
    assert_generated,
    engine,
    in_small_chunks,
    loaded,
    png,
    prompt_of,
    request,
    scored,
    unpaged,
)
from worker.backends.cpu.linear_layers import PackedLinear
from worker.device.self_check import CannotRun
from worker.engines.generation.engine import GenerationEngine
from worker.model.decoder_hook import DecoderHook, DecoderRows
from worker.model.language_model import LanguageModel
from worker.vision import multimodal_prompt
from worker.vision.encoder import ENTRY_BYTES, VisionEncoder
from worker.vision.encoder_scheduler import EncoderScheduler
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner
from worker.vision.processor import MediaFeatures, MultimodalItem, Processor
from worker.vision.self_check import check_multimodal

FAMILIES = [name for name in tiny_multimodal.FAMILIES if name not in tiny_multimodal.UNPAGED]
ONE, OTHER, TALL = png(0), png(1), png(2, 40, 72)
LONG = "Tell me all that you see in these two, and then some more of it: "


def encoder_scheduler(generator: GenerationEngine) -> EncoderScheduler:
    assert generator._encoder_scheduler is not None
    return generator._encoder_scheduler


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the threads in which processors read images from now on."""
    threads, process_media = list[str](), Processor.process_media

    def recorded(self: Processor, *args: Any, **named: Any) -> MediaFeatures:
        threads.append(threading.current_thread().name.partition("_")[0])
        return process_media(self, *args, **named)

    monkeypatch.setattr(Processor, "process_media", recorded)
    return threads


@pytest.mark.parametrize("model", matrix(FAMILIES, "qwen2.5-vl"))
def test_cached_image_is_not_decoded_again(model: str, processed: list[str]) -> None:
    """It does not wait for images that are being decoded. Only new images beside it are decoded."""
    generator = engine(model)
    serve(generator, [request("What is ", TALL, "here?")])
    encoder = encoder_scheduler(generator).encoder
    tiles_encoded = encoder.tiles_encoded
    processed.clear()
    assert generator.input_processor.media_preprocessor
    assert generator.input_processor.media_preprocessor.memory_limiter.start_decoding(False)
    once_more, _ = serve(generator, [request("Once more: ", TALL, " what of ", TALL, "?")])
    generator.input_processor.media_preprocessor.memory_limiter.end_decoding(False)
    assert (encoder.tiles_encoded, processed) == (tiles_encoded, [])
    beside, _ = serve(generator, [request("And ", OTHER, " beside ", TALL)])
    assert len(processed) == 1
    assert_generated(model, [*once_more, *beside])


@pytest.mark.parametrize(
    ("namespaces", "processes"), [((b"one", b"one"), 1), ((b"one", b"two"), 2)]
)
def test_cached_image_is_shared_within_a_cache_namespace_only(
    namespaces: Sequence[bytes], processes: int, processed: list[str]
) -> None:
    """Response times do not reveal images of other clients."""
    generator, encoded = engine("smolvlm"), []
    processed.clear()
    for namespace in namespaces:
        before = encoder_scheduler(generator).encoder.tiles_encoded
        serve(generator, [request("What is ", ONE, cache_namespace=namespace)])
        encoded.append(encoder_scheduler(generator).encoder.tiles_encoded - before)
    assert len(processed) == processes
    assert [bool(count) for count in encoded] == [True, processes > 1]


def test_tiles_of_an_image_are_encoded_one_per_step_while_a_sequence_runs() -> None:
    generator = engine("smolvlm")
    driver, encoder = Driver(generator), encoder_scheduler(generator).encoder
    driver.add(request("Words.", max_tokens=40))
    driver.step()
    beside = driver.add(request("What is ", png(7, 64, 64), "?"))
    tiles = len(prompt_of(beside).spans)
    assert tiles == 5  # four quarters and the whole image
    for count in range(1, tiles + 1):
        driver.step()
        assert encoder.tiles_encoded == count
    driver.finish()
    assert_generated("smolvlm", [beside])


def test_images_of_several_requests_are_encoded_in_one_batch() -> None:
    generator = engine("qwen3-vl")
    driver, encoder = Driver(generator), encoder_scheduler(generator).encoder
    served = [driver.add(request(png(seed), "?")) for seed in range(4)]
    driver.step()
    assert encoder.tiles_encoded == 4
    driver.finish()
    assert_generated("qwen3-vl", served)


def test_rows_are_dropped_after_prefill() -> None:
    generator = engine("qwen3-vl")
    driver = Driver(generator)
    served = driver.add(request(ONE, "?", max_tokens=6))
    assert prompt_of(served).processor_output is not None
    generator._encoder_scheduler, encoders = None, encoder_scheduler(generator)
    encoders.step(generator.scheduler, generator.others)
    assert prompt_of(served).processor_output is None
    assert prompt_of(served).rows
    generator._encoder_scheduler = encoders
    driver.step()
    assert prompt_of(served).rows == ()
    driver.finish()


def test_cache_of_encoder_rows_is_limited() -> None:
    generator = engine("llava")
    rows = encoder_scheduler(generator).encoder.cache.rows
    rows.max_bytes = 3 * (16 * 32 * 4 + ENTRY_BYTES)  # of three images
    served, _ = serve(generator, [request(*(png(seed) for seed in range(5)), "?")])
    assert_generated("llava", served)
    assert [digest in rows for digest in prompt_of(served[0]).digests] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_preempted_prompt_is_encoded_again_after_eviction(processed: list[str]) -> None:
    generator = engine("qwen2-vl", blocks=22)
    encoder_scheduler(generator).encoder.cache.rows.max_bytes = 0
    items = [request("One ", png(n), "or two", max_tokens=40 + n) for n in range(6)]
    driver = Driver(generator)
    served = [driver.add(item) for item in items]
    processed.clear()
    driver.finish()
    assert driver.total("preempted")
    assert {*processed} == {"media"}  # never the thread that steps
    assert_generated("qwen2-vl", served)


def test_image_that_fails_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = engine("llava")
    driver, original = Driver(generator), VisionEncoder.encode
    served = [driver.add(request(png(seed), "?")) for seed in range(4)]
    guilty = prompt_of(served[2]).digests[0]

    def encode(self: VisionEncoder, items: Sequence[MultimodalItem]) -> Sequence[DecoderRows]:
        if any(item.digest == guilty for item in items):
            raise RuntimeError("cannot encode this image")
        return original(self, items)

    monkeypatch.setattr(VisionEncoder, "encode", encode)
    driver.finish()
    assert served[2].error is not None
    assert_generated("llava", [served[0], served[1], served[3]])


def test_request_cancelled_during_prefill_releases_its_rows() -> None:
    generator = in_small_chunks(engine("gemma3"), 5)
    driver = Driver(generator)
    cancelled = driver.add(request(LONG, ONE, LONG, OTHER, "?"))
    unencoded = driver.add(request(png(5), "?"))
    kept = driver.add(request("What is ", ONE, "here?"))
    driver.step()
    driver.step()
    cancelled.item.open = unencoded.item.open = False
    driver.finish()
    assert_generated("gemma3", [kept])
    assert prompt_of(cancelled).rows == ()


@pytest.mark.parametrize("model", matrix(tiny_multimodal.FAMILIES, "gemma3"))
def test_prompt_logprobs_with_images_equal_the_models_own(model: str) -> None:
    generator = unpaged(model) if model in tiny_multimodal.UNPAGED else engine(model)
    requests = [request("What is ", ONE, " here?", prompt_logprobs=1), request("Nor here.")]
    (with_image, beside), _ = serve(generator, requests)
    first, *logprobs = [token.logprob for token in with_image.choices[0].prompt_logprobs]
    assert first is None
    assert logprobs == pytest.approx(scored(model, with_image), abs=1e-3)
    assert_generated(model, [with_image, beside])


def test_wrong_steps_on_a_cache_with_images_are_refused() -> None:
    runner = unpaged("gemma3").runner
    assert isinstance(runner, MultimodalCachedRunner)
    embeddings = runner.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(
        lambda module, inputs, output: output.flip(-1) if inputs[0].numel() == 1 else output
    )
    try:
        runner._check_cached_media()
    finally:
        hook.remove()
    assert not runner.caches_media
    runner.caches_media = True
    assert "logits differ" in runner.language.fallbacks[-1].reason


def test_bidirectional_span_is_not_split_between_chunks() -> None:
    inputs = MultimodalInputs(bidirectional_spans=[(4, 10), (12, 14)])
    assert [inputs.align_chunk(0, count) for count in (3, 4, 7, 10, 13)] == [3, 4, 4, 10, 12]
    assert [inputs.align_chunk(4, count) for count in (1, 6, 9)] == [6, 6, 8]
    assert inputs.align_chunk(6, 1) == 4


@pytest.mark.matrix
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
@pytest.mark.parametrize(
    "model", ["smolvlm", "qwen3-vl", pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_images_are_injected_into_the_compiled_decoder(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A model whose images need other inputs than at compilation uses the eager decoder. Nothing is
    compiled while serving."""
    generator = engine(model)
    runner = runner_of(generator)
    assert compile_state(runner) == "done"
    injected, original = [], DecoderHook.inject

    def inject(self: DecoderHook, *args: Any) -> Any:
        if self is runner._compiled_hook:
            injected.append(args)
        return original(self, *args)

    monkeypatch.setattr(DecoderHook, "inject", inject)
    compiled = {**counters["stats"]}
    items = [request("What is ", ONE, "here?"), request(LONG, TALL, " and of ", ONE, "now")]
    served, _ = serve(generator, [*items, request("No picture here.")], seed=3)
    assert_generated(model, served)
    assert {**counters["stats"]} == compiled
    assert bool(injected) == (model != "qwen3-vl")


def test_encoder_that_reads_the_dtype_of_a_weight_is_packed_too() -> None:
    encoder = loaded("gemma4-small").runner.language.model.model.vision_tower
    assert isinstance(encoder.patch_embedder.input_proj, PackedLinear)


def test_check_at_load_fails_for_wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    language, media_preprocessor = (
        loaded("qwen2-vl").runner.language,
        loaded("qwen2-vl").input_processor.media_preprocessor,
    )
    assert media_preprocessor
    original = multimodal_prompt._positions
    text_positions = lambda position_ids, width: original(None, width)  # noqa: E731
    monkeypatch.setattr(multimodal_prompt, "_positions", text_positions)
    with pytest.raises(CannotRun, match="logits differ"):
        check_multimodal(language, media_preprocessor.processor)


def test_the_hook_of_replaced_layers_is_freed() -> None:
    """It holds the old layers beside the decoder, such as the output head."""
    generator = engine("llava")
    runner = runner_of(generator)
    before, _ = serve(generator, [request("look", ONE)])
    replaced = weakref.ref(runner.decoder_hook)
    runner.decoder_hook = DecoderHook(runner.language.model)  # as when layers are replaced
    gc.collect()
    assert replaced() is None
    after, _ = serve(generator, [request("look", OTHER)])
    assert_generated("llava", [*before, *after])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_layers_that_are_replaced_are_freed(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the vision encoder's nor the decoder's stay in memory beside their packed ones."""
    originals: list[weakref.ref[nn.Module]] = []
    pack_weights = LanguageModel.pack_weights

    def recorded(language: LanguageModel, *arguments: Any) -> None:
        modules = language.model.modules()
        originals.extend(weakref.ref(m) for m in modules if isinstance(m, nn.Linear))
        pack_weights(language, *arguments)

    monkeypatch.setattr(LanguageModel, "pack_weights", recorded)
    generator = load(tiny_multimodal.folder("qwen2.5-vl"), quantization=quantization)
    runner_of(generator)._use_native_ops()
    gc.collect()
    kept = {*generator.runner.language.model.modules()}
    alive = {module for original in originals if (module := original())}
    assert len(originals) > len(alive)
    assert alive <= kept
