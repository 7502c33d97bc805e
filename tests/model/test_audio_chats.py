"""Sound in chats: windows of recordings, refusals, and requests for a transcript.

tests/model/test_media_chats.py compares outputs with those of `generate`."""

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto import modeling_auto, processing_auto
from transformers.utils.import_utils import is_mistral_common_available

from batching.errors import DeadlineExceeded, InvalidInput
from tests import tiny_audio
from tests.generating import load, serve
from tests.multimodal import assert_generated, engine, library, loaded, request, samples, wav
from worker.messages.generation import Chat
from worker.vision import decoders, media_preprocessor, processor
from worker.vision.processor import load_processor

torch.set_num_threads(1)
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
ONE, OTHER = wav(0), wav(1, 1.4)


@pytest.mark.parametrize(("model", "tiles"), [("audioflamingo3", 3), ("musicflamingo", 1)])
def test_windows_of_a_recording_are_encoded_apart(model: str, tiles: int) -> None:
    """Where the encoder reads them apart; MusicFlamingo's rows depend on their time."""
    generator = engine(model)
    assert generator._encoder_scheduler
    served, _ = serve(generator, [request("Tell me ", wav(3, 5.2)), request(ONE, "and this?")])
    assert_generated(model, served)
    assert generator._encoder_scheduler.encoder.tiles_encoded == tiles + 1


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
    chat = request(wav(9)).payload.prompt  # which no other test has left in a cache
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
    known = {*tiny_audio.BUILDERS, *others, *NOT_COMPARED}
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
    generator = load(tiny_audio.folder("voxtral"))
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
    own = library("glmasr")[1].default_transcription_prompt
    assert f"{own} Its language is fr." in prepared.render(prepared.transcription_chat(None, "fr"))


def test_a_language_that_the_processor_does_not_know_is_refused() -> None:
    ask = loaded("qwen3_asr").input_processor.transcription_chat
    with pytest.raises(InvalidInput, match="nowhere") as error:
        ask(None, "nowhere")
    assert error.value.param == "language"
    with pytest.raises(InvalidInput) as error:
        loaded("omniasr").input_processor.transcription_chat("Names: Ann.", None)
    assert error.value.param == "prompt"
