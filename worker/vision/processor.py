"""The checkpoint's own processor: media become tensors, text with media becomes token ids.

    item  --process_media-->  MediaFeatures  --process_text-->  ProcessorOutput: ids and items

Everything specific to a model family is left to the checkpoint's processor. It is called once for
each item alone, so that the features can be cached, and once for the text with the features of all
its media but without the encoder's inputs. Decoding files is not done here (media_preprocessor.py),
nor is running the encoder (encoder.py).

`Processor` runs in pool threads and does not change after loading. `load_processor` runs on the
worker's thread.
"""

import copy
import hashlib
import inspect
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

from batching.errors import InvalidInput, OnequeueError
from worker.error_classification import first_line
from worker.messages.generation import (
    LIMITS,
    NOUNS,
    PLURALS,
    TRANSCRIBE,
    Chat,
    MediaKind,
    transcription_chat,
)
from worker.vision.mistral import with_fast_tokenizer
from worker.vision.modality import (
    KIND_NAMES,
    NOT_INPUTS,
    Modality,
    Tensors,
    as_tensor,
    call_replaced,
    concatenate,
    find_modalities,
    is_encoder_input,
    token_ids,
    without_memory,
)
from worker.vision.video import VideoModality

# Options of an image processor that splits large images, for an image with `detail: low`.
LOW_DETAIL = {"do_image_splitting": False}
REQUEST = "apply_transcription_request"  # a method of processors for transcriptions


class MediaTile(NamedTuple):
    """A part of an item that the encoder runs by itself."""

    digest: bytes
    tensors: Tensors
    token_count: int


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """An item's tensors.

    `text_inputs`: what processing the text needs, with inputs of the encoder as tensors of their
    shape without memory. `size`: of the item, likewise. `tensors`: inputs of the model's forward.
    `token_count`: placeholder tokens of the item. `tiles`: its parts; an item that is not split is
    one tile. `is_complete`: False once the encoder's inputs have been dropped.
    """

    modality: Modality
    digest: bytes
    text_inputs: dict[str, Any]
    size: int
    tensors: Tensors
    token_count: int
    tiles: Sequence[MediaTile]
    is_complete: bool = True

    def without_encoder_inputs(self) -> "MediaFeatures":
        tiles = [tile._replace(tensors={}) for tile in self.tiles]
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not is_encoder_input(name, tensor)
        }
        return replace(self, tensors=tensors, tiles=tiles, is_complete=False)

    @property
    def seconds(self) -> float:
        """The length of a recording; 0 of other media."""
        rate = self.modality.sampling_rate
        return self.size / rate if rate else 0.0

    @property
    def nbytes(self) -> int:
        values = (*self.text_inputs.values(), *self.tensors.values())
        tensors = (value for value in values if isinstance(value, Tensor))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class MultimodalItem(NamedTuple):
    """A tile at its position in a prompt: tokens [start, stop), which may include text tokens
    between placeholders. `ids`: those tokens. `inputs`: other arguments of the forward, of the
    tokens [1, ids] and of the tile. A tile with tokens of another medium between its own has an
    item for each run of them, with the `ids` and `inputs` of all."""

    start: int
    stop: int
    digest: bytes
    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    is_complete: bool

    @property
    def shape(self) -> tuple[Any, ...]:
        """Items of equal shape can be encoded in one batch."""
        return self.ids, *((name, tensor.shape) for name, tensor in sorted(self.inputs.items()))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ProcessorOutput:
    """A processed prompt. `ids`: with `token_count` placeholders for each item. `inputs`: other
    arguments of the forward for the text, [1, ids] each. `media`, and `items`, the tiles of all:
    in the order of their positions. `sound_in_videos`: whether each video has its sound among its
    frames."""

    ids: list[int]
    inputs: Tensors
    media: Sequence[MediaFeatures]
    items: Sequence[MultimodalItem]
    sound_in_videos: bool = False

    def media_inputs(self, with_encoder_inputs: bool = True) -> Tensors:
        """Return the arguments of the forward for the media."""
        media = self.media
        if not with_encoder_inputs:
            media = [item.without_encoder_inputs() for item in media]
        names = dict.fromkeys(name for item in media for name in item.tensors)
        flags = {"use_audio_in_video": torch.tensor(True)} if self.sound_in_videos else {}
        return flags | {
            name: concatenate(
                [item.tensors[name] for item in media if name in item.tensors],
                next(item.modality.axes[name] for item in media if name in item.tensors),
            )
            for name in names
        }

    def placeholders(self, kind: MediaKind) -> int:
        """Return how many tokens stand for media of a kind."""
        return sum(item.token_count for item in self.media if item.modality.kind == kind)

    @property
    def nbytes(self) -> int:
        text_bytes = sum(tensor.nbytes for tensor in self.inputs.values())
        return text_bytes + sum(item.nbytes for item in self.media)


