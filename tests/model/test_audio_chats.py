"""Sound in chats gives the output of `generate` on tiny models of several families: alone, beside
other requests, in chunks, with prefix hits and after preemption."""

import io
import itertools
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers.models.auto import modeling_auto, processing_auto
from transformers.utils.import_utils import is_mistral_common_available

from batching.errors import DeadlineExceeded, InvalidInput
from batching.step_times import MAX_TURN_S
from tests import tiny_audio
from tests.generating import Driver, Request, Served, serve
from tests.matrix import matrix
from tests.multimodal import engine, in_small_chunks, loaded, png, request, unpaged
from worker.engines.generation.loading import load_generator
from worker.messages.generation import Chat
from worker.messages.protocol import NoOtherModels
from worker.model.language_model import GeneratorOptions, auto_class
from worker.vision import decoders, media_preprocessor, processor
from worker.vision.multimodal_cached_runner import MultimodalCachedRunner
from worker.vision.multimodal_prompt import MultimodalPrompt
from worker.vision.processor import load_processor

torch.set_num_threads(1)
FAMILIES = [*tiny_audio.BUILDERS]
# A short recording is encoded otherwise beside a longer one: with the library's own cache both are.
UNPAGED = ["qwen3_omni_moe_thinker", "granite_speech", "granite_speech_plus"]
PAGED = [name for name in FAMILIES if name not in UNPAGED]
MIXED = ["gemma4", "qwen2_5_omni_thinker"]  # they take images, too
# Families whose processors take sound and text, without a tiny model that is served.
NOT_COMPARED = {
    "diffusion_gemma": "it does not generate token after token",
    "dots3_note": "the library's cache gives it other logits than its own forward",
    "kyutai_speech_to_text": "its processor has no token for recordings",
    "qwen2_5_omni": "the thinker is served, not the whole with its talker",
    "qwen3_omni_moe": "the thinker is served, not the whole with its talker",
    "vibevoice_asr": "its encoder adds noise: no two forwards are equal",
    "voxtral_realtime": "its model reads sound beside each token that it writes",
}
# Configurations without an entry of their own in the mapping of processors.
THINKERS = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
# Families of newer versions of the library, and those whose processors need packages.
MAY_BE_MISSING = {"apertus1p5", "omniasr", "voxtral_realtime"}
OTHER_KINDS = {"seamless_m4t", "musicgen", "musicgen_melody", "whisper"}  # not chat models
RATE = {"sampling_rate": tiny_audio.RATE}


@cache
def wav(seed: int, seconds: float = 0.9, rate: int = 16_000) -> bytes:
    """A recording of noise, whose samples are exact in 16 bits."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, int(seconds * rate), np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


ONE, OTHER, SHORT = wav(0), wav(1, 1.4), wav(2, 0.4)


@cache
def reference(model: str) -> tuple[Any, Any]:
    """The library's own model and processor."""
    path = tiny_audio.folder(model)
    config: Any = tiny_audio.hf.AutoConfig.from_pretrained(path)
    loaded = auto_class(config).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    loaded.generation_config.eos_token_id = None
    return loaded.eval(), load_processor(str(path))


def samples(file: bytes) -> np.ndarray:
    decoded: np.ndarray = soundfile.read(io.BytesIO(file), dtype="float32")[0]
    return decoded


def assert_generated(model: str, served: Sequence[Served]) -> None:
    """The library's processor and `generate` are called with the whole prompt at once."""
    network, processor = reference(model)
    for one in served:
        assert one.choices
        payload: Any = one.item.payload
        chat = payload.prompt
        text = processor.tokenizer.apply_chat_template(
            [*chat.messages], tokenize=False, add_generation_prompt=True
        )
        recordings = [samples(file.data) for file in chat.media if file.kind == "audio"]
        images = [Image.open(io.BytesIO(file.data)) for file in chat.media if file.kind == "image"]
        inputs = processor(
            text=[text],
            audio=recordings or None,
            **({"audio_kwargs": RATE} if recordings else {}),
            **({"images": images} if images else {}),
            text_kwargs={"add_special_tokens": False},
            return_tensors="pt",
        )
        assert inputs["input_ids"][0].tolist() == list(one.prompt)
        for ids in one.ids:
            output = network.generate(
                **inputs, do_sample=False, max_new_tokens=len(ids), pad_token_id=2
            )
            assert output[0, len(one.prompt) :].tolist() == ids


