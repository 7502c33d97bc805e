"""What a processor makes of a prompt with pictures (processor.py), and what of it goes through the
tower by itself: a picture, or each of the frames that the processor has cut it into.

Text and images as what a vision-language model takes: token ids, and tensors of each image.

    image  --look-->  View: its tensors, how many ids it fills  --text-->  ids and spans

The checkpoint's processor does all that is the family's own. It is asked twice: for each image by
itself, whose view can be kept, and for the text, with all views and no pixels. In pool threads:
nothing here changes after loading.

A checkpoint's processor: what makes tensors of images, and token ids of text with their places.

Several processors (Qwen2-VL's and its kin) come with one for videos, which wants torchvision.
Where it is missing, image processor and tokenizer are loaded apart and joined: videos are not
served. On the worker's thread, at load.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from batching.errors import InvalidInput

# How tensors' names begin that only what looks at images needs. Of the text, their shape is enough.
PIXELS = "pixel"

Tensors = dict[str, Tensor]


class ImageTile(NamedTuple):
    """What of an image goes through the tower by itself."""

    digest: bytes
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """An image as a model takes it. `told`: what the text is made by, of pixels their shape alone.
    `tensors`: for the model's forward. `count`: ids that it fills. `frames`: it is cut into; a
    whole image is one. `whole`: its pixels are here."""

    digest: bytes
    told: dict[str, Any]
    tensors: Tensors
    count: int
    frames: Sequence[ImageTile]
    whole: bool = True

    def without_pixels(self) -> "ImageFeatures":
        frames = [ImageTile(each.digest, {}) for each in self.frames]
        tensors = {n: each for n, each in self.tensors.items() if not n.startswith(PIXELS)}
        return replace(self, tensors=tensors, frames=frames, whole=False)

    @property
    def nbytes(self) -> int:
        parts = (*self.told.values(), *self.tensors.values())
        return sum(each.untyped_storage().nbytes() for each in parts if isinstance(each, Tensor))


class MultimodalItem(NamedTuple):
    """A frame at its places in a prompt, from `start` to before `stop`; between those may stand ids
    of text. `ids`: what stands there. `inputs`: what else the forward may take, of them [1, ids]
    and of the picture; `whole`: its pixels are among them."""

    start: int
    stop: int
    digest: bytes
    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    whole: bool

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of those that may be looked at together."""
        return self.ids, *((name, each.shape) for name, each in sorted(self.inputs.items()))

    @property
    def numbers(self) -> int:
        """How many the largest of its tensors has."""
        return max(each.numel() for each in self.inputs.values())


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ProcessorOutput:
    """`ids`: with as many places for each image as it fills. `inputs`: what else the forward takes
    of the text, [1, ids]. `pieces`: those of all `views`, in the order of their places."""

    ids: list[int]
    inputs: Tensors
    views: Sequence[ImageFeatures]
    pieces: Sequence[MultimodalItem]

    @property
    def images(self) -> list[Tensors]:
        """What the forward takes of each."""
        return [each.tensors for each in self.views]

    @property
    def nbytes(self) -> int:
        own = sum(each.nbytes for each in self.inputs.values())
        return own + sum(each.nbytes for each in self.views)


# Left out of what a model takes: ids have a place of their own, labels are for training.
NOT_INPUTS = ("input_ids", "attention_mask", "labels")
# Where a processor cuts a large image into parts, one that is looked at roughly stays whole.
ROUGH = {"do_image_splitting": False}
SIZES = (64, 64), (320, 192)  # of images by which a processor is known

# From an image processor's options to what it makes of the images that are looked at.
Look = Callable[[Mapping[str, Any]], Any]


