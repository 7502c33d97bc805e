"""The runner of models that speak: text-to-audio, at `POST /` and `/v1/audio/speech`.

    prepare (pool): tokenize → forward (worker): model, vocoder or codec → finish (pool): int16

An item is one sentence. What a model takes is read from it: its speakers, a voice's embedding, the
presets of its processor, a recording as context, a rate of speech. The random numbers of an item
with a seed are its own, also where other models run at a yield point of its forward pass.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils.chat_template_utils import Chat as Conversation

from batching.errors import InvalidInput
from worker.engines.pipeline import limits
from worker.engines.pipeline.runner import (
    ModelInputs,
    NoTokens,
    PipelineItem,
    PipelineRunner,
    PreparedInput,
    check_tokens,
)
from worker.error_classification import first_line
from worker.media.audio import Recording
from worker.media.inputs import to_json
from worker.messages.synthesis import DEFAULT_VOICE, SpeechInput, SpokenAudio
from worker.model.loading import Pipe

log = logging.getLogger("onequeue.speech")

Json = Mapping[str, Any]
# From a text and a voice, which is a transcript and a recording or nothing, to a conversation.
Layout = Callable[[Json, Sequence[Json]], list[Json]]
RECORDINGS = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".webm")  # endings
# Arguments of a forward pass or `generate`.
SPEAKERS = ("speaker_id", "speaker_ids")
EMBEDDING_SIZES = {  # with the setting of the embedding's size
    "speaker_embeddings": "speaker_embedding_dim",
    "speaker_embedding": "speaker_embed_dim",
}
# Outputs of `generate` that a processor decodes; the library's pipeline takes the text's tokens.
CODES = ("audio_latents", "audio_latents_mask", "audio_sequences")
RATE = "speaking_rate"
MAX_SAMPLE = 32767
MAX_VOICE_S = 20.0  # of a recording
MAX_FRAMES = 1000  # of a sentence, where the checkpoint sets none; the pipeline's default is 256
MAX_CHARS = 1000  # of a text: attention is computed over all of it at once


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def turn(role: str, *parts: Json) -> Json:
    return {"role": role, "content": [*parts]}


INSTRUCTION = turn("system", text_part("Generate audio following instruction."))
# Conversations by which chat templates show a text and a voice: see find_layout.
LAYOUTS: Sequence[Layout] = (
    lambda text, voice: [*([turn("0", *voice)] if voice else ()), turn("0", text)],  # CSM
    lambda text, voice: [turn("0", *voice[1:], text)],  # VibeVoice
    lambda text, voice: [turn("user", *voice[1:], text)],  # Pocket TTS
    lambda text, voice: [
        INSTRUCTION, *map(turn, ("user", "assistant"), voice), turn("user", text)
    ],  # Higgs Audio
)  # fmt: skip


class Voice(NamedTuple):
    """`recording`: with its transcript, as a Layout takes it."""

    preprocess: Mapping[str, Any]  # arguments, as the next
    forward: Mapping[str, Any]
    recording: Sequence[Json] = ()


def find_layout(pipe: Pipe) -> Layout | None:
    """Return the layout that the processor's chat template shows in full, with a transcript before
    its recording: behind it, it would be spoken. None for a processor that takes plain text."""
    said, text = "This was said before.", "Speak this."
    audio = getattr(pipe.processor, "audio_token", None)
    for layout in LAYOUTS if audio and pipe.processor.chat_template else ():
        with suppress(Exception):  # of a template
            shown = pipe.processor.apply_chat_template(
                layout(text_part(text), (text_part(said), {"type": "audio"})),
                tokenize=False, add_generation_prompt=True,
            )  # fmt: skip
            if shown.find(said) < shown.index(audio) < shown.index(text):
                return layout
    return None


def encode_once(codec: Any) -> None:
    """Let a codec keep what it encodes: recordings of voices, as part of each sentence's prompt."""
    encode, kept = codec.encode, dict[bytes, Any]()

    def encode_kept(*values: torch.Tensor, **named: torch.Tensor) -> Any:
        digest = hashlib.blake2b()
        for tensor in (*values, *named.values()):
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        if (key := digest.digest()) not in kept:
            kept[key] = encode(*values, **named)
        return kept[key]

    codec.encode = encode_kept


