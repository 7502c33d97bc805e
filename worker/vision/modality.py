"""The kinds of media that a checkpoint's processor takes, a `Modality` for each.

A kind has a part of the processor (an image processor, a feature extractor), whose call is replaced
while a text is processed, and a token that stands for one item in a text. Items stay in the order
of these tokens. A `Modality` does not change after loading and is shared by threads.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature

from worker.error_classification import first_line
from worker.messages.generation import MediaKind

# Tensors whose names start with this are read by the encoder alone, as are those of several axes
# with floating-point numbers. Processing the text needs only their shapes.
PIXEL_PREFIX = "pixel"
# Outputs of the processor that are not passed on: ids are a field of their own, labels are for
# training.
NOT_INPUTS = ("input_ids", "attention_mask", "labels")
WINDOW_S = 30  # of most feature extractors
SAMPLE_SIZES = (64, 48), (32, 64)  # pixels
SAMPLE_SECONDS = 1.3, 0.6
PLAIN_TEXT = {
    **dict.fromkeys(("add_special_tokens", "padding", "truncation", "verbose"), False),
    "return_tensors": "pt",
}

Tensors = dict[str, Tensor]
# From the media that a part is called with, and its options, to its output.
PartFunction = Callable[[Any, Mapping[str, Any]], Any]


class KindNames(NamedTuple):
    """Names of a kind in a ProcessorMixin: attributes with its part, and arguments of the call."""

    attributes: Sequence[str]
    argument: str
    options: str


KIND_NAMES: Mapping[MediaKind, KindNames] = {
    "image": KindNames(("image_processor",), "images", "images_kwargs"),
    "audio": KindNames(("audio_processor", "feature_extractor"), "audio", "audio_kwargs"),
    "video": KindNames(("video_processor",), "videos", "videos_kwargs"),
}


class Calls(NamedTuple):
    """A recorded call of a processor: the output of its part, and its own."""

    features: dict[str, Any]
    outputs: Mapping[str, Any]


class Modality:
    """How a processor takes media of one kind.

    `token` stands for an item in a text, `token_id` for each row of the encoder's output.
    `max_items`: of a prompt; None: any number. `max_seconds`: of a recording. `axes`: along which
    tensors of items are joined. `output_names`: outputs of the processor that belong to the media,
    not to the text. `window_tokens`: of a window of a recording, 0 where the part makes no windows.
    `is_split`: whether items are encoded in tiles.
    """

    is_split = True
    window_tokens = 0

    def __init__(self, processor: Any, kind: MediaKind, candidates: Sequence[int]) -> None:
        """`candidates`: ids that may be `token_id`."""
        names = KIND_NAMES[kind]
        self.kind: MediaKind = kind
        self.token: str = getattr(processor, f"{kind}_token")
        self.attribute = next(name for name in names.attributes if hasattr(processor, name))
        self.argument, self.options_name = names.argument, names.options
        self.part = getattr(processor, self.attribute)
        self.sampling_rate: int = getattr(self.part, "sampling_rate", 0)
        options = getattr(self.part, "valid_kwargs", dict)
        self.option_names = frozenset(getattr(options, "__annotations__", ()))
        accepted = inspect.signature(self.part.__call__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        self._call_options: dict[str, Any] = {}
        if "return_tensors" in accepted or takes_any:
            self._call_options["return_tensors"] = "pt"
        if "sampling_rate" in accepted:
            self._call_options["sampling_rate"] = self.sampling_rate
        sample = self.samples()[0]
        one = self.record(processor, [sample])
        ids = token_ids(one.outputs)
        self.token_id = next(id_ for id_ in candidates if id_ in ids)
        try:
            two, self.max_items = self.record(processor, [sample] * 2), None
            if two.features.keys() != one.features.keys():  # a mask that one item alone lacks
                self.max_items = 1
        except Exception:  # the processor takes one item of a text
            two, self.max_items = one, 1
        self.axes = _infer_axes(one.outputs, two.outputs) | _infer_axes(one.features, two.features)
        self.max_seconds, self.tokens_per_second = math.inf, 0.0
        if kind == "audio":
            self._measure_limits(processor)
        counts = [(call.outputs, (1, len(token_ids(call.outputs)))) for call in (one, two)]
        self.output_names = frozenset(
            name
            for name in one.outputs
            if name not in NOT_INPUTS
            and (
                name in one.features
                or any(np.shape(outputs[name])[:2] != shape for outputs, shape in counts)
            )
        )

    @property
    def default_options(self) -> Mapping[str, float]:
        """Options of the processor's call, where a request has none."""
        return {}

    def samples(self) -> list[Any]:
        """Return two valid items of noise, of different sizes."""
        if self.kind == "audio":
            longer_s, shorter_s = SAMPLE_SECONDS
            if self.window_tokens:  # a window and a part of another
                longer_s += self._window / self.sampling_rate
            return [_noise(int(seconds * self.sampling_rate)) for seconds in (longer_s, shorter_s)]
        pixels = np.random.default_rng(0).integers
        shapes = ((height, width, 3) for width, height in SAMPLE_SIZES)
        return [Image.fromarray(pixels(0, 256, shape, np.uint8)) for shape in shapes]

    def _measure_limits(self, processor: Any) -> None:
        """Find the length from which the processor truncates recordings, and how many tokens a
        second of sound has, where it is the same for all lengths."""
        self.max_seconds = getattr(processor, "max_audio_len", math.inf)
        self._window = window = getattr(self.part, "n_samples", WINDOW_S * self.sampling_rate)
        noise = _noise(window + self.sampling_rate)
        lengths = window // 2, window, len(noise)
        calls = [self.record(processor, [noise[:length]]) for length in lengths]
        counts = [token_ids(call.outputs).count(self.token_id) for call in calls]
        whole, longer = calls[1].features, calls[2].features
        if all(np.array_equal(whole[name], longer[name]) for name in whole):
            self.max_seconds = min(self.max_seconds, window / self.sampling_rate)
        if counts[0] < counts[1] <= counts[2]:
            self.tokens_per_second = (counts[1] - counts[0]) / (window / 2 / self.sampling_rate)
        pairs = [(np.shape(whole[name]), np.shape(longer[name])) for name in whole]
        if counts[1] < counts[2] and all(two[:1] == (2,) == (2 * one[0],) for one, two in pairs):
            self.window_tokens = counts[1]

    def size(self, item: Any) -> int:
        """Return what the processor reads of an item beside its features: a recording's samples."""
        return 0 if self.kind == "image" else len(item)

    def blank(self, size: int) -> Any:
        """Return an item of that `size`, without memory."""
        if self.kind == "image":
            return Image.new("RGB", (1, 1))
        return np.broadcast_to(np.float32(0), (size,))

    def describe(self, item: Any) -> str:
        """Return an item's noun and size, for errors."""
        if self.kind == "image":
            return f"an image of {item.width} × {item.height} pixels"
        return f"a recording of {len(item) / self.sampling_rate:.2f} seconds"

    def call_part(
        self,
        items: Sequence[Any],
        given: Any,
        options: Mapping[str, Any],
        requested: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Call the part. `given`: the items as the processor passes them, which may cut a recording
        into windows. `options`: those of the processor, with the `requested` ones."""
        media = [*items] if self.kind == "image" else given
        output: Mapping[str, Any] = self.part(media, **{**options, **self._call_options})
        return output

    def record(self, processor: Any, items: Sequence[Any], **requested: Any) -> Calls:
        """Call a processor with a text of nothing but these items."""
        calls: list[dict[str, Any]] = []

        def process(given: Any, options: Mapping[str, Any]) -> dict[str, Any]:
            calls.append(dict(self.call_part(items, given, options, requested)))
            return dict(calls[0])  # a copy: some processors remove entries

        blanks = [self.blank(self.size(item)) for item in items]
        replaced = {self: ([*items] if self.kind == "audio" else blanks, process)}
        options = requested or self.default_options
        named = {self.options_name: {**options}} if options else {}
        outputs = call_replaced(processor, self.token * len(items), replaced, **named)
        [features] = calls
        return Calls(features, outputs)

    def concatenate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the tensors of several items; smaller ones are padded with zeros."""
        if len(items) == 1:
            return dict(items[0])
        return {
            name: concatenate([item[name] for item in items], self.axes[name]) for name in items[0]
        }

    def check_joinable(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Raise InvalidInput if a prompt cannot have these items together."""

    def split(self, tensors: Tensors, tokens: int) -> Sequence[tuple[Tensors, int]]:
        """Split an item into tiles, which bounds the time of one encoder run; return the tensors
        and the number of tokens of each. It is split if all its tensors are equally long along the
        axis that joins items. The tiles of an image have as many `tokens` each, those of a
        recording are windows."""
        lengths = {tensor.shape[self.axes[name]] for name, tensor in tensors.items()}
        length = lengths.pop() if self.is_split and len(lengths) == 1 else 1
        each = self.window_tokens if self.kind == "audio" else tokens // length
        rest = tokens - (length - 1) * each
        if length < 2 or not 0 < rest <= each:
            return [(tensors, tokens)]
        return [
            (
                {name: tensor.narrow(self.axes[name], n, 1) for name, tensor in tensors.items()},
                each if n < length - 1 else rest,
            )
            for n in range(length)
        ]


def _noise(samples: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)


def find_modalities(
    processor: Any, config: Any, classes: Mapping[MediaKind, type[Modality]]
) -> tuple[dict[MediaKind, Modality], dict[MediaKind, str]]:
    """Return those of a checkpoint's processor: of kinds that it has a part and a token for; and
    why it does not take media of the other kinds that it has a part for. `classes`: of kinds that
    have their own."""
    found: dict[MediaKind, Modality] = {}
    failures: dict[MediaKind, str] = {}
    for kind, names in KIND_NAMES.items():
        if not any(getattr(processor, name, None) for name in names.attributes):
            continue
        candidates = placeholder_ids(processor, config, kind)
        if not candidates or not getattr(processor, f"{kind}_token", None):
            failures[kind] = "it has no token for them"
            continue
        try:
            found[kind] = classes.get(kind, Modality)(processor, kind, candidates)
        except Exception as error:  # any error of the library
            failures[kind] = first_line(error)
    return found, failures


def placeholder_ids(processor: Any, config: Any, kind: MediaKind) -> Sequence[int]:
    """Return ids of tokens that the rows of the encoder's output may replace. Frames of a video may
    have those of images."""
    holders = (
        (config, f"{kind}_token_id"),
        (config, f"{kind}_token_index"),
        (processor, f"{kind}_token_id"),
    )
    ids = [getattr(holder, name, None) for holder, name in holders]
    of_kind = [id_ for id_ in ids if isinstance(id_, int)]
    return [*of_kind, *placeholder_ids(processor, config, "image")] if kind == "video" else of_kind


def call_replaced(
    processor: Any,
    text: str,
    replaced: Mapping[Modality, tuple[Sequence[Any], PartFunction]],
    **options: Any,
) -> Any:
    """Call a processor with a text and media, with a function in place of each modality's part."""
    duplicate, media = copy.copy(processor), {}
    for modality, (items, process) in replaced.items():
        setattr(duplicate, modality.attribute, ReplacedPart(modality.part, process))
        media[modality.argument] = items
    return duplicate(text=[text], text_kwargs=PLAIN_TEXT, **media, **options)


class ReplacedPart:
    """A part of a processor whose attributes stay and whose call is replaced."""

    def __init__(self, part: Any, process: PartFunction) -> None:
        self._part = part
        self._process = process

    def __call__(self, media: Any = None, **options: Any) -> Any:
        for name in ("images", "videos", "audio", "raw_speech"):
            media = options.pop(name, media)
        return BatchFeature(self._process(media, options))  # some read its attributes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


# ── outputs ──


def token_ids(outputs: Mapping[str, Any]) -> list[int]:
    return [int(token) for token in outputs["input_ids"][0]]


def as_tensor(value: Any) -> Any:
    """Return a list of numbers as a tensor, any other value as it is."""
    numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    return torch.tensor(value) if numbers else value


def is_encoder_input(name: str, value: Tensor) -> bool:
    """Return whether the encoder alone reads a tensor of the media."""
    return name.startswith(PIXEL_PREFIX) or (value.is_floating_point() and value.ndim > 1)


def without_memory(name: str, feature: Any) -> Any:
    """Replace an input of the encoder by a tensor of the same shape that takes no memory."""
    if not (isinstance(feature, Tensor) and is_encoder_input(name, feature)):
        return feature
    return feature.new_zeros(()).expand(feature.shape)


def _infer_axes(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, int]:
    """Return the axis along which each feature of several items is joined: the one that is twice as
    long for two items as for one."""
    return {
        name: next((n for n, size in enumerate(single) if double[n] == 2 * size), 0)
        for name in one.keys() & two.keys()
        for single, double in [(np.shape(one[name]), np.shape(two[name]))]
    }


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    if not isinstance(parts[0], Tensor):  # nested lists of numbers
        if axis:
            return [concatenate(rows, axis - 1) for rows in zip(*parts, strict=True)]
        return [value for part in parts for value in part]
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(part.shape[axis] for part in parts)
    if all(part.untyped_storage().nbytes() < part.nbytes for part in parts):  # without memory
        return parts[0].new_zeros(()).expand(shape)
    joined, start = parts[0].new_zeros(shape), 0
    for part in parts:
        region = [slice(size) for size in part.shape]
        region[axis] = slice(start, start + part.shape[axis])
        joined[tuple(region)] = part
        start += part.shape[axis]
    return joined