class Processor:
    """`image_id`: the id of a place that an image fills. `limit`: ids that fit into the context."""

    def __init__(self, processor: Any, image_id: int, limit: int) -> None:
        self._processor = processor
        self.image_id = image_id
        self.limit = limit
        self.tokenizer = processor.tokenizer
        self.mark: str = processor.image_token  # for an image, in a text
        splits = hasattr(processor.image_processor, "do_image_splitting")
        self._rough = {"images_kwargs": ROUGH} if splits else {}
        self._axes = self._learned_axes()
        self._filled = self._learned_filling()

    def check_fits(self, ids: int, param: str) -> None:
        """InvalidInput unless so many leave room for an answer."""
        if ids >= self.limit:
            much = f"its images and text fill more than the {self.limit} tokens of the context"
            raise InvalidInput(much, param)

    def words(self, text: str) -> int:
        """How many ids a text has beside its images' places."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids) - text.count(self.mark)

    def filled(self, width: int, height: int) -> int:
        """How many ids an image of so many pixels fills at least, as far as that is known without
        looking at it."""
        patches, ids = self._filled
        try:
            return min(self._patches(width, height), self._patches(height, width)) * ids // patches
        except Exception:  # whatever the library raises: looking at it says what is wrong
            return 0

    def process(self, text: str, views: Sequence[ImageFeatures]) -> ProcessorOutput:
        """A text with a mark for each image, special tokens included. InvalidInput where the marks
        and places in it are not those of the images."""
        if text.count(self.mark) != len(views):
            marked = f"the text has {self.mark!r} in it, which stands for an image here"
            lost = "the model's chat template does not show the images"
            raise InvalidInput(lost if self.mark not in text else marked, "messages")
        told = [each.told for each in views]
        made = self._call(text, len(views), lambda _: self.joined(told))
        ids = _ids(made)
        places = [n for n, each in enumerate(ids) if each == self.image_id]
        if len(places) != sum(each.count for each in views):
            raise InvalidInput("the text has tokens in it that stand for images", "messages")
        names = made.keys() - told[0].keys() - set(NOT_INPUTS)
        inputs = {name: torch.tensor(made[name]) for name in names}
        pieces, first = list[MultimodalItem](), 0
        for view in views:
            for frame in view.frames:
                last = first + view.count // len(view.frames) - 1
                own = slice(places[first], places[last] + 1)
                given = {name: each[:, own] for name, each in inputs.items()} | frame.tensors
                there = own.start, own.stop, frame.digest, tuple(ids[own])
                pieces.append(MultimodalItem(*there, given, view.whole))
                first = last + 1
        return ProcessorOutput(ids, inputs, views, pieces)

    def joined(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What several images' tensors are together; the smaller are filled up with zeros."""
        if len(images) == 1:
            return dict(images[0])
        return {
            name: _concatenated([each[name] for each in images], self._axes[name])
            for name in images[0]
        }

    # ── an image ──

    def look(
        self, image: Image.Image, digest: bytes, rough: bool = False, param: str = "messages"
    ) -> ImageFeatures:
        """At an upright RGB image; `rough`: a glance will do. InvalidInput, which names `param`,
        for what the model's processor does not take."""
        kept: list[dict[str, Any]] = []

        def look(options: Mapping[str, Any]) -> dict[str, Any]:
            kept.append(self._features([image], options))
            return dict(kept[0])  # some take out what is theirs alone

        try:
            made = self._call(self.mark, 1, look, **(self._rough if rough else {}))
        except Exception as error:  # whatever the library raises
            width, height = image.size
            odd = f"the model does not take an image of {width} × {height} pixels"
            raise InvalidInput(odd, param) from error
        [features], count = kept, _ids(made).count(self.image_id)
        tensors = {
            n: features[n] for n in features.keys() & made.keys() if isinstance(features[n], Tensor)
        }
        told = {name: _told(name, each) for name, each in features.items()}
        return ImageFeatures(digest, told, tensors, count, self._frames(digest, tensors, count))

    def _frames(self, digest: bytes, tensors: Tensors, count: int) -> Sequence[ImageTile]:
        """Where all tensors have as many along the axis by which images are joined, and its ids
        divide into as many, it is cut; so no run of the tower is longer than one takes."""
        counts = {each.shape[self._axes[name]] for name, each in tensors.items()}
        frames = counts.pop() if len(counts) == 1 else 1
        if frames < 2 or count % frames:
            return [ImageTile(digest, tensors)]
        made = []
        for number in range(frames):
            named = hashlib.blake2b(digest + number.to_bytes(4), digest_size=32).digest()
            cut = {n: each.narrow(self._axes[n], number, 1) for n, each in tensors.items()}
            made.append(ImageTile(named, cut))
        return made

    def _features(self, images: list[Image.Image], options: Mapping[str, Any]) -> dict[str, Any]:
        made = self._processor.image_processor(images, **{**options, "return_tensors": "pt"})
        return dict(made)

    def _call(self, text: str, count: int, look: Look, **options: Any) -> Any:
        """The processor's own way, with `look` in the place of its image processor."""
        processor = copy.copy(self._processor)
        processor.image_processor = _StandIn(self._processor.image_processor, look)
        dots = [Image.new("RGB", (1, 1))] * count
        plain = dict.fromkeys(("add_special_tokens", "padding", "truncation", "verbose"), False)
        return processor(images=dots, text=[text], text_kwargs=plain, **options)

    def _patches(self, width: int, height: int) -> int:
        """As many image processors tell. Some tell rows and columns, too."""
        told = self._processor.image_processor.get_number_of_image_patches(height, width, {})
        return int(told[0] if isinstance(told, tuple) else told)

    def _learned_filling(self) -> tuple[int, int]:
        """Patches of an image, and the ids that it fills; no ids where these do not go together."""
        try:
            (patches, ids), (more, filled) = (
                (self._patches(*size), self.look(Image.new("RGB", size), b"").count)
                for size in SIZES
            )
        except Exception:  # it does not tell
            return 1, 0
        return (patches, ids) if patches * filled == more * ids else (1, 0)

    def _learned_axes(self) -> dict[str, int]:
        """Along which axis what is made of several images is joined: where that of two is as long
        as both alone."""
        image = Image.new("RGB", (64, 64))
        options: list[Mapping[str, Any]] = []

        def look(given: Mapping[str, Any]) -> Tensors:
            options.append(given)
            return self._features([image], given)

        self._call(self.mark, 1, look)
        one = self._features([image], options[0])
        two = self._features([image, image], options[0])
        return {
            name: next(n for n, size in enumerate(alone) if both[n] == 2 * size)
            for name in one
            for alone, both in [(np.shape(one[name]), np.shape(two[name]))]
        }