def find_voices(pipe: Pipe, folder: str, layout: Layout | None) -> dict[str, Voice]:
    """Return the voices of a model by name; none if it takes no choice. `folder`: VOICES_DIR."""
    presets = getattr(pipe.processor, "available_voice_presets", None) or ()
    voices = {name: Voice({"voice_preset": name}, {}) for name in sorted(presets)}
    config = getattr(pipe.model.config, "model_config", pipe.model.config)  # beside a vocoder's
    for name in arguments(pipe):
        if name in SPEAKERS and (count := getattr(config, "num_speakers", None) or 1) > 1:
            voices |= {str(n): Voice({}, {name: torch.tensor([n])}) for n in range(count)}
        elif size := getattr(config, EMBEDDING_SIZES.get(name, ""), None):
            voices |= read_voices(
                folder, (".npy",), partial(embedded_voice, name, size, pipe.dtype)
            )
    if layout:
        voices |= read_voices(folder, RECORDINGS, partial(recorded_voice, pipe, layout))
    return voices


def read_voices(
    folder: str, endings: Sequence[str], read: Callable[[Path], Voice]
) -> dict[str, Voice]:
    """Return the voices of the files in VOICES_DIR with these endings, by their names."""
    voices = dict[str, Voice]()
    files = [] if folder == "none" else sorted(Path(folder).expanduser().iterdir())
    for file in [file for file in files if file.suffix.lower() in endings]:
        try:
            file.stem.encode()  # the name is sent to clients
            voices[file.stem] = read(file)
        except Exception as error:  # numpy and processors raise many kinds
            log.warning("voice left out file=%a reason=%s", file, first_line(error))
    return voices


def recorded_voice(pipe: Pipe, layout: Layout, file: Path) -> Voice:
    """Return the voice of a recording, whose transcript is in the file of the same name that ends
    in .txt. Raises errors of the processor."""
    with Recording(
        str(file), pipe.processor.feature_extractor.sampling_rate, MAX_VOICE_S
    ) as opened:
        samples = opened.read()
    said = file.with_suffix(".txt")
    text = said.read_text()[:MAX_CHARS].strip() if said.is_file() else ""
    voice = Voice({}, {}, (text_part(text), {"type": "audio", "audio": samples}))
    prompt = preprocess(pipe, layout, "a", voice)
    check_tokens([prompt], limits.context_limit(pipe), limits.vocabulary_size(pipe), "")
    return voice


def preprocess(pipe: Pipe, layout: Layout, text: str, voice: Voice) -> Any:
    """Return the model's inputs for a text in a voice. Raises errors of the processor."""
    messages: Any = layout(text_part(text), voice.recording)  # annotated as a single one
    return pipe.preprocess(Conversation(messages), processor_kwargs={"return_tensors": "pt"})


def arguments(pipe: Pipe) -> Mapping[str, inspect.Parameter]:
    """Return the arguments that the pipeline can pass on to the model, by name."""
    model = pipe.model
    return inspect.signature(model.generate if model.can_generate() else model.forward).parameters


def embedded_voice(name: str, size: int, dtype: torch.dtype, file: Path) -> Voice:
    """Return a voice whose embedding [1, size] is the argument `name` of the model. Raises
    ValueError, and errors of numpy."""
    values = np.load(file, allow_pickle=False)
    if values.size != size:
        raise ValueError(f"it has {values.size} numbers, the model takes {size}")
    embedding = torch.from_numpy(values.astype(np.float32).reshape(1, size)).to(dtype)
    if not embedding.isfinite().all():
        raise ValueError("it has a number that is not finite")
    return Voice({}, {name: embedding})


