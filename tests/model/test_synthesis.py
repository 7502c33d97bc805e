"""Models that speak: the library's own audio for the same seed, or a refusal with its reason."""

import logging
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers.models.auto import modeling_auto
from transformers.models.vibevoice import generation_vibevoice

from batching.errors import InvalidInput
from batching.request_queue import WorkItem
from tests import tiny, tiny_speech
from tests.tiny import folder, hf, saved
from tests.tiny_tokenizers import llama_tokenizer
from worker.engines.pipeline.loading import PipelineOptions, load_runner
from worker.engines.pipeline.synthesis import SynthesisRunner
from worker.media.audio import Recording
from worker.messages.protocol import CUT, OtherModels, PipelineInput
from worker.messages.synthesis import SpeechInput
from worker.model.loading import LoadingFailed

TEXT = "the film was wonderful"
# The voices that each model has with two embeddings in VOICES_DIR.
VOICES: dict[str, tuple[str, ...]] = {
    "vits": (),
    "vits-noisy": ("0", "1", "2"),
    "speecht5": ("ann", "bob"),
    "bark": (),
    "musicgen": (),
    "csm": (),
    "dia": (),
    "fastspeech2-rated": ("0", "1"),
    "fastspeech2-vocoder": ("0", "1"),
}
# Prompts of models that take conversations: before the text, or before a voice and the text; the
# part of a voice; and behind the text.
SYSTEM = "<|system|>Generate audio following instruction.</s><|user|>"
HIGGS_VOICE = "hello there</s><|assistant|><|audio_out_bos|><|AUDIO_OUT|><|audio_eos|></s><|user|>"
VIBEVOICE = " Speaker 0:<|vision_start|><|vision_pad|><|vision_end|>"
PROMPTS = {
    "csm": ("", "[0]hello there<|AUDIO|><|audio_eos|>", "[0]", ""),
    "gradium_phonon_tts": ("", "<|voice_bos|><|voice|>", "", "<|audio_bos|>"),
    "higgs_audio_v2": (SYSTEM, HIGGS_VOICE, "", "</s><|assistant|><|audio_out_bos|>"),
    "pocket_tts": ("", "<|voice_bos|><|voice|>", "", "<|audio_bos|>"),
    "vibevoice": ("", VIBEVOICE, " Text input: Speaker 0: ", " Speech output:<|vision_start|>"),
}
# Families of the library that have no tiny model of their name above.
OTHERS = {
    "fastspeech2_conformer": "compared as fastspeech2-vocoder",
    "fastspeech2_conformer_with_hifigan": "compared as fastspeech2-rated",
    "musicgen_melody": "its processor needs torchaudio",
    "qwen2_5_omni": "refused: it answers a text instead of speaking it",
    "qwen3_omni_moe": "refused: it answers a text instead of speaking it",
    "seamless_m4t": "refused: generate needs a target language",
    "seamless_m4t_v2": "refused: generate needs a target language",
}


def rated_fastspeech2() -> list[Any]:
    """With the sampling rate, which the library's configuration lacks."""
    model, tokenizer = tiny.BUILDERS["fastspeech2"]()
    model.config.sampling_rate = 16_000
    return [model, tokenizer]


def fastspeech2_with_vocoder() -> list[Any]:
    """The model without its vocoder, beside one of SpeechT5."""
    model, tokenizer = tiny.BUILDERS["fastspeech2"]()
    return [model.model, tokenizer, tiny_speech.InFolder(tiny_speech.vocoder(16), "vocoder")]


tiny.BUILDERS["fastspeech2-rated"] = rated_fastspeech2
tiny.BUILDERS["fastspeech2-vocoder"] = fastspeech2_with_vocoder


