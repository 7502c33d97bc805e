"""From settings to a speech engine with its model, on the worker's thread."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModelForCTC, AutoModelForSpeechSeq2Seq

from worker.device.device import free_bytes
from worker.media.audio import Recording
from worker.messages.transcription import TranscriptionInput
from worker.model.cpu.linear import pack_weights, packs_dtype
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    Pipe,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    local_path,
    missing_weights_matter,
    model_info,
)
from worker.speech.alignment import Aligner
from worker.speech.cache import row_bytes
from worker.speech.ctc import AudioChunk, AudioChunks, CtcDecoder, CtcRunner, inputs_of
from worker.speech.engine import ENCODED, SpeechEngine
from worker.speech.features import Frames, LogMel
from worker.speech.transcript import WhisperDecoder
from worker.speech.vocabulary import WhisperVocabulary
from worker.speech.whisper import WhisperRunner, Window

TASK = "automatic-speech-recognition"
# Windows that are decoded together at most, and the share of free memory that their rows may take.
MOST_ROWS = {"cpu": 16, "cuda": 64}
ROWS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class SpeechOptions(ModelOptions):
    max_audio_s: float = 7200.0


@dataclass(frozen=True, slots=True)
class Speech:
    """A checkpoint in memory."""

    model: Any  # a PreTrainedModel; what one of speech has besides is not in its type
    tokenizer: Any
    extractor: Any
    lacking: dict[str, str] = field(default_factory=dict)  # weights that it has not, by name


def load_speech(options: SpeechOptions, pipe: Pipe | None = None) -> SpeechEngine:
    """LoadingFailed if the model cannot be served. `pipe` has it loaded already, for POST /."""
    with load_errors(options.model, "transcription"):
        given = pipe and Speech(pipe.model, pipe.tokenizer, pipe.feature_extractor)
        speech = given or load_speech_checkpoint(options)
        model, lacking, engine = speech.model, speech.lacking, speech_engine(speech, options)
        if missing_weights_matter(model, lacking, lambda: repr(engine.try_example()).encode()):
            raise LoadingFailed(describe_missing_weights(lacking))
    if model.device.type == "cpu" and packs_dtype(model.dtype):
        pack_weights(model, free_bytes(model.device), engine.warm_up)
    return engine


def kind_of(config: Any) -> Any:
    """The auto class for a configuration."""
    kinds = config.architectures or ()
    if any(kind.endswith("ForCTC") for kind in kinds):
        return AutoModelForCTC
    if config.model_type != "whisper":
        raise LoadingFailed(f"it is neither Whisper nor a CTC model, but {', '.join(kinds)}")
    return AutoModelForSpeechSeq2Seq


def load_speech_checkpoint(options: SpeechOptions) -> Speech:
    path = local_path(options.model, "speech")
    model, tokenizer, lacking = load_checkpoint(options, path, kind_of)
    untyped: Any = AutoFeatureExtractor
    extractor = untyped.from_pretrained(path, trust_remote_code=False)
    return Speech(model, tokenizer, extractor, lacking)


def speech_engine(speech: Speech, options: SpeechOptions) -> SpeechEngine:
    is_whisper = speech.model.config.model_type == "whisper"
    return (whisper_engine if is_whisper else ctc_engine)(speech, options)


def whisper_engine(speech: Speech, options: SpeechOptions) -> SpeechEngine:
    model, mel = speech.model, LogMel(speech.extractor)
    config = model.generation_config
    vocabulary = WhisperVocabulary(speech.tokenizer, config, model.config.max_target_positions)
    runner = WhisperRunner(model, vocabulary, rows_of(model))

    def open_audio(payload: TranscriptionInput) -> Frames:
        return Frames(mel, Recording(payload.path, mel.rate, options.max_audio_s))

    def read_text(payload: TranscriptionInput, frames: Frames) -> WhisperDecoder:
        return WhisperDecoder(payload, frames, vocabulary, config)

    def example() -> Window:
        silence = torch.zeros(model.config.num_mel_bins, mel.window)
        language = next(iter(vocabulary.languages), "en")
        return Window(silence, mel.window, 0, (), language, "transcribe")

    info = model_info(TASK, options.model, model, model.num_parameters(), "continuous")
    return SpeechEngine(runner, open_audio, read_text, info, example, Aligner(runner))


def rows_of(model: Any) -> int:
    fit = int(ROWS_SHARE * free_bytes(model.device)) // row_bytes(model)
    if not fit:
        raise LoadingFailed(f"a window needs {row_bytes(model) / 1e9:.1f} GB of memory")
    return min(fit, MOST_ROWS[model.device.type])


def ctc_engine(speech: Speech, options: SpeechOptions) -> SpeechEngine:
    model, extractor = speech.model, speech.extractor
    rate: int = extractor.sampling_rate
    runner = CtcRunner(model, ENCODED[model.device.type])
    moment = moment_of(extractor, runner)

    def open_audio(payload: TranscriptionInput) -> AudioChunks:
        return AudioChunks(extractor, moment, Recording(payload.path, rate, options.max_audio_s))

    def read_text(payload: TranscriptionInput, chunks: AudioChunks) -> CtcDecoder:
        return CtcDecoder(payload, chunks, speech.tokenizer, moment / rate)

    info = model_info(TASK, options.model, model, model.num_parameters(), "same shape")
    return SpeechEngine(runner, open_audio, read_text, info, lambda: silence(extractor, 1))


def silence(extractor: Any, seconds: int) -> AudioChunk:
    samples = np.zeros(seconds * extractor.sampling_rate, np.float32)
    return AudioChunk(inputs_of(extractor, samples), len(samples), 0, 0, True)


def moment_of(extractor: Any, runner: CtcRunner) -> int:
    """Samples for which a letter is said, by what longer sound has more of: configurations count
    them in frames of features, or not at all, and the ends of any sound have more or less."""
    short, long = silence(extractor, 1), silence(extractor, 3)
    for chunk in (short, long):
        runner.begin([chunk])
        runner.leave(chunk)
    return round((long.samples - short.samples) / (len(long.said) - len(short.said)))
