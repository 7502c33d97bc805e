"""From settings to a speech engine with its model, on the worker's thread."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedModel,
)

from worker.model import cpu_linear, missing_weights
from worker.model.loading import (
    LoadingFailed,
    attention_keywords,
    check_fits,
    choose_device,
    choose_dtype,
    free_bytes,
    loading,
)
from worker.protocol import ModelInfo
from worker.speech.alignment import Aligner
from worker.speech.cache import row_bytes
from worker.speech.engine import SpeechEngine
from worker.speech.features import Frames, LogMel
from worker.speech.recording import Recording
from worker.speech.transcript import Transcript
from worker.speech.vocabulary import Vocabulary
from worker.speech.whisper import WhisperRunner, Window
from worker.transcription import TranscriptionInput

log = logging.getLogger("onequeue.speech")

# Windows that are decoded together at most, and the share of free memory that their rows may take.
MOST_ROWS = {"cpu": 16, "cuda": 64}
ROWS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    model: str
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    max_audio_s: float = 7200.0


@dataclass(frozen=True, slots=True)
class Speech:
    """A checkpoint in memory."""

    model: Any
    tokenizer: Any
    extractor: Any


def load_speech(options: SpeechOptions) -> SpeechEngine:
    """LoadingFailed if the model cannot be served."""
    name = options.model
    log.info("loading transcription model=%s", name)
    with loading(f"the transcription model {name!r} could not be loaded"):
        speech = load_checkpoint(options)
        return speech_engine(speech, options)


def load_checkpoint(options: SpeechOptions) -> Speech:
    path = options.model
    device = choose_device(options.device)
    check_fits(path, options.dtype, device)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    auto: Any = AutoModelForSpeechSeq2Seq
    model, info = auto.from_pretrained(
        path,
        config=config,
        dtype=choose_dtype(options.dtype, path, device),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
        **attention_keywords(options.attention),
    )
    if lacking := missing_weights.names_of(info):
        raise LoadingFailed(f"its checkpoint has no weights for {missing_weights.shown(lacking)}")
    model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    extractor = AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False)
    return Speech(model, tokenizer, extractor)


def speech_engine(speech: Speech, options: SpeechOptions) -> SpeechEngine:
    model, mel = speech.model, LogMel(speech.extractor)
    config = model.generation_config
    vocabulary = Vocabulary(speech.tokenizer, config, model.config.max_target_positions)
    runner = WhisperRunner(model, vocabulary, rows_of(model))

    def open_text(payload: TranscriptionInput) -> Transcript:
        record = partial(Recording, payload.path, mel.rate, options.max_audio_s)
        return Transcript(payload, Frames(mel, record), vocabulary, config)

    def example() -> Window:
        silence = torch.zeros(model.config.num_mel_bins, mel.window)
        language = next(iter(vocabulary.languages), "en")
        return Window(silence, mel.window, 0, (), language, "transcribe")

    engine = SpeechEngine(runner, open_text, info_of(options, model), example, Aligner(runner))
    if model.device.type == "cpu" and cpu_linear.packs(model.dtype):
        cpu_linear.pack(model, free_bytes(model.device), engine.warm_up)
        runner.head = model.proj_out
    return engine


def rows_of(model: PreTrainedModel) -> int:
    fit = int(ROWS_SHARE * free_bytes(model.device)) // row_bytes(model)
    if not fit:
        raise LoadingFailed(f"a window needs {row_bytes(model) / 1e9:.1f} GB of memory")
    return min(fit, MOST_ROWS[model.device.type])


def info_of(options: SpeechOptions, model: Any) -> ModelInfo:
    return ModelInfo(
        task="automatic-speech-recognition",
        model=options.model,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
        batching="continuous",
    )
