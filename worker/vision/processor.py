"""Text and images as what a vision-language model takes: token ids, and tensors of each image.

    image  --look-->  View: its tensors, how many ids it fills  --text-->  ids and spans

The checkpoint's processor does all that is the family's own. It is asked twice: for each image by
itself, whose view can be kept, and for the text, with all views and no pixels. In pool threads:
nothing here changes after loading.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batching.errors import InvalidInput
from worker.vision.processed import PIXELS, Frame, Piece, Processed, Tensors, View

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

    def process(self, text: str, views: Sequence[View]) -> Processed:
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
        pieces, first = list[Piece](), 0
        for view in views:
            for frame in view.frames:
                last = first + view.count // len(view.frames) - 1
                own = slice(places[first], places[last] + 1)
                given = {name: each[:, own] for name, each in inputs.items()} | frame.tensors
                there = own.start, own.stop, frame.digest, tuple(ids[own])
                pieces.append(Piece(*there, given, view.whole))
                first = last + 1
        return Processed(ids, inputs, views, pieces)

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
    ) -> View:
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
        return View(digest, told, tensors, count, self._frames(digest, tensors, count))

    def _frames(self, digest: bytes, tensors: Tensors, count: int) -> Sequence[Frame]:
        """Where all tensors have as many along the axis by which images are joined, and its ids
        divide into as many, it is cut; so no run of the tower is longer than one takes."""
        counts = {each.shape[self._axes[name]] for name, each in tensors.items()}
        frames = counts.pop() if len(counts) == 1 else 1
        if frames < 2 or count % frames:
            return [Frame(digest, tensors)]
        made = []
        for number in range(frames):
            named = hashlib.blake2b(digest + number.to_bytes(4), digest_size=32).digest()
            cut = {n: each.narrow(self._axes[n], number, 1) for n, each in tensors.items()}
            made.append(Frame(named, cut))
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