class Processor:
    """`config`: the model's. `modalities`: of the kinds that the processor takes. `failures`: why
    it does not take others. `exclusive`: pairs of kinds that are not taken in one prompt.
    `interleaves_sound`: whether it puts the tokens of a video's sound among those of its frames,
    and the model runs with them.
    `max_tokens`: the context length."""

    def __init__(self, processor: Any, config: Any, max_tokens: int) -> None:
        self._processor = processor
        self.config = config
        self.max_tokens = max_tokens
        self.tokenizer = processor.tokenizer
        classes: Mapping[MediaKind, type[Modality]] = {"video": VideoModality}
        self.modalities, self.failures = find_modalities(processor, config, classes)
        self.exclusive: set[frozenset[MediaKind]] = set()
        images = self.modalities.get("image")
        splits = images and hasattr(images.part, "do_image_splitting")
        self._low_detail = LOW_DETAIL if splits else {}
        self.interleaves_sound = False

    @property
    def settings(self) -> str:
        """The processor's own, as JSON: what features depend on besides the file."""
        return str(self._processor.to_json_string())

    def check_fits(self, tokens: int, param: str) -> None:
        """Raise InvalidInput, naming `param`, unless so many tokens leave room for output."""
        if tokens >= self.max_tokens:
            raise InvalidInput(
                f"the media and text fill more than the {self.max_tokens} tokens of the context",
                param,
            )

    def count_text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text without those that stand for media."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids) - sum(text.count(each.token) for each in self.modalities.values())

    def transcription_chat(self, prompt: str | None, language: str | None) -> Chat:
        """Return the conversation by which the processor asks for the text of a recording, without
        its file. Raises InvalidInput for a prompt or a language that it does not take."""
        request = getattr(_RequestRecorder.of(self._processor), REQUEST, None)
        accepted = inspect.signature(request).parameters if request else ()
        if not request:
            return transcription_chat(prompt, language)
        if language and "language" not in accepted:
            own = getattr(self._processor, "default_transcription_prompt", TRANSCRIBE)
            prompt, language = f"{prompt or own} Its language is {language}.", None
        if prompt and "prompt" not in accepted:
            raise InvalidInput.at("prompt", "is not taken by this model's transcription request")
        given = {"prompt": prompt, "language": language}
        try:
            [messages], options = request(
                [np.zeros(1)], **{name: value for name, value in given.items() if value}
            )
        except ValueError as error:
            raise InvalidInput.at("language", first_line(error)) from error
        return _chat_of(messages, options)

    def process_media(
        self,
        kind: MediaKind,
        item: Any,
        digest: bytes,
        low_detail: bool = False,
        param: str = "messages",
        limits: Mapping[str, float] = MappingProxyType({}),
    ) -> MediaFeatures:
        """Return the features of an item: of an upright RGB image, of mono samples at the
        modality's rate, or of a Video. `low_detail`: do not split the image. `limits`: options of
        the checkpoint's processor of this kind. Raises InvalidInput, naming `param`, if it rejects
        the item, and if it does not have the options."""
        modality = self.modalities[kind]
        for name in limits.keys() - modality.option_names:
            raise InvalidInput.at(f"{LIMITS}.{name}", "is no option of this model's processor")
        options = {**(self._low_detail if low_detail and kind == "image" else {}), **limits}
        try:
            features, outputs = modality.record(self._processor, [item], **options)
        except OnequeueError:  # of decoding
            raise
        except Exception as error:  # any error of the library
            message = f"the model does not take {modality.describe(item)}"
            raise InvalidInput(message, param) from error
        if not (count := token_ids(outputs).count(modality.token_id)):
            reason = f"the model reads nothing of {modality.describe(item)}"
            raise InvalidInput(reason, param)
        values = {
            name: as_tensor(outputs[name])
            for name in outputs.keys() & (modality.output_names | features.keys())
            if name not in NOT_INPUTS
        }
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        text_inputs = {name: without_memory(name, value) for name, value in features.items()}
        parts = modality.split(tensors, count)
        tiles = [MediaTile(digest, *parts[0])]
        if len(parts) > 1:
            tiles = [MediaTile(_tile_digest(digest, n), *part) for n, part in enumerate(parts)]
        size = modality.size(item)
        return MediaFeatures(modality, digest, text_inputs, size, tensors, count, tiles)

    def process_text(
        self,
        text: str,
        media: Sequence[MediaFeatures],
        video_options: Mapping[str, float] | None = None,
    ) -> ProcessorOutput:
        """Process a rendered prompt that has one token for each item, of each kind in order. Given
        `video_options`, those that the videos were processed with, the sound of each video follows
        it in `media` and has no token. Raises InvalidInput if the number of these tokens or of
        placeholders differs from that of the media."""
        ordered: list[tuple[int, MediaFeatures]] = []
        replaced, options = {}, dict[str, Any]()
        places = {
            kind: [match.start() for match in re.finditer(re.escape(each.token), text)]
            for kind, each in self.modalities.items()
        }
        if video_options is not None:
            videos, audio = places["video"], sorted(places["video"] + places["audio"])
            numbers = [videos.index(place) if place in videos else None for place in audio]
            options = {"load_audio_from_video": True, "audio_from_video_indices": numbers}
            video_options = video_options or self.modalities["video"].default_options
            options["videos_kwargs"], places["audio"] = {**video_options}, audio
        for kind, modality in self.modalities.items():
            features = [item for item in media if item.modality.kind == kind]
            self._check_tokens(text, modality, len(features), len(places[kind]))
            if features:
                modality.check_joinable([item.text_inputs for item in features])
                joined = partial(_joined_text_inputs, modality, features)
                blanks = [modality.blank(item.size) for item in features]
                replaced[modality] = blanks, joined
                ordered += zip(places[kind], features, strict=True)
        ordered.sort(key=lambda pair: pair[0])
        media = [item for _, item in ordered]
        self._check_together(media)
        try:
            outputs = call_replaced(self._processor, text, replaced, **options)
        except Exception as error:  # any error of the library
            reason = "the model's processor does not take this text beside media"
            raise InvalidInput(reason, "messages") from error
        ids = token_ids(outputs)
        media_names = {name for each in replaced for name in each.output_names}
        media_names |= {name for item in media for name in item.text_inputs}
        names = outputs.keys() - media_names - set(NOT_INPUTS)
        inputs = {name: torch.as_tensor(outputs[name]) for name in names}
        items: list[MultimodalItem] = []
        placeholder_ids = {each.token_id for each in self.modalities.values()}
        for token_id in placeholder_ids:
            positions = [n for n, token in enumerate(ids) if token == token_id]
            own = [item for item in media if item.modality.token_id == token_id]
            if len(positions) != sum(item.token_count for item in own):
                kinds = [k for k, each in self.modalities.items() if each.token_id == token_id]
                plurals = " or ".join(PLURALS[kind] for kind in kinds)
                raise InvalidInput(f"the text contains tokens that stand for {plurals}", "messages")
            items += _items(own, positions, ids, inputs, placeholder_ids - {token_id})
        items.sort(key=lambda item: item.start)
        return ProcessorOutput(ids, inputs, media, items, video_options is not None)

    def _check_together(self, media: Sequence[MediaFeatures]) -> None:
        """Raise InvalidInput for kinds that exclude each other, or pass the same argument in
        different layouts."""
        axes: dict[str, tuple[int, MediaKind]] = {}
        kinds = {item.modality.kind for item in media}
        excluded = [sorted(pair) for pair in self.exclusive if pair <= kinds]
        for item in media:
            for name in item.tensors:
                axis, kind = axes.setdefault(name, (item.modality.axes[name], item.modality.kind))
                if axis != item.modality.axes[name]:
                    excluded.append(sorted((kind, item.modality.kind)))
        for one, other in excluded:
            reason = f"this model does not take {PLURALS[one]} and {PLURALS[other]} in one prompt"
            raise InvalidInput(reason, "messages")

    def _check_tokens(self, text: str, modality: Modality, count: int, tokens: int) -> None:
        kind, token = modality.kind, modality.token
        if modality.max_items is not None and count > modality.max_items:
            reason = f"this model takes {NOUNS[kind]} in a conversation, not {count}"
            raise InvalidInput(reason, "messages")
        if tokens != count:
            raise InvalidInput(
                f"the text contains {token!r}, which stands for {NOUNS[kind]}"
                if token in text
                else f"the model's chat template does not show the {PLURALS[kind]}",
                "messages",
            )