class Scheduler:
    """Takes even steps, by the interface of diffusers' schedulers."""

    def __init__(self, **_: object) -> None:
        self.timesteps = torch.empty(0)

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.arange(num_inference_steps, 0, -1)

    def step(self, velocity: Any, _: object, latents: Any) -> SimpleNamespace:
        return SimpleNamespace(prev_sample=latents - velocity / len(self.timesteps))


@pytest.fixture(autouse=True)
def diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, which VibeVoice needs for nothing but its scheduler."""
    package: Any = SimpleNamespace(DPMSolverMultistepScheduler=Scheduler)
    monkeypatch.setitem(sys.modules, "diffusers", package)
    monkeypatch.setattr(generation_vibevoice, "is_diffusers_available", lambda: True)


@pytest.fixture(scope="session")
def voices(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_speech.write_voices(tmp_path_factory.mktemp("voices"), "ann", "bob")


@cache
def runner(path: Path, voices: str) -> SynthesisRunner:
    options = PipelineOptions(
        str(path), device="cpu", dtype="float32", task="text-to-audio", voices_dir=voices
    )
    loaded = load_runner(options, 8)
    assert isinstance(loaded, SynthesisRunner)
    return loaded


def speak(run: SynthesisRunner, text: str = TEXT, **parameters: Any) -> np.ndarray:
    """Return the raw audio of a sentence."""
    item: Any = WorkItem(SpeechInput(text, parameters), float("inf"), 0.0)
    run.prepare(item)
    while (output := run.forward([item.prepared])[0]) is CUT:
        pass
    audio = np.asarray(output[0]["audio"])
    spoken = run.finish(item, output)
    assert spoken.rate == run.pipe.sampling_rate
    clipped = np.nan_to_num(audio).clip(-1, 1)
    np.testing.assert_allclose(spoken.samples / 32767, clipped, rtol=0, atol=1 / 32767)
    assert spoken.tokens > 1
    return audio


def by_library(run: SynthesisRunner, seed: int, **arguments: Any) -> np.ndarray:
    """Return the audio of the library's pipeline."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        return np.asarray(run.pipe(TEXT, **arguments)["audio"])


@pytest.mark.parametrize("name", VOICES)
def test_speech_is_that_of_the_library(name: str, voices: str) -> None:
    run = runner(folder(name), voices)
    assert run.info.voices == VOICES[name]
    assert run.info.task == "text-to-audio"
    for voice in VOICES[name] or [None]:
        given = {"voice": voice} if voice else {}
        forward = dict(run.voices[voice].forward) if voice else {}
        expected = by_library(run, 7, forward_params=forward)
        state = torch.get_rng_state()
        np.testing.assert_array_equal(speak(run, seed=7, **given), expected)
        assert torch.equal(torch.get_rng_state(), state)
    default = VOICES[name][:1]
    again = speak(run, seed=7, **({"voice": default[0]} if default else {}))
    np.testing.assert_array_equal(speak(run, seed=7), again)


@pytest.mark.parametrize("name", ["vits-noisy", "speecht5", "bark", "musicgen"])
def test_models_that_sample_follow_the_seed(name: str, voices: str) -> None:
    run = runner(folder(name), voices)
    one, other = speak(run, seed=1), speak(run, seed=2)
    assert one.shape != other.shape or not np.array_equal(one, other)
    np.testing.assert_array_equal(speak(run, seed=1), one)
    unseeded = speak(run)
    assert one.shape != unseeded.shape or not np.array_equal(one, unseeded)


def test_a_waveform_is_taken_that_is_not_the_first_output(voices: str) -> None:
    """The library's pipeline takes the spectrogram of this model."""
    run = runner(folder("fastspeech2-rated"), voices)
    inputs = run.pipe.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        spectrogram = run.pipe.model.model(inputs, speaker_ids=torch.tensor([1])).spectrogram
        expected = run.pipe.model.vocoder(spectrogram)
    np.testing.assert_array_equal(speak(run, voice="1"), expected.numpy().squeeze())


