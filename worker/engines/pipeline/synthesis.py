"""The runner of models that speak: text-to-audio, at `POST /` and `/v1/audio/speech`.

    prepare (pool): tokenize → forward (worker): model, vocoder or codec → finish (pool): int16

An item is one sentence. What a model takes is read from it: its speakers, a voice's embedding, the
presets of its processor, a rate of speech. The random numbers of an item with a seed are its own,
also where other models run at a yield point of its forward pass.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from batching.errors import InvalidInput
from worker.engines.pipeline import limits
from worker.engines.pipeline.runner import (
    ModelInputs,
    PipelineItem,
    PipelineRunner,
    PreparedInput,
    check_tokens,
)
from worker.error_classification import first_line
from worker.media.inputs import to_json
from worker.messages.synthesis import DEFAULT_VOICE, SpeechInput, SpokenAudio
from worker.model.loading import Pipe

log = logging.getLogger("onequeue.speech")

SPEAKERS = ("speaker_id", "speaker_ids")  # arguments of a forward pass or `generate`
EMBEDDINGS = {  # further arguments, with the setting of the embedding's size
    "speaker_embeddings": "speaker_embedding_dim",
    "speaker_embedding": "speaker_embed_dim",
}
RATE = "speaking_rate"  # attribute of models that speak at any speed
MAX_SAMPLE = 32767
MAX_VOICES = 1000
MAX_EMBEDDING_BYTES = 1 << 20


class Voice(NamedTuple):
    """The arguments of a voice."""

    preprocess: Mapping[str, Any]
    forward: Mapping[str, Any]


def find_voices(pipe: Pipe, folder: str) -> dict[str, Voice]:
    """Return the voices of a model by name; none if it takes no choice. `folder`: VOICES_DIR."""
    presets = getattr(pipe.processor, "available_voice_presets", None) or ()
    voices = {name: Voice({"voice_preset": name}, {}) for name in sorted(presets)}
    model = pipe.model
    arguments = inspect.signature(model.generate if model.can_generate() else model.forward)
    config = getattr(model.config, "model_config", model.config)  # of a model with its vocoder
    for name in arguments.parameters:
        if name in SPEAKERS:
            count = getattr(config, "num_speakers", None) or 1
            ids = range(count) if count > 1 else ()
            voices |= {str(n): Voice({}, {name: torch.tensor([n])}) for n in ids}
        elif name in EMBEDDINGS and folder != "none":
            size = getattr(config, EMBEDDINGS[name], None) or 0
            files = sorted(Path(folder).expanduser().glob("*.npy")) if size else []
            for file in files[:MAX_VOICES]:
                if (embedding := read_embedding(file, size, pipe.dtype)) is not None:
                    voices[file.stem] = Voice({}, {name: embedding})
    return voices


def read_embedding(file: Path, size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a speaker's embedding [1, size]; None if a file has none of this size."""
    try:
        if file.stat().st_size > MAX_EMBEDDING_BYTES:
            raise ValueError(f"it is larger than {MAX_EMBEDDING_BYTES} bytes")
        values = np.load(file, allow_pickle=False)
        if values.size != size:
            raise ValueError(f"it has {values.size} numbers, the model takes {size}")
        return torch.from_numpy(values.astype(np.float32).reshape(1, size)).to(dtype)
    except (OSError, ValueError) as error:
        log.warning("voice left out file=%s reason=%s", file, first_line(error))
        return None


class RandomState:
    """The state of the random numbers of one item, apart from those of the process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        devices = {torch.device("cpu"), device}
        self._states = {d: torch.Generator(d).manual_seed(seed).get_state() for d in devices}

    def _exchange(self) -> None:
        """Exchange the state of the process' generators with this one."""
        for device, state in self._states.items():
            if device.type == "cpu":
                self._states[device] = torch.get_rng_state()
                torch.set_rng_state(state)
            else:
                module = torch.get_device_module(device)
                self._states[device] = module.get_rng_state(device)
                module.set_rng_state(state, device)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Draw from this state inside; within another use of it, from that of the process."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()


def take_waveform(model: object, inputs: object, output: Any) -> Any:
    """Return a model's audio alone: the pipeline takes the first output, which may be another."""
    return (output["waveform"],) if "waveform" in output else output


