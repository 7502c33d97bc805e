"""Images and sound in chats give the output of `generate` on tiny models of many families: in
chunks, beside other requests, with prefix hits, after preemption and on the library's own cache."""

import itertools

import pytest
import torch

from batching.step_times import MAX_TURN_S
from tests import tiny_audio, tiny_multimodal
from tests.generating import Driver, Request, serve
from tests.matrix import matrix
from tests.multimodal import (
    assert_generated,
    assert_preempted_continue,
    assert_prefixes_are_of_equal_media,
    assert_same_beside_others,
    engine,
    in_small_chunks,
    loaded,
    max_recordings,
    png,
    prompt_of,
    request,
    unpaged,
    wav,
)
from worker.messages.protocol import OtherModels
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner

torch.set_num_threads(1)
IMAGES = png(0), png(1), png(2, 40, 72)
SOUNDS = wav(0), wav(1, 1.4), wav(2, 0.4)
# A short recording is encoded otherwise beside a longer one: with the library's own cache both are.
UNPAGED_SOUND = ["qwen3_omni_moe_thinker", "granite_speech", "granite_speech_plus"]
PAGED = [
    *(name for name in tiny_multimodal.FAMILIES if name not in tiny_multimodal.UNPAGED),
    *(name for name in tiny_audio.BUILDERS if name not in UNPAGED_SOUND),
]
MIXED = ["gemma4", "qwen2_5_omni_thinker"]  # they take images and sound
RECURRENT = ["qwen3.5-vl", "nemo_speechlm"]  # their layers continue at few places
# Without a cache LLaVA generates "<image>" here, which stands for no image.
UNPAGED = [
    *(
        (name, True)
        for name in ("llava", "qwen2-vl", "gemma3", "smolvlm", *tiny_multimodal.UNPAGED)
    ),
    *((name, False) for name in ("qwen2-vl", "gemma3", "smolvlm", "mllama")),
    *((name, caches) for name in tiny_audio.BUILDERS for caches in (True, False)),
]
LONG = "Tell me all that you find in these two, and then some more of it: "


def media_of(model: str) -> tuple[bytes, bytes, bytes]:
    return IMAGES if model in tiny_multimodal.FAMILIES else SOUNDS


def questions(model: str) -> list[Request]:
    """Requests with and without media; with two in one where the processor takes them."""
    one, other, third = media_of(model)
    second = third if model in tiny_multimodal.FAMILIES else other  # see UNPAGED_SOUND
    pair = [one] if max_recordings(model) == 1 else [second, " and of ", one]
    return [
        request("Nothing here, but a number of words."),
        request("What is ", one, "here?"),
        request(LONG, *pair, "now", n=2),
        request("Nor here."),
        request(other, "this?"),
    ]


BESIDE_OTHERS = [(name, 5) for name in PAGED]
USUAL = ("qwen2.5-vl", "qwen3.5-vl", "qwen2_audio", "audioflamingo3")


@pytest.mark.parametrize(
    ("model", "tokens"),
    [*matrix(BESIDE_OTHERS, *((name, 5) for name in USUAL)), *((name, None) for name in USUAL)],
)
def test_output_is_the_same_beside_other_requests_and_in_chunks(
    model: str, tokens: int | None
) -> None:
    assert_same_beside_others(model, questions(model), tokens)


@pytest.mark.parametrize(
    "model",
    matrix([name for name in PAGED if name not in RECURRENT], "qwen2.5-vl", "qwen2_audio"),
)
def test_prefix_cache_is_shared_by_equal_media_only(model: str) -> None:
    one, other, _ = media_of(model)
    more = "" if model == "paligemma" else " And more?"  # its tokens attend to the whole prompt
    assert_prefixes_are_of_equal_media(model, one, other, more)


