"""Log-mel features of a recording, read ahead of the model and dropped after use.

The features equal those of WhisperFeatureExtractor over the whole recording, but are computed block
by block. They are clipped at 80 dB below the loudest value of the recording, so a long recording is
read twice: once to find that value. Pool threads read, the worker's thread takes windows.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from worker.engines.speech.interfaces import AudioReader
from worker.media.audio import Recording
from worker.messages.protocol import IsWanted

BLOCK_FRAMES = 3000  # computed at once: 30 seconds


class LogMel:
    """The parameters of a checkpoint's feature extractor. `hop_samples`: between frames.
    `window_frames`: of a window of the model."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor
        self.sampling_rate: int = extractor.sampling_rate
        self.hop_samples: int = extractor.hop_length
        self.n_fft: int = extractor.n_fft
        self.window_frames: int = extractor.nb_max_frames
        self.filters = torch.from_numpy(extractor.mel_filters).float().T.contiguous()
        self.weights = torch.hann_window(self.n_fft)

    def extract(self, samples: NDArray[np.float32]) -> Tensor:
        """Return features [mels, window] of at most a window, padded with silence."""
        output = self.extractor(samples, sampling_rate=self.sampling_rate, return_tensors="pt")
        features: Tensor = output["input_features"][0]
        return features

    def powers(self, samples: Tensor) -> Tensor:
        """Return mel powers [mels, frames] of samples that extend `n_fft / 2` beyond the centers of
        the first and the last frame."""
        options: Any = {"window": self.weights, "center": False, "return_complex": True}
        power = torch.stft(samples, self.n_fft, self.hop_samples, **options).abs().square()
        return self.filters @ power

    def features(self, powers: Tensor, max_power: Tensor) -> Tensor:
        """Return features of powers. `max_power`: the largest of the recording."""
        logs, max_log = (power.clamp(min=1e-10).log10() for power in (powers, max_power))
        return (logs.maximum(max_log - 8.0) + 4.0) / 4.0


class LogMelReader(AudioReader):
    """Features of one recording. `total_frames` includes the silence after a short recording,
    `audio_frames` does not. Both are known after `read_if_short` returns True or `scan` ends."""

    def __init__(self, mel: LogMel, recording: Recording) -> None:
        super().__init__(recording)
        self.mel = mel
        self.total_frames = self.audio_frames = 0
        self._max_power = torch.zeros(())
        self._stored = 0, torch.zeros(0, 0)  # the first frame, and features from there on

    # ── in pool threads ──

    def read_if_short(self) -> bool:
        mel = self.mel
        window_samples = mel.window_frames * mel.hop_samples
        samples = self._recording.window(0, window_samples + 1)
        if len(samples) > window_samples:
            return False
        self.total_frames = mel.window_frames
        self.audio_frames = math.ceil(len(samples) / mel.hop_samples)
        self._stored = 0, mel.extract(samples)
        self._recording.close()
        return True

    def scan(self, is_wanted: IsWanted) -> None:
        """Find the largest power, then read the first windows."""
        ended = False
        while is_wanted() and not ended:
            powers, ended = self._block_powers(self.total_frames)
            self.total_frames += powers.shape[1]
            if powers.numel():
                self._max_power = self._max_power.maximum(powers.max())
        self.audio_frames = self.total_frames
        if ended:
            self.read_ahead(0)

    def read_ahead(self, seek: int) -> None:
        with self._reading:
            start, stored = self._stored
            parts = [stored[:, seek - start :]] if seek < start + stored.shape[1] else []
            end = seek + sum(part.shape[1] for part in parts)
            while end < min(seek + self.mel.window_frames + BLOCK_FRAMES, self.total_frames):
                parts.append(self.mel.features(self._block_powers(end)[0], self._max_power))
                end += parts[-1].shape[1]
            self._stored = seek, torch.cat(parts, 1)

    def _block_powers(self, start: int) -> tuple[Tensor, bool]:
        """Return powers [mels, frames] of the block at frame `start`, and whether the recording
        ends in it. Samples are mirrored at both ends of the recording, as a centered STFT does."""
        hop, half = self.mel.hop_samples, self.mel.n_fft // 2
        first, last = start * hop - half, (start + BLOCK_FRAMES - 1) * hop + half
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
        """Return features [mels, window] from frame `seek` on, then zeros; None if not read yet."""
        count = min(self.mel.window_frames, self.total_frames - seek)
        start, stored = self._stored
        if seek < start or seek + count > start + stored.shape[1]:
            return None
        part = stored[:, seek - start : seek - start + count]
        return functional.pad(part, (0, self.mel.window_frames - count))
