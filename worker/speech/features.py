"""A recording's log-mel frames, read ahead of need and kept no longer than they are needed.

As WhisperFeatureExtractor makes them of a whole recording, but block by block: what is cut off
below lies 80 dB under the loudest of all, so a long recording is read twice, first to find that.
Pool threads read, one at a time for each recording; the worker's thread looks at what is there.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from worker.media.audio import Recording
from worker.speech.work import Audio

# Frames that are computed at once: 30 seconds.
BLOCK = 3000


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
        made = self.extractor(samples, sampling_rate=self.rate, return_tensors="pt")
        features: Tensor = made["input_features"][0]
        return features

    def powers(self, samples: Tensor) -> Tensor:
        """[mels, frames] of samples that reach half an `n_fft` beyond the middles of frames."""
        options: Any = {"window": self.weights, "center": False, "return_complex": True}
        power = torch.stft(samples, self.n_fft, self.hop, **options).abs().square()
        return self.filters @ power

    def levelled(self, powers: Tensor, loudest: Tensor) -> Tensor:
        """Features, of a recording whose loudest power is that."""
        logarithms, most = (each.clamp(min=1e-10).log10() for each in (powers, loudest))
        return (logarithms.maximum(most - 8.0) + 4.0) / 4.0


class Frames(Audio):
    """Frames of one recording: `total` of them, silence after a short one included, and the sound
    lasts until `end`. All known once it is measured, or a long one scanned."""

    def __init__(self, mel: LogMel, recording: Recording) -> None:
        super().__init__(recording)
        self.mel = mel
        self.total = self.end = 0
        self._loudest = torch.zeros(())
        self._kept = 0, torch.zeros(0, 0)  # the first frame that is there, and all of them

    # ── in pool threads ──

    def measure(self) -> bool:
        mel = self.mel
        length = mel.window * mel.hop
        samples = self._recording.window(0, length + 1)
        if len(samples) > length:
            return False
        self.total, self.end = mel.window, math.ceil(len(samples) / mel.hop)
        self._kept = 0, mel.whole(samples)
        self._recording.close()
        return True

    def scan(self, wanted: Callable[[], bool]) -> None:
        """Read all of it, as long as that is wanted, then from the beginning again."""
        ended = False
        while wanted() and not ended:
            made, ended = self._block(self.total)
            self.total += made.shape[1]
            if made.numel():
                self._loudest = self._loudest.maximum(made.max())
        self.end = self.total
        if ended:
            self.read(0)

    def read(self, seek: int) -> None:
        """What a window from `seek` on needs, and a block more; what is before is dropped."""
        with self._reading:
            start, kept = self._kept
            parts = [kept[:, seek - start :]] if seek < start + kept.shape[1] else []
            at = seek + sum(part.shape[1] for part in parts)
            while at < min(seek + self.mel.window + BLOCK, self.total):
                parts.append(self.mel.levelled(self._block(at)[0], self._loudest))
                at += parts[-1].shape[1]
            self._kept = seek, torch.cat(parts, 1)

    def _block(self, start: int) -> tuple[Tensor, bool]:
        """Powers [mels, frames] from `start` on, mirrored at the ends of the recording as
        STFTs are, and whether it ends with them."""
        hop, half = self.mel.hop, self.mel.n_fft // 2
        first, last = start * hop - half, (start + BLOCK - 1) * hop + half
        begin = max(0, first)
        samples = torch.from_numpy(self._recording.window(begin, last - begin))
        end = begin + len(samples)
        ended = end < last
        if ended:
            frames = end // hop - start
            if frames <= 0:
                return torch.zeros(len(self.mel.filters), 0), True
            last = (start + frames - 1) * hop + half
        mirrored = begin - first, max(0, last - end)
        padded = functional.pad(samples[None, : last - begin], mirrored, "reflect")[0]
        return self.mel.powers(padded), ended

    # ── on the worker's thread ──

    def window(self, seek: int) -> Tensor | None:
        """[mels, window] from frame `seek` on, zeros beyond the end; None: not read yet."""
        wanted = min(self.mel.window, self.total - seek)
        start, kept = self._kept
        if seek < start or seek + wanted > start + kept.shape[1]:
            return None
        part = kept[:, seek - start : seek - start + wanted]
        return functional.pad(part, (0, self.mel.window - wanted))