@pytest.mark.parametrize("model", matrix(PAGED, "qwen2.5-vl", "qwen3.5-vl", "qwen2_audio"))
def test_preempted_requests_continue_with_the_same_output(model: str) -> None:
    if model in tiny_audio.BUILDERS:
        assert_preempted_continue(model, [wav(seed, 0.4) for seed in range(6)], blocks=18)
    else:
        assert_preempted_continue(model, list(map(png, range(6))), blocks=22)


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("model", MIXED)
def test_recordings_and_images_share_a_prompt(model: str, tokens: int | None) -> None:
    (image, other, _), (one, two, short) = IMAGES, SOUNDS
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    items = [
        request("What is ", image, " beside ", one, " and ", two, " and ", other, "?"),
        request(one, image),
        request(other, short, "this?", n=2),
        request(image, "Only seen."),
    ]
    served, _ = serve(generator, items, seed=1)
    assert_generated(model, served)
    spans = prompt_of(served[0]).spans
    assert [*spans] == sorted(spans)


@pytest.mark.parametrize(
    ("model", "caches_media"),
    matrix(UNPAGED, ("gemma3", True), ("gemma4", True), ("gemma4", False)),
)
def test_unpaged_model_runs_media_on_transformers_cache(
    model: str, caches_media: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = unpaged(model)
    runner = generator.runner
    assert isinstance(runner, MultimodalCachedRunner)
    assert runner.caches_media
    monkeypatch.setattr(runner, "caches_media", caches_media)
    served, _ = serve(generator, questions(model), seed=2)
    assert_generated(model, served)


def test_images_beside_recordings_on_transformers_cache() -> None:
    model = "qwen3_omni_moe_thinker"
    assert loaded(model).info.batching == "static"
    item = request("See ", IMAGES[0], " hear ", SOUNDS[0], SOUNDS[2], "?")
    served, _ = serve(unpaged(model), [item])
    assert_generated(model, served)


@pytest.mark.parametrize("model", ["qwen2-vl", "qwen2_audio"])
def test_equal_media_are_encoded_once(model: str) -> None:
    generator, file = engine(model), media_of(model)[0]
    serve(generator, [request(f"Number {n} ", file, " and ", file) for n in range(3)])
    assert generator._encoder_scheduler
    assert generator._encoder_scheduler.encoder.tiles_encoded == 1


@pytest.mark.parametrize("model", ["smolvlm", "qwen2_audio"])
def test_media_evicted_from_the_cache_are_encoded_again(model: str) -> None:
    generator, (*_, file) = engine(model), media_of(model)
    assert generator._encoder_scheduler
    rows = generator._encoder_scheduler.encoder.cache.rows
    driver = Driver(generator)
    driver.add(request("What is ", file, "here?"))
    driver.finish()
    later = driver.add(request("Once more: ", file))
    assert not any(item.is_complete for item in prompt_of(later).processed().items)
    rows.max_bytes = 0
    rows.put(b"last", {}, 0)
    driver.finish()
    assert_generated(model, [later])


@pytest.mark.parametrize("model", matrix(PAGED, "gemma4"))
def test_a_chat_goes_on_within_the_layers_of_the_encoder(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens, and those about the medium, are the library's."""
    monkeypatch.setattr("worker.vision.encoder.MAX_MULTIPLICATIONS", 1 << 14)
    driver = Driver(engine(model))
    generator, tokens = driver.generator, [0]

    class Worker(OtherModels):
        def run_all_steps(self) -> None:
            tokens[-1] += driver.step().decode_tokens

    generator.others = Worker()
    assert generator._encoder_scheduler
    generator._encoder_scheduler._yield_points._clock = itertools.count(
        0.0, 2 * MAX_TURN_S
    ).__next__
    chat = driver.add(request("Tell me.", max_tokens=60))
    while not driver.total("decode_tokens"):
        driver.step()
    asked = driver.add(request(media_of(model)[0], "What is this?"))
    tokens.append(0)
    driver.step()
    assert tokens[-1] > 10
    driver.finish()
    assert_generated(model, [chat, asked])
