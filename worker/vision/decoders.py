"""Decoders of the files of a chat, one for each kind: sizes are checked in the headers of all files
of a request first, then each file is decoded. Runs in pool threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

import numpy as np
from PIL import Image

from batching.errors import ContextExceeded, InvalidInput
from worker.media.audio import Recording
from worker.media.images import decode_image, open_image, upright_rgb
from worker.media.inputs import saved
from worker.media.videos import MAX_VIDEO_S, VideoMetadata, probe_video, read_frames
from worker.messages.generation import LIMITS, MAX_FRAMES, MediaInput
from worker.messages.protocol import IsWanted
from worker.vision.modality import Modality
from worker.vision.video import Video

# The images of a request may have this many times the pixels of a single image.
REQUEST_PIXELS_RATIO = 4
LOW_DETAIL_SIDE = 512  # pixels of the longer side of an image with `detail: low`
MAX_LIMIT = 16384 * 28 * 28  # pixels: the largest that Qwen's processors have themselves
MAX_TOKEN_PIXELS = 1 << 10  # of an image, for each token: images with more do not fit the context
MAX_RECORDINGS_S = 1200.0  # of all recordings of a request


class ImageDecoder:
    """`max_pixels`: of one image. `max_tokens`: the context length, as in the other decoders."""

    def __init__(self, max_pixels: int, max_tokens: int) -> None:
        self.max_pixels, self.max_tokens = max_pixels, max_tokens

    def check_sizes(self, files: Sequence[MediaInput], is_wanted: IsWanted) -> None:
        """Raise InvalidInput if the headers of the files alone exceed a limit."""
        pixels = 0
        max_pixels = REQUEST_PIXELS_RATIO * self.max_pixels
        most = min(self.max_pixels, MAX_TOKEN_PIXELS * self.max_tokens, MAX_LIMIT)
        for image in files:
            for name, limit in image.limits:
                if limit > most:
                    reason = f"{limit} exceeds the {most} pixels that an image may have"
                    raise InvalidInput.at(f"{LIMITS}.{name}", reason)
            width, height = self._open(image, is_wanted).size
            pixels += width * height
            if pixels > max_pixels:
                raise InvalidInput.at(
                    image.param,
                    f"the images have {pixels} pixels so far; at most {max_pixels} are accepted",
                )

    def decode(self, file: MediaInput, is_wanted: IsWanted) -> Image.Image:
        """Return an upright RGB image, downscaled if it has low detail. Raises InvalidInput for a
        broken file, ClientGone once not `is_wanted()`."""
        opened = self._open(file, is_wanted)
        if file.is_low_detail:
            opened.draft("RGB", (LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))  # JPEG decodes fewer pixels
        decode_image(opened, file.param)
        upright = upright_rgb(opened, file.background)
        if file.is_low_detail:
            upright.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))
        return upright

    def _open(self, image: MediaInput, is_wanted: IsWanted) -> Image.Image:
        """Read the header alone."""
        return open_image(image.data, image.param, self.max_pixels, is_wanted)


class AudioDecoder:
    """Decodes recordings to mono samples at the rate of the model's feature extractor."""

    def __init__(self, modality: Modality, max_tokens: int) -> None:
        self.modality, self.max_tokens = modality, max_tokens

    def check_sizes(self, files: Sequence[MediaInput], is_wanted: IsWanted) -> None:
        total = 0.0
        for file in files:
            with self._open(file) as recording:
                total += recording.length()
            check_seconds(total, file.param)
            if (tokens := int(total * self.modality.tokens_per_second)) >= self.max_tokens:
                reason = f"the recordings fill {tokens} tokens so far"
                raise ContextExceeded.of(self.max_tokens, file.param, reason)

    def decode(self, file: MediaInput, is_wanted: IsWanted) -> np.ndarray:
        """Return samples [n], float32."""
        with self._open(file) as recording:
            return recording.read(is_wanted)

    @contextmanager
    def _open(self, file: MediaInput) -> Iterator[Recording]:
        """Yield a recording whose header has been read and checked; its samples are counted."""
        rate, longest = self.modality.sampling_rate, self.modality.max_seconds
        with (
            saved(file.data) as path,
            Recording(path, rate, min(longest, MAX_RECORDINGS_S), file.param) as opened,
        ):
            yield opened


def check_seconds(seconds: float, param: str) -> None:
    """Raise InvalidInput if the recordings of a request are too long together."""
    if seconds > MAX_RECORDINGS_S:
        reason = f"the recordings last {seconds:.0f} seconds so far"
        limit = f"at most {MAX_RECORDINGS_S:g} are accepted"
        raise InvalidInput.at(param, f"{reason}; {limit}")


class VideoDecoder:
    """`max_pixels`: of a frame. The chosen frames of a video are scaled to as many together."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels

    def check_sizes(self, files: Sequence[MediaInput], is_wanted: IsWanted) -> None:
        seconds = 0.0
        for file in files:
            seconds += self._probe(file).seconds
            if seconds > MAX_VIDEO_S:
                long = f"the videos last {seconds:.0f} seconds so far"
                raise InvalidInput(f"{long}; at most {MAX_VIDEO_S:g} are accepted", file.param)

    def decode(self, file: MediaInput, is_wanted: IsWanted) -> Video:
        metadata = self._probe(file)

        def read(indices: Sequence[int]) -> np.ndarray:
            if len(indices) > MAX_FRAMES:
                many = f"the model's processor chooses {len(indices)} frames of the video"
                limit = f"at most {MAX_FRAMES} are accepted: send fps or num_frames"
                raise InvalidInput(f"{many}; {limit}", file.param)
            width, height = metadata.width, metadata.height
            pixels = width * height * len(indices)
            if (ratio := self.max_pixels / pixels) < 1:
                width, height = (max(1, int(side * sqrt(ratio))) for side in (width, height))
            with saved(file.data) as path:
                return read_frames(path, indices, (width, height), file.param, is_wanted)

        return Video(metadata, read, file.param)

    def _probe(self, file: MediaInput) -> VideoMetadata:
        with saved(file.data) as path:
            return probe_video(path, file.param, self.max_pixels)