class _RequestRecorder(ProcessorMixin):
    """Returns the conversation, and the options, that it would render. As the base of a processor's
    class it comes before the library's."""

    @classmethod
    def of(cls, processor: Any) -> Any:
        recorder = copy.copy(processor)
        recorder.__class__ = type(cls.__name__, (type(processor), cls), {})
        return recorder

    def apply_chat_template(self, conversation: Any, *_: Any, **options: Any) -> Any:
        return conversation, options


def _chat_of(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Chat:
    """Return a conversation of the library, without the samples in it. An empty beginning of the
    answer is left to the template."""
    chat = [
        {
            "role": message["role"],
            "content": [
                {"type": "audio"} if part["type"] == "audio" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    continues = bool(options.get("continue_final_message"))
    if continues and not any(part.get("text") for part in chat[-1]["content"]):
        chat, continues = chat[:-1], False
    known = {"tokenize", "return_dict", "add_generation_prompt", "continue_final_message"}
    variables = {name: value for name, value in options.items() if name not in known}
    return Chat((*chat,), (), variables, not continues, continues)


def _joined_text_inputs(
    modality: Modality, features: Sequence[MediaFeatures], given: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    return modality.concatenate([item.text_inputs for item in features])


def _items(
    media: Sequence[MediaFeatures],
    positions: Sequence[int],
    ids: Sequence[int],
    inputs: Tensors,
    others: Container[int],
) -> list[MultimodalItem]:
    """Return the tiles of media with one placeholder id, which is at `positions`. `others`: the
    placeholder ids of other media."""
    items, first = list[MultimodalItem](), 0
    for features in media:
        for tile in features.tiles:
            last = first + tile.token_count - 1
            span = range(positions[first], positions[last] + 1)
            kept = [n for n in span if ids[n] not in others]
            token_inputs = {name: tensor[:, kept] for name, tensor in inputs.items()}
            starts = [n for n in kept if n == span.start or ids[n - 1] in others]
            stops = [n + 1 for n in kept if n + 1 == span.stop or ids[n + 1] in others]
            items += [
                MultimodalItem(
                    start, stop, tile.digest, tuple(ids[n] for n in kept),
                    token_inputs | tile.tensors, features.is_complete,
                )
                for start, stop in zip(starts, stops, strict=True)
            ]  # fmt: skip
            first = last + 1
    return items


def _tile_digest(digest: bytes, number: int) -> bytes:
    return hashlib.blake2b(digest + number.to_bytes(4), digest_size=32).digest()


# ── loading ──


def load_processor(path: str) -> Any:
    """Load a checkpoint's ProcessorMixin, its tokenizer with the chat template. Raises ImportError,
    naming the missing package, or ValueError if the checkpoint has no part for media."""
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except ImportError as error:
        processor = _load_without_videos(path, error)
    parts = [name for names in KIND_NAMES.values() for name in names.attributes]
    if not isinstance(processor, ProcessorMixin) or not any(hasattr(processor, n) for n in parts):
        raise ValueError("the checkpoint has no image processor (processor_config.json)")
    called = with_fast_tokenizer(processor)
    if not called.tokenizer.chat_template:  # older checkpoints have it in the processor alone
        called.tokenizer.chat_template = processor.chat_template
    return called


def _load_without_videos(path: str, error: ImportError) -> Any:
    """Load a processor's parts without its video processor, which needs torchvision (Qwen2-VL and
    others). Raises `error` if the processor has no video processor."""
    config = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    settings, _ = ProcessorMixin.get_processor_dict(path)
    named = getattr(transformers, str(settings.get("processor_class")), None)
    cls: Any = PROCESSOR_MAPPING.get(config, None) or named
    names = cls.get_attributes() if cls and not getattr(cls, "is_dummy", False) else []
    if "video_processor" not in names:
        raise error
    loaders: Any = MODALITY_TO_AUTOPROCESSOR_MAPPING
    parts = [
        loaders[name].from_pretrained(path, trust_remote_code=False)
        if name in loaders and name != "video_processor"
        else None
        for name in names
    ]
    return _accept_missing_parts(cls).from_args_and_dict(parts, settings)


def _accept_missing_parts(cls: Any) -> Any:
    """Return a subclass whose constructor accepts None for a part."""

    def check(self: Any, name: str, part: Any) -> Any:
        return part if part is None else cls.check_argument_for_proper_class(self, name, part)

    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": check})