def test_speed_is_the_models_own_rate(voices: str) -> None:
    run = runner(folder("vits"), voices)
    run.pipe.model.speaking_rate = 0.5
    expected = by_library(run, 0)
    run.pipe.model.speaking_rate = 1.0
    np.testing.assert_array_equal(speak(run, speed=0.5), expected)
    assert run.pipe.model.speaking_rate == 1.0
    assert len(expected) > len(speak(run, speed=2.0))
    with pytest.raises(InvalidInput, match="speed is 2; the model speaks at speed 1 only"):
        speak(runner(folder("speecht5"), voices), speed=2.0)


def test_other_models_draw_from_their_own_numbers_at_yield_points(voices: str) -> None:
    """Their steps run within the forward pass, on the same thread."""
    run = runner(folder("vits-noisy"), voices)
    expected = speak(run, seed=3)
    drawn: list[torch.Tensor] = []

    class Others(OtherModels):
        busy, max_turn_s = True, 0.2

        def run_steps(self) -> None:
            drawn.append(torch.rand(4))

    torch.manual_seed(0)
    numbers = torch.rand(400)
    torch.manual_seed(0)
    run.others, run._yield_points._clock = Others(), iter(range(10**9)).__next__
    try:
        np.testing.assert_array_equal(speak(run, seed=3), expected)
    finally:
        del run.others
    assert len(drawn) > 2
    assert torch.equal(torch.cat(drawn), numbers[: 4 * len(drawn)])


def test_a_preset_of_the_processor_is_a_voice(voices: str) -> None:
    path = folder("bark").with_name("bark-voices")
    rng = np.random.default_rng(0)
    shapes = {"semantic_prompt": (6,), "coarse_prompt": (2, 9), "fine_prompt": (8, 9)}
    presets: dict[str, Any] = {"repo_or_path": str(path)}
    saved(path.name, tiny.BUILDERS["bark"]())
    for name in ("en_one", "en_two"):
        presets[name] = {key: f"{name}_{key}.npy" for key in shapes}
        for key, shape in shapes.items():
            np.save(path / f"{name}_{key}.npy", rng.integers(0, 900, shape))
    tiny_speech.JsonFile("speaker_embeddings_path.json", presets).save_pretrained(path)
    run = runner(path, voices)
    assert run.info.voices == ("en_one", "en_two")
    expected = by_library(run, 2, preprocess_params={"voice_preset": "en_two"})
    np.testing.assert_array_equal(speak(run, seed=2, voice="en_two"), expected)
    assert not np.array_equal(speak(run, seed=2), expected)


def test_every_family_of_the_library_that_speaks_is_listed() -> None:
    """One that a new version adds is compared here, or listed with the reason."""
    mappings = (
        modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES,
    )
    found = {name for mapping in mappings for name in mapping}
    assert found <= {*VOICES, *PROMPTS, *OTHERS}
    assert {*OTHERS} <= found
    assert {"vits", "speecht5", "bark", "musicgen", *PROMPTS} <= found


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VOICES_DIR with a recording and its transcript."""
    path = tmp_path_factory.mktemp("recordings")
    samples = np.random.default_rng(0).integers(-9000, 9000, tiny_speech.RATE // 8, np.int16)
    soundfile.write(path / "ann.wav", samples, tiny_speech.RATE)
    (path / "ann.txt").write_text("hello there\n")
    return path


def generated(name: str, prompt: str, audio: list[Any] | None, seed: int) -> Any:
    """Return the audio of the library's processor and model for a prompt."""
    library = hf.AutoProcessor.from_pretrained(folder(name))
    model = hf.AutoModelForTextToWaveform.from_pretrained(folder(name), dtype=torch.float32)
    inputs = library(text=prompt, audio=audio, add_special_tokens=False, return_tensors="pt")
    torch.manual_seed(seed)
    given = {"output_audio": True} if name == "csm" else {}
    output = model.generate(**inputs, **given, return_dict_in_generate=True)
    spoken: Any
    if "audio_latents" in output:
        [spoken] = library.decode(output.audio_latents, output.audio_latents_mask)
    elif "audio_sequences" in output:
        spoken = library.decode(output.audio_sequences)
    else:
        [spoken] = output.audio
    return np.squeeze(spoken.numpy())


