"""Text and images as what a vision-language model takes: token ids, and tensors of each image.

    images  --one by one-->  tensors of each, and how many ids it fills  --text-->  ids and spans

The checkpoint's processor does all that is the family's own. What its image processor makes is kept
by image, so that an image's way through the tower can be kept too; the processor then gets all of
it at once for the text. In pool threads: nothing here changes after loading.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batching.errors import InvalidInput

# Left out of what a model takes: ids have a place of their own, labels are for training.
NOT_INPUTS = ("input_ids", "attention_mask", "labels")
# Where a processor cuts a large image into parts, one that is looked at roughly stays whole.
ROUGH = {"do_image_splitting": False}
SIZES = (64, 64), (320, 192)  # of images by which a processor is known

Tensors = dict[str, Tensor]
# From an image processor's options to what it makes of the images that are looked at.
Look = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """An upright RGB image. `rough`: a glance will do. `param`: what errors about it name."""

    image: Image.Image
    rough: bool = False
    param: str = "messages"

    @property
    def digest(self) -> bytes:
        """Of what is seen, and how."""
        image = self.image
        digest = hashlib.blake2b(image.tobytes(), digest_size=32)
        digest.update(f"{image.mode} {image.size} {self.rough}".encode())
        return digest.digest()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Processed:
    """`ids`: with as many places for each image as it fills. `inputs`: what else the forward takes
    of the text, [1, ids]. `images`: what it takes of each. `spans`: from which id to before which
    an image reaches, and the digest of what is seen; between its places may stand ids of text.
    `image_id`: the id of a place. `axes`: along which the tensors of several images are joined."""

    ids: list[int]
    inputs: Tensors
    images: list[Tensors]
    spans: list[tuple[int, int, bytes]]
    image_id: int
    axes: Mapping[str, int]


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

    def process(self, text: str, images: Iterable[Seen]) -> Processed:
        """A text with a mark for each image, special tokens included. Images are taken one at a
        time. InvalidInput for more ids than the context holds, and for what the model's processor
        does not take."""
        features, counts, digests, words = [], [], [], self.words(text)
        for seen in images:
            made, count = self._look(seen)
            features.append(made)
            counts.append(count)
            digests.append(seen.digest)
            self.check_fits(words + sum(counts), seen.param)
        if text.count(self.mark) != len(features):
            marked = f"the text has {self.mark!r} in it, which stands for an image here"
            lost = "the model's chat template does not show the images"
            raise InvalidInput(lost if self.mark not in text else marked, "messages")
        made = self._call(text, len(features), lambda _: self.joined(features))
        ids = _ids(made)
        places = [n for n, each in enumerate(ids) if each == self.image_id]
        if len(places) != sum(counts):
            raise InvalidInput("the text has tokens in it that stand for images", "messages")
        names = made.keys() - features[0].keys() - set(NOT_INPUTS)
        inputs = {name: torch.tensor(made[name]) for name in names}
        spans, start = [], 0
        for count, digest in zip(counts, digests, strict=True):
            filled = places[start : start + count]
            spans.append((filled[0], filled[-1] + 1, digest))
            start += count
        taken = [{name: each[name] for name in each.keys() & made.keys()} for each in features]
        return Processed(ids, inputs, taken, spans, self.image_id, self._axes)

    def joined(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What several images' tensors are together; the smaller are filled up with zeros."""
        if len(images) == 1:
            return dict(images[0])
        return {
            name: _concatenated([each[name] for each in images], self._axes[name])
            for name in images[0]
        }

    # ── an image ──

    def _look(self, seen: Seen) -> tuple[Tensors, int]:
        """An image's tensors, and how many ids it fills."""
        kept: list[Tensors] = []

        def look(options: Mapping[str, Any]) -> Tensors:
            kept.append(self._features([seen.image], options))
            return dict(kept[0])  # some take out what is theirs alone

        try:
            made = self._call(self.mark, 1, look, **(self._rough if seen.rough else {}))
        except Exception as error:  # whatever the library raises
            width, height = seen.image.size
            odd = f"the model does not take an image of {width} × {height} pixels"
            raise InvalidInput(odd, seen.param) from error
        return kept[0], _ids(made).count(self.image_id)

    def _features(self, images: list[Image.Image], options: Mapping[str, Any]) -> Tensors:
        made = self._processor.image_processor(images, **{**options, "return_tensors": "pt"})
        return dict(made)

    def _call(self, text: str, count: int, look: Look, **options: Any) -> Any:
        """The processor's own way, with `look` in the place of its image processor."""
        processor = copy.copy(self._processor)
        processor.image_processor = _StandIn(self._processor.image_processor, look)
        dots = [Image.new("RGB", (1, 1))] * count
        plain = {
            "add_special_tokens": False,
            "padding": False,
            "truncation": False,
            "verbose": False,
        }
        return processor(images=dots, text=[text], text_kwargs=plain, **options)

    def _patches(self, width: int, height: int) -> int:
        """As many image processors tell. Some tell rows and columns, too."""
        told = self._processor.image_processor.get_number_of_image_patches(height, width, {})
        return int(told[0] if isinstance(told, tuple) else told)

    def _learned_filling(self) -> tuple[int, int]:
        """Patches of an image, and the ids that it fills; no ids where these do not go together."""
        try:
            (patches, ids), (more, filled) = (
                (self._patches(*size), self._look(Seen(Image.new("RGB", size)))[1])
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
    sizes = [max(part.shape[n] for part in parts) for n in range(parts[0].dim())]
    filled = []
    for part in parts:
        wanted = [part.shape[n] if n == axis else size for n, size in enumerate(sizes)]
        if wanted != list(part.shape):
            larger = part.new_zeros(wanted)
            larger[tuple(slice(size) for size in part.shape)] = part
            part = larger
        filled.append(part)
    return torch.cat(filled, dim=axis)
