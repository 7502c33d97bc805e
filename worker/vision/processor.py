"""The checkpoint's own processor: images become tensors, text with images becomes token ids.

    image  --process_image-->  ImageFeatures  --process_text-->  ProcessorOutput: ids and items

Everything specific to a model family is left to the checkpoint's processor. It is called once for
each image alone, so that the features can be cached, and once for the text with the features of all
its images but without their pixels. Decoding image files is not done here (image_preprocessor.py),
nor is running the vision encoder (encoder.py).

`Processor` runs in pool threads and does not change after loading. `load_processor` runs on the
worker's thread.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
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
from worker.messages.generation import LIMITS

# Tensors whose names start with this are read by the vision encoder alone. Processing the text
# needs only their shapes.
PIXEL_PREFIX = "pixel"
# Outputs of the processor that are not passed on: ids are a field of their own, labels are for
# training.
NOT_INPUTS = ("input_ids", "attention_mask", "labels")
# Options of an image processor that splits large images, for an image with `detail: low`.
LOW_DETAIL = {"do_image_splitting": False}

Tensors = dict[str, Tensor]
# From an image processor's options to its output.
ImageFunction = Callable[[Mapping[str, Any]], Any]


class ImageTile(NamedTuple):
    """A part of an image that the vision encoder runs by itself."""

    digest: bytes
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """An image's tensors.

    `text_inputs`: what processing the text needs, pixels as tensors of their shape without memory.
    `tensors`: inputs of the model's forward. `token_count`: placeholder tokens of the image.
    `tiles`: its parts; an image that is not split is one tile. `has_pixels`: False once the pixels
    have been dropped.
    """

    digest: bytes
    text_inputs: dict[str, Any]
    tensors: Tensors
    token_count: int
    tiles: Sequence[ImageTile]
    has_pixels: bool = True

    def without_pixels(self) -> "ImageFeatures":
        tiles = [ImageTile(tile.digest, {}) for tile in self.tiles]
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith(PIXEL_PREFIX)
        }
        return replace(self, tensors=tensors, tiles=tiles, has_pixels=False)

    @property
    def nbytes(self) -> int:
        values = (*self.text_inputs.values(), *self.tensors.values())
        tensors = (value for value in values if isinstance(value, Tensor))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class MultimodalItem(NamedTuple):
    """A tile at its position in a prompt: tokens [start, stop), which may include text tokens
    between placeholders. `ids`: those tokens. `inputs`: other arguments of the forward, of the
    tokens [1, ids] and of the tile."""

    start: int
    stop: int
    digest: bytes
    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    has_pixels: bool

    @property
    def shape(self) -> tuple[Any, ...]:
        """Items of equal shape can be encoded in one batch."""
        return self.ids, *((name, tensor.shape) for name, tensor in sorted(self.inputs.items()))

    @property
    def max_numel(self) -> int:
        """The number of elements of the largest input."""
        return max(tensor.numel() for tensor in self.inputs.values())


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ProcessorOutput:
    """A processed prompt. `ids`: with `token_count` placeholders for each image. `inputs`: other
    arguments of the forward for the text, [1, ids] each. `items`: the tiles of all `images`, in
    the order of their positions."""

    ids: list[int]
    inputs: Tensors
    images: Sequence[ImageFeatures]
    items: Sequence[MultimodalItem]

    @property
    def image_tensors(self) -> list[Tensors]:
        return [image.tensors for image in self.images]

    @property
    def nbytes(self) -> int:
        text_bytes = sum(tensor.nbytes for tensor in self.inputs.values())
        return text_bytes + sum(image.nbytes for image in self.images)


class Processor:
    """`image_token_id`: the placeholder's id. `max_tokens`: the context length."""

    def __init__(self, processor: Any, image_token_id: int, max_tokens: int) -> None:
        self._processor = processor
        self.image_token_id = image_token_id
        self.max_tokens = max_tokens
        self.tokenizer = processor.tokenizer
        self.image_token: str = processor.image_token  # stands for an image in a text
        splits = hasattr(processor.image_processor, "do_image_splitting")
        self._low_detail = LOW_DETAIL if splits else {}
        kwargs = getattr(processor.image_processor, "valid_kwargs", dict)
        self._takes = frozenset(getattr(kwargs, "__annotations__", ()))  # options of an image
        self._axes = self._infer_axes()

    def check_fits(self, tokens: int, param: str) -> None:
        """Raise InvalidInput, naming `param`, unless a prompt of so many tokens leaves room for
        output."""
        if tokens >= self.max_tokens:
            raise InvalidInput(
                f"the images and text fill more than the {self.max_tokens} tokens of the context",
                param,
            )

    def count_text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text without its image tokens."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids) - text.count(self.image_token)

    def process_image(
        self,
        image: Image.Image,
        digest: bytes,
        low_detail: bool = False,
        param: str = "messages",
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> ImageFeatures:
        """Return the features of an upright RGB image. `low_detail`: do not split it. `limits`:
        options of the checkpoint's image processor. Raises InvalidInput, naming `param`, if it
        rejects the image, and if it does not have the options."""
        for name in limits.keys() - self._takes:
            raise InvalidInput.at(f"{LIMITS}.{name}", "is no option of this model's processor")
        outputs: list[dict[str, Any]] = []

        def process(options: Mapping[str, Any]) -> dict[str, Any]:
            outputs.append(self._image_features([image], options))
            return dict(outputs[0])  # a copy: some processors remove entries

        try:
            images = {**(self._low_detail if low_detail else {}), **limits}
            options = {"images_kwargs": images} if images else {}
            inputs = self._call(self.image_token, 1, process, **options)
        except Exception as error:  # any error of the library
            width, height = image.size
            message = f"the model does not take an image of {width} × {height} pixels"
            raise InvalidInput(message, param) from error
        [features], count = outputs, _ids(inputs).count(self.image_token_id)
        tensors = {
            name: features[name]
            for name in features.keys() & inputs.keys()
            if isinstance(features[name], Tensor)
        }
        text_inputs = {name: _without_memory(name, value) for name, value in features.items()}
        tiles = self._split(digest, tensors, count)
        return ImageFeatures(digest, text_inputs, tensors, count, tiles)

    def process_text(self, text: str, images: Sequence[ImageFeatures]) -> ProcessorOutput:
        """Process a rendered prompt that has one image token for each image. Raises InvalidInput if
        the number of image tokens or of placeholders differs from that of the images."""
        if text.count(self.image_token) != len(images):
            raise InvalidInput(
                f"the text contains {self.image_token!r}, which stands for an image"
                if self.image_token in text
                else "the model's chat template does not show the images",
                "messages",
            )
        text_inputs = [image.text_inputs for image in images]
        outputs = self._call(text, len(images), lambda _: self.concatenate(text_inputs))
        ids = _ids(outputs)
        positions = [n for n, token in enumerate(ids) if token == self.image_token_id]
        if len(positions) != sum(image.token_count for image in images):
            raise InvalidInput("the text contains tokens that stand for images", "messages")
        names = outputs.keys() - text_inputs[0].keys() - set(NOT_INPUTS)
        inputs = {name: torch.tensor(outputs[name]) for name in names}
        items, first = list[MultimodalItem](), 0
        for image in images:
            for tile in image.tiles:
                last = first + image.token_count // len(image.tiles) - 1
                span = slice(positions[first], positions[last] + 1)
                token_inputs = {name: tensor[:, span] for name, tensor in inputs.items()}
                items.append(
                    MultimodalItem(
                        span.start, span.stop, tile.digest, tuple(ids[span]),
                        token_inputs | tile.tensors, image.has_pixels,
                    )
                )  # fmt: skip
                first = last + 1
        return ProcessorOutput(ids, inputs, images, items)

    def concatenate(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the tensors of several images; smaller ones are padded with zeros."""
        if len(images) == 1:
            return dict(images[0])
        return {
            name: _concatenate([image[name] for image in images], self._axes[name])
            for name in images[0]
        }

    def _split(self, digest: bytes, tensors: Tensors, count: int) -> Sequence[ImageTile]:
        """Split an image into tiles, which bounds the time of one encoder run. It is split if all
        its tensors are equally long along the axis that joins images, and that length divides its
        `count` of tokens."""
        lengths = {tensor.shape[self._axes[name]] for name, tensor in tensors.items()}
        length = lengths.pop() if len(lengths) == 1 else 1
        if length < 2 or count % length:
            return [ImageTile(digest, tensors)]
        tiles = []
        for number in range(length):
            tile_digest = hashlib.blake2b(digest + number.to_bytes(4), digest_size=32).digest()
            part = {
                name: tensor.narrow(self._axes[name], number, 1) for name, tensor in tensors.items()
            }
            tiles.append(ImageTile(tile_digest, part))
        return tiles

    def _image_features(
        self, images: list[Image.Image], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        return dict(self._processor.image_processor(images, **{**options, "return_tensors": "pt"}))

    def _call(self, text: str, count: int, process: ImageFunction, **options: Any) -> Any:
        """Call the checkpoint's processor, with `process` in place of its image processor and blank
        images."""
        processor = copy.copy(self._processor)
        processor.image_processor = _ReplacedImageProcessor(
            self._processor.image_processor, process
        )
        blank = [Image.new("RGB", (1, 1))] * count
        plain = dict.fromkeys(("add_special_tokens", "padding", "truncation", "verbose"), False)
        return processor(images=blank, text=[text], text_kwargs=plain, **options)

    def _infer_axes(self) -> dict[str, int]:
        """Return the axis along which each feature of several images is joined: the one that is
        twice as long for two images as for one."""
        image = Image.new("RGB", (64, 64))
        calls: list[Mapping[str, Any]] = []

        def process(options: Mapping[str, Any]) -> Tensors:
            calls.append(options)
            return self._image_features([image], options)

        self._call(self.image_token, 1, process)
        one = self._image_features([image], calls[0])
        two = self._image_features([image, image], calls[0])
        return {
            name: next(n for n, size in enumerate(single) if double[n] == 2 * size)
            for name in one
            for single, double in [(np.shape(one[name]), np.shape(two[name]))]
        }


class _ReplacedImageProcessor:
    """An image processor whose attributes stay and whose call is replaced."""

    def __init__(self, image_processor: Any, process: ImageFunction) -> None:
        self._image_processor = image_processor
        self._process = process

    def __call__(self, images: Any, **options: Any) -> Any:
        return self._process(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)


def _ids(outputs: Mapping[str, Any]) -> list[int]:
    return [int(token) for token in outputs["input_ids"][0]]


def _concatenate(parts: Sequence[Any], axis: int) -> Any:
    if not isinstance(parts[0], Tensor):  # nested lists of numbers
        if axis:
            return [_concatenate(rows, axis - 1) for rows in zip(*parts, strict=True)]
        return [value for part in parts for value in part]
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    if all(map(_has_no_memory, parts)):
        return parts[0].new_zeros(()).expand(shape)
    joined, start = parts[0].new_zeros(shape), 0
    for part in parts:
        region = [slice(size) for size in part.shape]
        region[axis] = slice(start, start + part.shape[axis])
        joined[tuple(region)] = part
        start += part.shape[axis]
    return joined


def _without_memory(name: str, feature: Any) -> Any:
    """Replace pixels by a tensor of the same shape that takes no memory."""
    if not (name.startswith(PIXEL_PREFIX) and isinstance(feature, Tensor)):
        return feature
    return feature.new_zeros(()).expand(feature.shape)


def _has_no_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.nbytes


# ── loading ──

PARTS: dict[str, Any] = {
    "image_processor": AutoImageProcessor,
    "tokenizer": AutoTokenizer,
    "feature_extractor": AutoFeatureExtractor,
}


def load_processor(path: str) -> Any:
    """Load a checkpoint's ProcessorMixin, its tokenizer with the chat template. Raises ImportError,
    naming the missing package, or ValueError if the checkpoint has no image processor."""
    auto: Any = AutoProcessor
    try:
        processor = auto.from_pretrained(path, trust_remote_code=False)
    except ImportError as error:
        processor = _load_without_videos(path, error)
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise ValueError("the checkpoint has no image processor (processor_config.json)")
    if not processor.tokenizer.chat_template:  # older checkpoints have it in the processor alone
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def _load_without_videos(path: str, error: ImportError) -> Any:
    """Load a processor's parts without its video processor, which needs torchvision (Qwen2-VL and
    others). Raises `error` if the processor has no video processor."""
    config = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    cls: Any = PROCESSOR_MAPPING.get(config, None)
    names = cls.get_attributes() if cls and not getattr(cls, "is_dummy", False) else []
    if "video_processor" not in names:
        raise error
    parts = {
        name: PARTS[name].from_pretrained(path, trust_remote_code=False)
        for name in names
        if name in PARTS
    }
    settings, _ = cls.get_processor_dict(path)
    without_videos = _accept_missing_parts(cls)
    return without_videos.from_args_and_dict([parts.get(name) for name in names], settings)


def _accept_missing_parts(cls: Any) -> Any:
    """Return a subclass whose constructor accepts None for a part."""

    def check(self: Any, name: str, part: Any) -> Any:
        return part if part is None else cls.check_argument_for_proper_class(self, name, part)

    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": check})