def max_items(model: str) -> int | None:
    preprocessor = loaded(model).input_processor.media_preprocessor
    assert preprocessor
    return preprocessor.processor.modalities["audio"].max_items


def questions(model: str) -> list[Request]:
    """Requests with and without sound; with two recordings in one where the processor takes
    them."""
    pair = [ONE] if max_items(model) else [OTHER, " and ", ONE]
    return [
        request("No sound here, but a number of words."),
        request("What is ", ONE, "here?"),
        request("Tell me all that you hear in these two: ", *pair, "now", n=2),
        request("Nor here."),
        request(SHORT, "this?"),
    ]


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("model", matrix(PAGED, "qwen2_audio", "audioflamingo3"))
def test_output_is_the_same_beside_other_requests_and_in_chunks(
    model: str, tokens: int | None
) -> None:
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    served, driver = serve(generator, questions(model), seed=1)
    assert_generated(model, served)
    assert bool(driver.partial) == bool(tokens)


# Recurrent layers continue at few places.
@pytest.mark.parametrize(
    "model", matrix([name for name in PAGED if name != "nemo_speechlm"], "qwen2_audio")
)
def test_prefix_cache_is_shared_by_equal_recordings_only(model: str) -> None:
    generator = engine(model)
    question = "What are these sounds, and what are they for? "
    cached = []
    for recording, more in ((ONE, ""), (OTHER, ""), (ONE, " And more?"), (wav(7), " And more?")):
        served, _ = serve(generator, [request(question, recording, "what?" + more)])
        assert_generated(model, served)
        cached.append(served[0].deltas[0].cached_tokens)
    assert cached[0] == 0 < cached[1] == cached[3] < cached[2]


@pytest.mark.parametrize("model", matrix(PAGED, "qwen2_audio"))
def test_preempted_recordings_continue_with_the_same_output(model: str) -> None:
    generator = engine(model, blocks=18)
    items = [request("One ", wav(seed, 0.4), "!", max_tokens=40 + seed) for seed in range(6)]
    served, driver = serve(generator, items)
    assert driver.total("preempted")
    assert_generated(model, served)


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("model", MIXED)
def test_recordings_and_images_share_a_prompt(model: str, tokens: int | None) -> None:
    generator = engine(model)
    if tokens:
        in_small_chunks(generator, tokens)
    items = [
        request("What is ", png(0), " beside ", ONE, " and ", OTHER, " and ", png(1), "?"),
        request(ONE, png(0)),
        request(png(1), SHORT, "this?", n=2),
        request(png(0), "Only seen."),
    ]
    served, _ = serve(generator, items, seed=1)
    assert_generated(model, served)
    prompt = served[0].item.prepared[0].prepared.multimodal
    assert prompt
    assert [*prompt.spans] == sorted(prompt.spans)


@pytest.mark.parametrize("model", matrix(FAMILIES, "gemma4"))
@pytest.mark.parametrize("caches", [True, False])
def test_unpaged_model_runs_recordings_on_transformers_cache(model: str, caches: bool) -> None:
    generator = unpaged(model)
    runner = generator.runner
    assert isinstance(runner, MultimodalCachedRunner)
    assert runner.caches_media
    runner.caches_media = caches
    try:
        served, _ = serve(generator, questions(model), seed=2)
    finally:
        runner.caches_media = True
    assert_generated(model, served)


@pytest.mark.parametrize("model", ["qwen3_omni_moe_thinker"])
def test_images_beside_recordings_on_transformers_cache(model: str) -> None:
    assert loaded(model).info.batching == "static"
    served, _ = serve(unpaged(model), [request("See ", png(0), " hear ", ONE, SHORT, "?")])
    assert_generated(model, served)


def test_equal_recordings_are_encoded_once() -> None:
    generator = engine("qwen2_audio")
    serve(generator, [request(f"Number {n} ", ONE, " and ", ONE) for n in range(3)])
    assert generator._encoder_scheduler
    assert generator._encoder_scheduler.encoder.tiles_encoded == 1