@dataclass(slots=True)
class PreparedSpeech(PreparedInput):
    speed: float = 1.0
    seed: int | None = None


class SynthesisRunner(PipelineRunner):
    """Runs sentences one by one. `voices`: by name, the default first."""

    voices: Mapping[str, Voice]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipe.vocoder is None and not self._model.can_generate():
            self._model.register_forward_hook(take_waveform)

    @property
    def _model(self) -> Any:
        return self.pipe.model

    # ── pool threads ──

    def prepare(self, item: PipelineItem) -> None:
        payload = item.payload
        is_speech = isinstance(payload, SpeechInput)
        self._check(payload.parameters, "" if is_speech else "parameters.")
        try:
            super().prepare(item)
        except InvalidInput as error:
            if is_speech and error.param == "inputs":
                error.param = "input"
            raise
        [row] = item.prepared.chunks
        if (mask := row.get("attention_mask")) is not None:  # some processors pad
            item.tokens = int(mask.sum())

    def _check(self, parameters: Mapping[str, Any], path: str) -> None:
        """Raise InvalidInput for a voice or a speed that the model does not have."""
        voice = parameters.get("voice", DEFAULT_VOICE)
        if self.voices and voice not in (DEFAULT_VOICE, *self.voices):
            names = ", ".join(self.voices)
            raise InvalidInput.at(f"{path}voice", f"must be one of {names}, not {voice[:50]!r}")
        if parameters.get("speed", 1) != 1 and not hasattr(self._model, RATE):
            reason = f"is {parameters['speed']:g}; the model speaks at speed 1 only"
            raise InvalidInput.at(f"{path}speed", reason)

    def _make_chunks(self, pipe: Pipe, inputs: Any, parameters: Mapping[str, Any]) -> PreparedInput:
        options: dict[str, Any] = {}
        if (truncation := parameters.get("truncation")) is not None:
            options["truncation"] = truncation
            if truncation and self.limit < min(limits.UNLIMITED, pipe.tokenizer.model_max_length):
                options["max_length"] = self.limit
        default = next(iter(self.voices.values()), Voice({}, {}))
        voice = self.voices.get(parameters.get("voice", DEFAULT_VOICE), default)
        chunks = [pipe.preprocess(inputs, **voice.preprocess, **options)]
        forward = {"forward_params": dict(voice.forward), "generate_kwargs": {}}
        speed, seed = parameters.get("speed", 1.0), parameters.get("seed")
        prepared = PreparedSpeech(chunks, forward, {}, speed=speed, seed=seed)
        prepared.tokens = check_tokens(chunks, self.limit, self.vocabulary, limits.TRUNCATION_HINT)
        return prepared

    def finish(self, item: PipelineItem, raw: Any) -> Any:
        [output] = raw
        if not isinstance(item.payload, SpeechInput):
            return to_json(output)
        audio = np.nan_to_num(np.asarray(output["audio"], np.float32))
        if audio.ndim > 1:  # channels come first
            audio = audio.mean(0)
        samples = np.rint(audio.clip(-1, 1) * MAX_SAMPLE).astype(np.int16)
        return SpokenAudio(samples, int(output["sampling_rate"]), item.tokens)

    # ── the worker's thread ──

    def forward(self, prepared: list[Any]) -> list[Any]:
        [item] = prepared
        if item.seed is None:
            return super().forward(prepared)
        random = RandomState(item.seed, self.pipe.device)
        self._yield_points.outside = random.exchanged
        try:
            with random.exchanged():
                return super().forward(prepared)
        finally:
            self._yield_points.outside = nullcontext

    def _forward_rows(
        self, rows: list[ModelInputs], parameters: dict[str, Any], masks: list[list[int]] | None
    ) -> list[Any]:
        """Return the audio of one sentence. A codec, which is a part of the pipeline's
        postprocessing, runs here too."""
        [row] = rows
        return [self.pipe.postprocess(self.pipe.forward(row, **parameters))]

    def _forward(self, prepared: list[Any]) -> list[Any]:
        [item] = prepared
        rate = getattr(self._model, RATE, None)
        if rate is None or item.speed == 1:
            return super()._forward(prepared)
        setattr(self._model, RATE, rate * item.speed)
        try:
            return super()._forward(prepared)
        finally:
            setattr(self._model, RATE, rate)