class _StandIn:
    """An image processor to look at, called in its place."""

    def __init__(self, image_processor: Any, look: Look) -> None:
        self._image_processor = image_processor
        self._look = look

    def __call__(self, images: Any, **options: Any) -> Any:
        return self._look(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)


def _ids(made: Mapping[str, Any]) -> list[int]:
    return [int(each) for each in made["input_ids"][0]]


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    if not isinstance(parts[0], Tensor):  # lists of numbers
        if axis:
            return [_concatenated(rows, axis - 1) for rows in zip(*parts, strict=True)]
        return [each for part in parts for each in part]
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    if all(map(_is_told, parts)):
        return parts[0].new_zeros(()).expand(shape)
    joined, start = parts[0].new_zeros(shape), 0
    for part in parts:
        place = [slice(size) for size in part.shape]
        place[axis] = slice(start, start + part.shape[axis])
        joined[tuple(place)] = part
        start += part.shape[axis]
    return joined


def _told(name: str, feature: Any) -> Any:
    """Of pixels a tensor of their shape that takes no memory."""
    if not (name.startswith(PIXELS) and isinstance(feature, Tensor)):
        return feature
    return feature.new_zeros(()).expand(feature.shape)


def _is_told(part: Tensor) -> bool:
    return part.untyped_storage().nbytes() < part.nbytes


PARTS: dict[str, Any] = {
    "image_processor": AutoImageProcessor,
    "tokenizer": AutoTokenizer,
    "feature_extractor": AutoFeatureExtractor,
}


def load_processor(path: str) -> Any:
    """A ProcessorMixin, its tokenizer with the checkpoint's chat template. ImportError names the
    package that is missing; ValueError if the checkpoint has no processor of images."""
    auto: Any = AutoProcessor
    try:
        processor = auto.from_pretrained(path, trust_remote_code=False)
    except ImportError as error:
        processor = _joined(path, error)
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise ValueError("the checkpoint has no processor of images (processor_config.json)")
    if not processor.tokenizer.chat_template:  # older checkpoints give it to the processor alone
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def _joined(path: str, error: ImportError) -> Any:
    """Of parts that load, without the one for videos; `error` if it was not that one's."""
    config = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    kind: Any = PROCESSOR_MAPPING.get(config, None)
    names = kind.get_attributes() if kind and not getattr(kind, "is_dummy", False) else []
    if "video_processor" not in names:
        raise error
    parts = {
        name: PARTS[name].from_pretrained(path, trust_remote_code=False)
        for name in names
        if name in PARTS
    }
    written, _ = kind.get_processor_dict(path)
    return _without_videos(kind).from_args_and_dict([parts.get(name) for name in names], written)


def _without_videos(kind: Any) -> Any:
    def check(self: Any, name: str, part: Any) -> Any:
        return part if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
