"""A recording's log-mel frames, read ahead of need and kept no longer than they are needed.

As WhisperFeatureExtractor makes them of a whole recording, but block by block: what is cut off
below lies 80 dB under the loudest of all, so a long recording is read twice, first to find that.
Pool threads read, one at a time for each recording; the worker's thread looks at what is there.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from batching.errors import InvalidInput

# Frames that are computed at once: 30 seconds.
BLOCK = 3000


class Samples(Protocol):
    """A recording as mono float32 samples, read lazily (speech/recording.py)."""

    def window(self, start: int, count: int) -> NDArray[np.float32]:
        """As many samples from `start` on; fewer where the recording ends."""

    def close(self) -> None: ...


class LogMel:
    """What a checkpoint's feature extractor says of frames: `hop` samples apart, `window` of them
    at a time for the model."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor
        self.rate: int = extractor.sampling_rate
        self.hop: int = extractor.hop_length
        self.n_fft: int = extractor.n_fft
        self.window: int = extractor.nb_max_frames
        self.filters = torch.from_numpy(extractor.mel_filters).float().T.contiguous()
        self.weights = torch.hann_window(self.n_fft)

    def whole(self, samples: NDArray[np.float32]) -> Tensor:
        """[mels, window]: a recording of at most a window, silence after it."""
        made: Tensor = self.extractor(samples, sampling_rate=self.rate, return_tensors="pt")
        return made["input_features"][0]

    def logarithms(self, samples: Tensor) -> Tensor:
        """[mels, frames] of samples that reach half an `n_fft` beyond the middles of frames."""
        options: Any = {"window": self.weights, "center": False, "return_complex": True}
        power = torch.stft(samples, self.n_fft, self.hop, **options).abs().square()
        return (self.filters @ power).clamp(min=1e-10).log10()

    def levelled(self, logarithms: Tensor, loudest: float) -> Tensor:
        return (logarithms.clamp(min=loudest - 8.0) + 4.0) / 4.0


class Frames:
    """Frames of one recording: `total` of them, silence after a short one included, and the sound
    lasts until `end`, or `seconds`. All known once it is measured."""

    def __init__(self, mel: LogMel, samples: Samples, most_seconds: float) -> None:
        self.mel = mel
        self.samples = samples
        self.most = int(most_seconds * mel.rate)
        self.total = self.end = 0
        self.seconds = 0.0
        self._count = 0  # samples
        self._loudest = -math.inf
        self._kept = 0, torch.zeros(0, 0)  # the first frame that is there, and all of them

    # ── in pool threads ──

    def measure(self) -> bool:
        """Whether it is short: then all is known now; if not, `scan`. InvalidInput if too long."""
        mel = self.mel
        length = mel.window * mel.hop
        first = self.samples.window(0, length + 1)
        if len(first) > length:
            return False
        self._know(len(first))
        self.total, self.end = mel.window, math.ceil(len(first) / mel.hop)
        self._kept = 0, mel.whole(first)
        return True

    def scan(self, wanted: Callable[[], bool]) -> None:
        """Read all of it, as long as that is wanted, then the first window."""
        mel, count, block = self.mel, 0, BLOCK * self.mel.hop
        while wanted():
            read = len(self.samples.window(count, block))
            count += read
            self._check(count)
            if read < block:
                break
        self._know(count)
        self.total = self.end = count // mel.hop
        for start in range(0, self.total, BLOCK):
            if not wanted():
                return
            self._loudest = max(self._loudest, float(self._logarithms(start).max()))
        self.read(0)

    def read(self, seek: int) -> None:
        """What a window from `seek` on needs, and a block more; what is before is dropped."""
        start, kept = self._kept
        parts = [kept[:, seek - start :]] if seek < start + kept.shape[1] else []
        at = seek + sum(part.shape[1] for part in parts)
        while at < min(seek + self.mel.window + BLOCK, self.total):
            parts.append(self.mel.levelled(self._logarithms(at), self._loudest))
            at += parts[-1].shape[1]
        self._kept = seek, torch.cat(parts, 1)

    def _know(self, samples: int) -> None:
        self._check(samples)
        self._count, self.seconds = samples, samples / self.mel.rate

    def _check(self, samples: int) -> None:
        if samples > self.most:
            seconds = self.most / self.mel.rate
            raise InvalidInput(f"the recording lasts longer than {seconds:.0f} seconds", "file")

    def _logarithms(self, start: int) -> Tensor:
        """Of a block of frames, mirrored at the ends of the recording as STFTs are."""
        mel, half = self.mel, self.mel.n_fft // 2
        stop = min(start + BLOCK, self.total)
        first, last = start * mel.hop - half, (stop - 1) * mel.hop + half
        begin, end = max(0, first), min(last, self._count)
        samples = torch.from_numpy(self.samples.window(begin, end - begin))
        mirrored = begin - first, last - end
        return mel.logarithms(functional.pad(samples[None], mirrored, "reflect")[0])

    # ── on the worker's thread ──

    def window(self, seek: int) -> Tensor | None:
        """[mels, window] from frame `seek` on, zeros beyond the end; None: not read yet."""
        wanted = min(self.mel.window, self.total - seek)
        start, kept = self._kept
        part = kept[:, seek - start : seek - start + wanted]
        if seek < start or part.shape[1] < wanted:
            return None
        return functional.pad(part, (0, self.mel.window - wanted))
