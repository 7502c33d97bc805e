"""Loads a speech model and creates its engine, on the worker's thread.

The architecture decides between Whisper (whisper.py, transcript.py) and CTC (ctc.py).
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModelForCTC, AutoModelForSpeechSeq2Seq

from worker.backends.cpu.linear import pack_weights
from worker.backends.cpu.linear_layers import packs_dtype
from worker.device.device import free_bytes, unreserved_bytes
from worker.engines.speech.alignment import Aligner
from worker.engines.speech.ctc import CtcDecoder, CtcReader, CtcRunner, CtcWindow, extract
from worker.engines.speech.engine import ENCODER_BATCH, SpeechEngine
from worker.engines.speech.log_mel import LogMel, LogMelReader
from worker.engines.speech.row_cache import row_bytes
from worker.engines.speech.transcript import WhisperDecoder
from worker.engines.speech.vocabulary import WhisperVocabulary
from worker.engines.speech.whisper import WhisperRunner, WhisperWindow
from worker.load_context import on_worker
from worker.media.audio import Recording
from worker.media.media_process import start_fork_server
from worker.messages.transcription import TranscriptionInput
from worker.model.loading import (
    LoadingFailed,
    ModelOptions,
    Pipe,
    TooLittleMemory,
    checkpoint_path,
    describe_missing_weights,
    load_checkpoint,
    load_errors,
    missing_weights_matter,
    model_info,
)

TASK = "automatic-speech-recognition"
MAX_ROWS = {"cpu": 16, "cuda": 64}  # windows that are decoded together
ROWS_MEMORY_SHARE = 0.5  # of the free memory that no cache has reserved


@dataclass(frozen=True, slots=True)
class SpeechOptions(ModelOptions):
    max_audio_s: float = 7200.0


@dataclass(frozen=True, slots=True)
class SpeechCheckpoint:
    model: Any  # a PreTrainedModel, whose type lacks the attributes of speech models
    tokenizer: Any
    extractor: Any


def load_speech(
    options: SpeechOptions, pipe: Pipe | None = None
) -> SpeechEngine[WhisperWindow] | SpeechEngine[CtcWindow]:
    """Raise LoadingFailed if the model cannot be served. `pipe`: a loaded pipeline of the model,
    whose weights are shared."""
    start_fork_server()
    with load_errors(options.model, "transcription", options.attention):
        missing: dict[str, str] = {}
        if pipe:
            model, tokenizer, extractor = pipe.model, pipe.tokenizer, pipe.feature_extractor
        else:
            path = checkpoint_path(options.model, "speech")
            model, tokenizer, missing = load_checkpoint(options, path, auto_class)
            extractor = AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False)
        engine = new_engine(SpeechCheckpoint(model, tokenizer, extractor), options)
        if missing_weights_matter(model, missing, lambda: repr(engine.run_example()).encode()):
            raise LoadingFailed(describe_missing_weights(missing))
    if model.device.type == "cpu" and packs_dtype(model.dtype):
        pack_weights(model, free_bytes(model.device), partial(on_worker, engine.warm_up))
    return engine


def auto_class(config: Any) -> Any:
    architectures = config.architectures or ()
    if any(architecture.endswith("ForCTC") for architecture in architectures):
        return AutoModelForCTC
    if config.model_type != "whisper":
        raise LoadingFailed(
            f"its architecture is {', '.join(architectures)}; Whisper and CTC models are supported"
        )
    return AutoModelForSpeechSeq2Seq


def new_engine(
    checkpoint: SpeechCheckpoint, options: SpeechOptions
) -> SpeechEngine[WhisperWindow] | SpeechEngine[CtcWindow]:
    if checkpoint.model.config.model_type == "whisper":
        return new_whisper_engine(checkpoint, options)
    return new_ctc_engine(checkpoint, options)


def new_whisper_engine(
    checkpoint: SpeechCheckpoint, options: SpeechOptions
) -> SpeechEngine[WhisperWindow]:
    model, mel = checkpoint.model, LogMel(checkpoint.extractor)
    config = model.generation_config
    vocabulary = WhisperVocabulary(checkpoint.tokenizer, config, model.config.max_target_positions)
    runner = WhisperRunner(model, vocabulary, max_rows(model))

    def open_decoder(payload: TranscriptionInput) -> WhisperDecoder:
        with ExitStack() as on_error:
            recording = Recording(payload.path, mel.sampling_rate, options.max_audio_s)
            reader = LogMelReader(mel, on_error.enter_context(recording))
            decoder = WhisperDecoder(payload, reader, vocabulary, config)
            on_error.pop_all()
        return decoder

    def example() -> WhisperWindow:
        silence = torch.zeros(model.config.num_mel_bins, mel.window_frames)
        language = next(iter(vocabulary.languages), "en")
        return WhisperWindow(silence, mel.window_frames, 0, (), language, "transcribe")

    info = model_info(TASK, options.name, model, model.num_parameters(), "continuous")
    return SpeechEngine(runner, open_decoder, info, example, Aligner(runner))


def max_rows(model: Any) -> int:
    """Return how many windows fit into memory. Raises TooLittleMemory if none does."""
    fitting = int(ROWS_MEMORY_SHARE * unreserved_bytes(model.device)) // row_bytes(model)
    if not fitting:
        raise TooLittleMemory(f"a window needs {row_bytes(model) / 1e9:.1f} GB of memory")
    return min(fitting, MAX_ROWS[model.device.type])


def new_ctc_engine(checkpoint: SpeechCheckpoint, options: SpeechOptions) -> SpeechEngine[CtcWindow]:
    model, extractor = checkpoint.model, checkpoint.extractor
    rate: int = extractor.sampling_rate
    runner = CtcRunner(model, ENCODER_BATCH[model.device.type])
    samples_per_frame = on_worker(lambda: measure_samples_per_frame(extractor, runner))

    def open_decoder(payload: TranscriptionInput) -> CtcDecoder:
        with ExitStack() as on_error:
            recording = on_error.enter_context(Recording(payload.path, rate, options.max_audio_s))
            reader = CtcReader(extractor, samples_per_frame, recording)
            decoder = CtcDecoder(payload, reader, checkpoint.tokenizer, samples_per_frame / rate)
            on_error.pop_all()
        return decoder

    info = model_info(TASK, options.name, model, model.num_parameters(), "same shape")
    return SpeechEngine(runner, open_decoder, info, lambda: silent_window(extractor, 1))


def silent_window(extractor: Any, seconds: int) -> CtcWindow:
    samples = np.zeros(seconds * extractor.sampling_rate, np.float32)
    return CtcWindow(extract(extractor, samples), len(samples), 0, 0, True)


def measure_samples_per_frame(extractor: Any, runner: CtcRunner) -> int:
    """Return the samples per output frame, from the outputs of two lengths of silence.
    Configurations give it in different units, or not at all."""
    short, long = silent_window(extractor, 1), silent_window(extractor, 3)
    for window in (short, long):
        runner.start([window])
        runner.remove(window)
    return round((long.samples - short.samples) / (len(long.ids) - len(short.ids)))