@pytest.mark.parametrize("name", PROMPTS)
def test_a_conversation_is_spoken_as_by_the_library(name: str, voices: str) -> None:
    start, _, before, after = PROMPTS[name]
    run = runner(folder(name), voices)
    expected = generated(name, f"{start}{before}{TEXT}{after}", None, 4)
    assert len(expected) > 100
    np.testing.assert_array_equal(speak(run, seed=4), expected)


@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "gradium_phonon_tts"])
def test_a_recording_is_a_voice(name: str, recordings: Path) -> None:
    """The prompt has the recording, with its transcript before it where one is not spoken, and the
    text."""
    run = runner(folder(name), str(recordings))
    assert run.info.voices == ("ann",)
    rate = run.pipe.processor.feature_extractor.sampling_rate
    with Recording(str(recordings / "ann.wav"), rate, 1.0) as opened:
        samples = opened.read()
    expected = generated(
        name, TEXT.join(("".join(PROMPTS[name][:3]), PROMPTS[name][3])), [samples], 4
    )
    np.testing.assert_array_equal(speak(run, seed=4), expected)
    token = run.pipe.processor.audio_token
    with pytest.raises(InvalidInput, match="does not take the text"):
        speak(run, token)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_token_that_stands_for_audio_is_refused(name: str, voices: str) -> None:
    run = runner(folder(name), voices)
    with pytest.raises(InvalidInput, match="does not take the text"):
        speak(run, f"hello {run.pipe.processor.audio_token} there")


