"""Videos for a checkpoint's own video processor, which chooses frames, resizes and normalizes them.

    metadata  --sample_frames-->  indices  --decoded (media/videos.py)-->  frames  -->  tensors

A video is split where the encoder reads its frames, or pairs of them, apart: a tile for each.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata as LibraryMetadata

from batching.errors import InvalidInput
from worker.error_classification import first_line
from worker.media.videos import VideoMetadata
from worker.messages.generation import LIMITS
from worker.vision.modality import SAMPLE_SIZES, Modality, Tensors, is_encoder_input

SAMPLING = ("fps", "num_frames")
FRAMES_NDIM = 4  # at least, of a tensor of frames
DEFAULT_FPS = 2.0  # where the checkpoint states neither; as in Qwen's own code


@dataclass(frozen=True, slots=True)
class Video:
    """`read` decodes the frames of ascending indices: [n, height, width, 3] uint8."""

    metadata: VideoMetadata
    read: Callable[[Sequence[int]], np.ndarray]
    param: str = "messages"

    @classmethod
    def noise(cls, width: int, height: int) -> "Video":
        """Return a valid video of 16 frames, four a second."""
        pixels = np.random.default_rng(width).integers(0, 256, (16, height, width, 3), np.uint8)
        return cls(VideoMetadata(16, 4.0, 4.0, width, height), lambda indices: pixels[[*indices]])


class VideoModality(Modality):
    @property
    def default_options(self) -> Mapping[str, float]:
        states_some = any(getattr(self.part, name, None) is not None for name in SAMPLING)
        return {} if states_some else {"fps": DEFAULT_FPS}

    def samples(self) -> list[Video]:
        return [Video.noise(*size) for size in SAMPLE_SIZES]

    def size(self, item: Video) -> int:
        return 0

    def blank(self, size: int) -> Any:
        return np.zeros((1, 1, 1, 3), np.uint8)

    def describe(self, item: Video) -> str:
        frames, _, seconds, width, height = item.metadata
        return f"a video of {frames} frames, {seconds:.1f} s, with {width} × {height} pixels"

    def call_part(
        self,
        items: Sequence[Any],
        given: Any,
        options: Mapping[str, Any],
        requested: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        chosen = [self._choose(item, options, requested) for item in items]
        frames = [
            item.read([int(index) for index in metadata.frames_indices])
            for item, metadata in zip(items, chosen, strict=True)
        ]
        known = {
            "video_metadata": chosen, "do_sample_frames": False, "return_metadata": True,
            "input_data_format": "channels_last", "return_tensors": "pt",
        }  # fmt: skip
        output: Mapping[str, Any] = self.part(frames, **{**options, **known})
        return output

    def _choose(
        self, video: Video, options: Mapping[str, Any], requested: Mapping[str, Any]
    ) -> Any:
        """Return the library's metadata with the indices of the frames that the part chooses. What
        a request has of SAMPLING replaces all that the checkpoint has."""
        frames, fps, seconds, width, height = video.metadata
        metadata: Any = LibraryMetadata(frames, fps, width, height, seconds)
        names = self.part.valid_kwargs.__annotations__
        part = copy.copy(self.part)  # the library reads None as its attribute
        if not requested.keys().isdisjoint(SAMPLING):
            for name in SAMPLING:
                setattr(part, name, requested.get(name))
            options = {**options, **dict.fromkeys(SAMPLING), **requested}
        settings = {name: getattr(part, name, None) for name in names} | dict(options)
        if settings.get("num_frames"):
            settings["num_frames"] = min(settings["num_frames"], frames)
        try:
            indices = [int(n) for n in part.sample_frames(metadata=metadata, **settings)]
        except ZeroDivisionError:  # Qwen's processors choose pairs of frames, and there is none
            indices = []
        except Exception as error:  # any error of the library
            reason = f"the model's processor chooses no frames: {first_line(error)}"
            param = next((f"{LIMITS}.{name}" for name in requested), video.param)
            raise InvalidInput(reason, param) from error
        # an array: the library appends to lists
        metadata.frames_indices = np.array(indices or [0])
        return metadata

    def check_joinable(self, items: Sequence[Mapping[str, Any]]) -> None:
        for name, axis in self.axes.items():
            tensors = [item[name] for item in items if isinstance(item.get(name), torch.Tensor)]
            if len({(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors}) > 1:
                reason = "this model takes videos with the same number of frames in one prompt"
                raise InvalidInput(reason, "messages")

    def split(self, tensors: Tensors, tokens: int) -> Sequence[tuple[Tensors, int]]:
        """Split a video into its frames, or groups of them: by a grid of its patches (time, height,
        width), or by an axis of the frames. Whether the encoder reads them apart is checked at
        load."""
        pixels = {name: value for name, value in tensors.items() if is_encoder_input(name, value)}
        others = {name: value for name, value in tensors.items() if name not in pixels}
        lengths = {len(value) for value in pixels.values()}
        grid = next((name for name, value in others.items() if value.shape == (1, 3)), "")
        axis = 0
        if grid and lengths == {prod(others[grid][0].tolist())}:
            count = int(others[grid][0, 0])
            others[grid] = torch.cat([torch.ones_like(others[grid][:, :1]), others[grid][:, 1:]], 1)
        else:
            axis = int(lengths == {1})
            counts = {value.shape[axis] for value in pixels.values() if value.ndim >= FRAMES_NDIM}
            count = counts.pop() if len(counts) == 1 else 1
        if not self.is_split or count < 2 or tokens % count:
            return [(tensors, tokens)]
        chunks = {name: value.chunk(count, axis) for name, value in pixels.items()}
        return [
            (others | {name: parts[number] for name, parts in chunks.items()}, tokens // count)
            for number in range(count)
        ]