@pytest.mark.parametrize(("model", "tiles"), [("audioflamingo3", 3), ("musicflamingo", 1)])
def test_windows_of_a_recording_are_encoded_apart(model: str, tiles: int) -> None:
    """Where the encoder reads them apart; MusicFlamingo's rows depend on their time."""
    generator = engine(model)
    assert generator._encoder_scheduler
    served, _ = serve(generator, [request("Tell me ", wav(3, 5.2)), request(ONE, "and this?")])
    assert_generated(model, served)
    assert generator._encoder_scheduler.encoder.tiles_encoded == tiles + 1


@pytest.mark.parametrize("model", matrix(PAGED, "gemma4"))
def test_a_chat_goes_on_within_the_layers_of_the_encoder(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens, and those about the recording, are the library's."""
    monkeypatch.setattr("worker.vision.encoder.MAX_MULTIPLICATIONS", 1 << 14)
    driver = Driver(engine(model))
    generator, tokens = driver.generator, [0]

    class Worker(NoOtherModels):
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
    sound = driver.add(request(ONE, "What is this?"))
    tokens.append(0)
    driver.step()
    assert tokens[-1] > 10
    driver.finish()
    assert_generated(model, [chat, sound])


def test_recording_evicted_from_the_cache_is_encoded_again() -> None:
    generator = engine("qwen2_audio")
    assert generator._encoder_scheduler
    rows = generator._encoder_scheduler.encoder.cache.rows
    driver = Driver(generator)
    driver.add(request("What is ", ONE, "here?"))
    driver.finish()
    later = driver.add(request("Once more: ", ONE))
    prompt = later.item.prepared[0].prepared.multimodal
    assert isinstance(prompt, MultimodalPrompt)
    assert not any(item.is_complete for item in prompt.processed().items)
    rows.max_bytes = 0
    rows.put(b"last", {}, 0)
    driver.finish()
    assert_generated("qwen2_audio", [later])


def rejection(model: str, *parts: str | bytes) -> str:
    with pytest.raises(InvalidInput) as error:
        loaded(model).prepare(request(*parts))
    assert str(error.value.param).startswith("messages")
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "parts", "reason"),
    [
        # which the processor would truncate
        ("qwen2_audio", [wav(0, 2.5)], "lasts 2.5 seconds in 1 channels; at most 2 seconds"),
        ("qwen2_audio", ["<|AUDIO|>", ONE], "stands for a recording"),
        ("glmasr", [wav(0, 0.03)], "reads nothing of a recording of 0.03 seconds"),
        ("glmasr", [ONE, OTHER], "takes a recording in a conversation, not 2"),
        *(
            ("qwen2_audio", [broken], "audio")
            for broken in (b"", b"RIFF" + bytes(60), b"<html>", wav(0)[:30])
        ),
    ],
)
def test_what_the_processor_does_not_take_is_refused(
    model: str, parts: list[str | bytes], reason: str
) -> None:
    assert reason in rejection(model, *parts)


def test_a_recording_of_the_processors_window_is_taken() -> None:
    loaded("qwen2_audio").prepare(request(wav(0, 2.0)))


def test_recordings_beyond_the_context_are_refused_by_their_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocessor = loaded("audioflamingo3").input_processor.media_preprocessor
    assert preprocessor
    monkeypatch.setattr(preprocessor, "_features", None)
    assert "fill 1250 tokens so far" in rejection("audioflamingo3", wav(0, 50.0))
    assert "at most 600" in rejection("audioflamingo3", wav(0, 601.0, 1000))


def webm(seconds: float, stated_s: float) -> bytes:
    """Return a recording whose header states another length."""
    av = pytest.importorskip("av")
    file, samples = io.BytesIO(), np.zeros(int(seconds * 48000), np.float32)
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=48000, layout="mono")
        for start in range(0, len(samples), 960):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 960], "flt", "mono")
            frame.sample_rate, frame.pts = 48000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = bytearray(file.getvalue())
    duration = data.index(b"\x44\x89") + 3  # milliseconds
    data[duration : duration + 8] = struct.pack(">d", 1000 * stated_s)
    return bytes(data)


def test_samples_are_counted_where_a_header_states_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most 2 seconds" in rejection("qwen2_audio", webm(6, 1))
    monkeypatch.setattr(decoders, "MAX_RECORDINGS_S", 8.0)
    file = webm(6, 1)
    loaded("audioflamingo3").prepare(request(file))
    assert "last 12 seconds so far" in rejection("audioflamingo3", file, webm(6, 2))