def test_a_text_without_audio_is_silent(voices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner.__wrapped__(folder("vibevoice"), voices)
    monkeypatch.setattr(run.pipe, "forward", lambda *_, **__: {"audio": [None]})
    assert len(speak(run)) == 0


@pytest.mark.parametrize(
    ("name", "codec"), [("csm", "MimiModel"), ("pocket_tts", "PocketTTSAudioTokenizerModel")]
)
def test_a_voice_is_encoded_once(
    name: str, codec: str, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, calls = getattr(hf, codec).encode, list[tuple[Any, ...]]()

    def counted(*values: Any, **named: Any) -> Any:
        calls.append(values)
        return encode(*values, **named)

    monkeypatch.setattr(getattr(hf, codec), "encode", counted)
    run = runner.__wrapped__(folder(name), str(recordings))
    speak(run, seed=1)
    speak(run, "another text", seed=1)
    assert len(calls) == 1


def test_files_that_are_no_recording_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("ann.wav", 1), ("bob.FLAC", 1), ("long.wav", 21)):
        soundfile.write(tmp_path / name, np.zeros(seconds * 8_000, np.int16), 8_000)
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    assert runner(folder("csm"), str(tmp_path)).info.voices == ("ann", "bob")
    assert caplog.text.count("voice left out") == 2
    assert "at most 20 seconds" in caplog.text


def test_a_model_that_answers_a_text_is_refused(
    voices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen's Omni models: tokens of the answer come before its audio."""
    answer = torch.tensor([[5, 6]]), torch.zeros(100)
    monkeypatch.setattr(hf.DiaForConditionalGeneration, "generate", lambda *_, **__: answer)
    with pytest.raises(LoadingFailed, match="it answers a text instead of speaking it"):
        runner.__wrapped__(folder("dia"), voices)


@pytest.mark.parametrize("voice", ["../ann", "/etc/passwd", "ann.npy", "repo_or_path", "", "\0"])
def test_an_unknown_voice_is_refused(voice: str, voices: str) -> None:
    with pytest.raises(InvalidInput, match=r"^voice must be one of ann, bob, not") as caught:
        speak(runner(folder("speecht5"), voices), voice=voice)
    assert caught.value.param == "voice"
    item: Any = WorkItem(PipelineInput(TEXT, {"voice": "x"}), float("inf"), 0.0)
    with pytest.raises(InvalidInput, match=r"^voice must be one of") as caught:
        runner(folder("speecht5"), voices).prepare(item)
    assert caught.value.param == "parameters.voice"


def test_files_that_are_no_embedding_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_speech.write_voices(tmp_path, "ann")
    np.save(tmp_path / "long.npy", np.zeros(9, np.float32))
    np.save(
        tmp_path / "objects.npy",
        np.array([0.5] * tiny_speech.EMBEDDING_SIZE, object),
        allow_pickle=True,
    )
    np.save(tmp_path / "words.npy", np.array(["a"] * tiny_speech.EMBEDDING_SIZE))
    np.save(tmp_path / "large.npy", np.zeros(1 << 20, np.float32))
    np.save(tmp_path / "infinite.npy", np.full(tiny_speech.EMBEDDING_SIZE, 1e300))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "empty.npy").touch()
    with (tmp_path / "archive.npy").open("wb") as archive:
        np.savez(archive, a=np.zeros(tiny_speech.EMBEDDING_SIZE))
    (tmp_path / "b\udcff.npy").write_bytes((tmp_path / "ann.npy").read_bytes())
    (tmp_path / "other.txt").write_text("hello")
    with caplog.at_level(logging.WARNING, "onequeue.speech"):
        assert runner(folder("speecht5"), str(tmp_path)).info.voices == ("ann",)
    assert sum("voice left out" in record.message for record in caplog.records) == 9


def test_a_long_text_is_refused(voices: str) -> None:
    item: Any = WorkItem(PipelineInput("a " * 501), float("inf"), 0.0)
    with pytest.raises(InvalidInput, match="has 1002 characters; at most 1000 are spoken here"):
        runner(folder("vits"), voices).prepare(item)


def refused(path: Path, voices: str) -> str:
    with pytest.raises(LoadingFailed) as caught:
        runner(path, voices)
    return str(caught.value)


def test_models_that_do_not_run_are_refused_at_load(voices: str) -> None:
    assert "speaker_embeddings` must be specified" in refused(folder("speecht5"), "none")
    assert "has no sampling_rate" in refused(folder("fastspeech2"), voices)


def test_a_model_that_needs_a_language_is_refused_at_load(voices: str) -> None:
    tokenizer = llama_tokenizer()
    config = hf.SeamlessM4TConfig(
        vocab_size=len(tokenizer), t2u_vocab_size=40, hidden_size=16, unit_hifi_gan_vocab_size=40,
        encoder_layers=1, decoder_layers=1, t2u_encoder_layers=1, t2u_decoder_layers=1,
        encoder_ffn_dim=16, decoder_ffn_dim=16, t2u_encoder_ffn_dim=16, t2u_decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, t2u_encoder_attention_heads=2,
        t2u_decoder_attention_heads=2, upsample_initial_channel=16, upsample_rates=[4],
        upsample_kernel_sizes=[8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]],
        unit_embed_dim=8, lang_embed_dim=8, spkr_embed_dim=8,
    )  # fmt: skip
    path = saved("seamless", [hf.SeamlessM4TForTextToSpeech(config), tokenizer])
    assert "tgt_lang" in refused(path, voices)


def test_the_forward_of_a_cancelled_sentence_ends_at_a_yield_point(voices: str) -> None:
    run = runner(folder("speecht5"), voices)
    item: Any = WorkItem(SpeechInput(TEXT, {"seed": 1}), float("inf"), 0.0)
    run.prepare(item)
    item.prepared.future = cancelled = type("Future", (), {"done": lambda self: True})()
    assert cancelled.done()
    assert run.forward([item.prepared]) == [None]