class RandomState:
    """The state of the random numbers of one item, apart from those of the process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        devices = {torch.device("cpu"), device}
        self._states = {d: torch.Generator(d).manual_seed(seed).get_state() for d in devices}

    def _exchange(self) -> None:
        for device, state in self._states.items():
            on_cpu = device.type == "cpu"
            generators: Any = torch.random if on_cpu else torch.get_device_module(device)
            where = () if on_cpu else (device,)
            self._states[device] = generators.get_rng_state(*where)
            generators.set_rng_state(state, *where)

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


class SynthesisRunner(PipelineRunner):
    """Runs sentences one by one. `voices`: by name, the default first."""

    voices: Mapping[str, Voice]

    def __post_init__(self) -> None:
        super().__post_init__()
        pipe = self.pipe
        self.layout = find_layout(pipe)
        config = getattr(pipe.model, "generation_config", None)
        if self.layout and config and config.max_new_tokens is None and config.max_length is None:
            config.max_new_tokens = MAX_FRAMES
        if pipe.vocoder is None and not pipe.model.can_generate():
            pipe.model.register_forward_hook(take_waveform)
        for holder, name in ((pipe.model, "codec_model"), (pipe.processor, "audio_tokenizer")):
            if codec := getattr(holder, name, None):
                encode_once(codec)

    # ── pool threads ──

    def prepare(self, item: PipelineItem) -> None:
        try:
            super().prepare(item)
        except InvalidInput as error:
            if isinstance(error, NoTokens) and getattr(item.payload, "is_part", False):
                item.prepared, item.key = PreparedInput([], {}, {}), id(item)
                return
            if isinstance(item.payload, SpeechInput) and error.param:
                error.param = error.param.removeprefix("parameters.").replace("inputs", "input")
            raise
        [row] = item.prepared.chunks
        if (mask := row.get("attention_mask")) is not None:  # some processors pad
            item.tokens = int(mask.sum())

    def _make_chunks(self, pipe: Pipe, inputs: Any, parameters: Mapping[str, Any]) -> PreparedInput:
        options: dict[str, Any] = {}
        if (truncation := parameters.get("truncation")) is not None:
            options["truncation"] = truncation
            if truncation and self.limit < min(limits.UNLIMITED, pipe.tokenizer.model_max_length):
                options["max_length"] = self.limit
        if len(inputs) > MAX_CHARS:
            reason = f"the text has {len(inputs)} characters; at most {MAX_CHARS} are spoken here"
            raise InvalidInput(f"{reason}, 4,096 at /v1/audio/speech", "inputs")
        voice = self._voice(parameters.get("voice", DEFAULT_VOICE))
        forward = {**voice.forward}
        if (speed := parameters.get("speed", 1)) != 1:
            if RATE not in arguments(pipe):
                reason = f"speed is {speed:g}; the model speaks at speed 1 only"
                raise InvalidInput(reason, "parameters.speed")
            forward[RATE] = speed * pipe.model.speaking_rate
        try:
            if self.layout:
                if pipe.processor.audio_token in inputs:  # some processors let it pass
                    raise ValueError("it has a token that stands for audio")
                chunks = [preprocess(pipe, self.layout, inputs, voice)]
            else:
                chunks = [pipe.preprocess(inputs, **voice.preprocess, **options)]
        except ValueError as error:  # of a processor: tokens that stand for audio
            raise InvalidInput(
                f"the model does not take the text: {first_line(error)}", "inputs"
            ) from error
        stages = {"forward_params": forward, "generate_kwargs": {}}
        prepared = PreparedInput(chunks, stages, {}, seed=parameters.get("seed"))
        hint = "" if self.layout else limits.TRUNCATION_HINT
        prepared.tokens = check_tokens(chunks, self.limit, self.vocabulary, hint)
        return prepared

    def _voice(self, name: str) -> Voice:
        """Return a voice; the default for any name where the model has one voice only."""
        if name in self.voices:
            return self.voices[name]
        if self.voices and name != DEFAULT_VOICE:
            known = ", ".join(self.voices)
            raise InvalidInput(
                f"voice must be one of {known}, not {name[:50]!r}", "parameters.voice"
            )
        return next(iter(self.voices.values()), Voice({}, {}))

    def finish(self, item: PipelineItem, raw: Any) -> Any:
        if not raw:
            return SpokenAudio(np.zeros(0, np.int16), int(self.pipe.sampling_rate), 0)
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
        if not item.chunks:
            return [[]]
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
        output = self.pipe.forward(row, **parameters)
        if isinstance(output, tuple) and not output[0].is_floating_point():
            raise ValueError("it answers a text instead of speaking it")
        if isinstance(output, dict):
            if codes := [output[name] for name in CODES if name in output]:
                output = {"audio": self.pipe.processor.decode(*codes)}
            elif isinstance(audio := output.get("audio"), list):  # None: the text is silent
                output = {"audio": [torch.zeros(0) if part is None else part for part in audio]}
        return [self.pipe.postprocess(output)]