def test_counting_tokens_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_preprocessor, "MAX_COUNT_S", 0)
    chat = request(wav(0)).payload.prompt
    assert isinstance(chat, Chat)
    with pytest.raises(DeadlineExceeded, match="the media were not read within 0 s"):
        loaded("qwen2_audio").input_processor.encode(chat)


def test_text_that_the_processor_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("StopIteration")

    loaded("qwen2_audio").prepare(request(wav(7)))
    monkeypatch.setattr(processor, "call_replaced", fail)
    assert "does not take this text beside media" in rejection("qwen2_audio", wav(7))


def test_every_family_of_the_library_that_takes_sound_is_listed() -> None:
    """One that a new version adds is compared here, or listed with the reason."""
    auto: Any = processing_auto
    processors = auto.PROCESSOR_MAPPING_NAMES
    mappings = [
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ]
    names = {name for mapping in mappings for name in mapping} & {*processors}
    found = {name for name in names if takes_sound(processors[name])} - OTHER_KINDS
    others = {*tiny_audio.WITH_TORCHVISION, *tiny_audio.WITH_MISTRAL_COMMON}
    known = {*FAMILIES, *others, *NOT_COMPARED}
    assert found <= known
    assert known - found <= THINKERS | MAY_BE_MISSING


def takes_sound(processor: str) -> bool:
    kind = getattr(tiny_audio.hf, processor)
    if getattr(kind, "is_dummy", False):  # it needs a package
        return False
    return not {"feature_extractor", "audio_processor"}.isdisjoint(kind.get_attributes())


@pytest.mark.skipif(is_mistral_common_available(), reason="mistral-common is installed")
def test_model_whose_sound_mistral_common_renders_names_the_package() -> None:
    """A chat is refused, too: the package has the conversation's format."""
    missing = "pip install mistral-common, which reads its tekken.json"
    options = GeneratorOptions(str(tiny_audio.folder("voxtral")), device="cpu", kv_cache_gb=0.01)
    generator = load_generator(options)
    assert missing in generator.input_processor.refused_media["audio"]
    with pytest.raises(InvalidInput, match=f"no chat template: .*{missing}"):
        generator.prepare(request("Only words."))
    assert len(generator.input_processor.encode("Only words.")) > 1


def test_models_without_sound_name_the_reason() -> None:
    preprocessor = loaded("qwen2_audio")
    assert preprocessor.text_model.refused_media["image"] == "this model takes no images"
    assert "audio" not in preprocessor.text_model.refused_media


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("qwen3_asr", {}),
        ("qwen3_asr", {"language": "en"}),
        ("qwen3_asr", {"language": "French", "prompt": "Names: Ann."}),
        ("glmasr", {}),
        ("audioflamingo3", {"prompt": "Write it down."}),
        ("moss_transcribe_diarize", {}),
    ],
)
def test_a_transcription_is_asked_for_as_the_processor_does(
    model: str, fields: dict[str, str]
) -> None:
    processor = load_processor(str(tiny_audio.folder(model)))
    processor.chat_template = processor.tokenizer.chat_template
    [expected] = processor.apply_transcription_request([samples(ONE)], tokenize=False, **fields)
    prepared = loaded(model).input_processor
    chat = prepared.transcription_chat(fields.get("prompt"), fields.get("language"))
    assert prepared.render(chat) == expected


def test_a_language_is_named_where_the_request_has_none() -> None:
    prepared = loaded("glmasr").input_processor
    own = reference("glmasr")[1].default_transcription_prompt
    assert f"{own} Its language is fr." in prepared.render(prepared.transcription_chat(None, "fr"))


def test_a_language_that_the_processor_does_not_know_is_refused() -> None:
    ask = loaded("qwen3_asr").input_processor.transcription_chat
    with pytest.raises(InvalidInput, match="nowhere") as error:
        ask(None, "nowhere")
    assert error.value.param == "language"
    with pytest.raises(InvalidInput) as error:
        loaded("omniasr").input_processor.transcription_chat("Names: Ann.", None)
    assert error.value.param == "prompt"
