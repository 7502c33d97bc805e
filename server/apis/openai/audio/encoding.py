"""Samples to the bytes of an audio file or stream, piece by piece. Runs in pool threads.

libsndfile writes FLAC, Opus and MP3, FFmpeg (PyAV, the extra audio) AAC. A piece is sent before the
next one exists, so a stream's header has no length; that of a file made of one piece has.
"""

import importlib.util
import io
from collections.abc import Mapping
from struct import pack
from typing import Any, Literal, NamedTuple

import numpy as np

from batching.errors import InvalidInput

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
PCM_RATE = 24_000  # of `pcm`, and where a codec does not have the model's rate
MPEG_RATES = {8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000}
UNKNOWN_BYTES = 0xFFFFFFFF
WAV_HEADER_BYTES = 36  # of those that a WAV file's length counts


class Codec(NamedTuple):
    media: bytes
    rates: set[int] | None  # None: any
    container: str = ""  # libsndfile's names
    subtype: str = ""


CODECS: Mapping[SpeechFormat, Codec] = {
    "mp3": Codec(b"audio/mpeg", MPEG_RATES, "MP3", "MPEG_LAYER_III"),
    "opus": Codec(b"audio/ogg", {8000, 12_000, 16_000, 24_000, 48_000}, "OGG", "OPUS"),
    "aac": Codec(b"audio/aac", MPEG_RATES),
    "flac": Codec(b"audio/flac", None, "FLAC", "PCM_16"),
    "wav": Codec(b"audio/wav", None),
    "pcm": Codec(b"audio/pcm", {PCM_RATE}),
}


def check_format(name: SpeechFormat) -> None:
    """Raise InvalidInput for a format whose encoder is not installed."""
    if name == "aac" and importlib.util.find_spec("av") is None:
        others = ", ".join(other for other in CODECS if other != "aac")
        reason = f"aac needs the server's extra [audio], which is not installed: use {others}"
        raise InvalidInput.at("response_format", reason)


class SpeechEncoder:
    """Encodes mono int16 samples of one rate; one thread at a time."""

    def __init__(self, name: SpeechFormat, rate: int) -> None:
        import soxr

        self.name, codec = name, CODECS[name]
        self.rate = rate if codec.rates is None or rate in codec.rates else PCM_RATE
        self._resampler = None
        if self.rate != rate:
            self._resampler = soxr.ResampleStream(rate, self.rate, 1, dtype="int16")
        self._buffer = io.BytesIO()
        self._sent = 0
        self._writer: Any = None
        if codec.container:
            import soundfile

            kind: dict[str, Any] = {"format": codec.container, "subtype": codec.subtype}
            if name == "mp3":  # players infer a stream's length from the rate of its first frame
                kind |= {"bitrate_mode": "CONSTANT", "compression_level": 0.5}
            self._writer = soundfile.SoundFile(self._buffer, "w", self.rate, 1, **kind)
        elif name == "aac":
            self._writer = AacWriter(self._buffer, self.rate)

    def encode(self, samples: np.ndarray, is_last: bool) -> bytes:
        """Return the bytes of the next samples; of the last ones with the end of the file."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        if self._writer is not None:
            self._writer.write(samples)
            if is_last:
                self._writer.close()
        else:
            if self.name == "wav" and not self._sent:
                self._buffer.write(wav_header(self.rate, samples.nbytes if is_last else None))
            self._buffer.write(samples.astype("<i2").tobytes())
        data = self._buffer.getbuffer()[self._sent :].tobytes()
        self._sent += len(data)
        return data


def wav_header(rate: int, size: int | None) -> bytes:
    """Return the header of mono int16 samples. `size`: their bytes, None if unknown."""
    whole = UNKNOWN_BYTES if size is None else size + WAV_HEADER_BYTES
    body = UNKNOWN_BYTES if size is None else size
    sound = pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return pack("<4sI4s", b"RIFF", whole, b"WAVE") + sound + pack("<4sI", b"data", body)


class AacWriter:
    """Writes AAC in ADTS frames, with the methods of soundfile's files."""

    def __init__(self, buffer: io.BytesIO, rate: int) -> None:
        import av

        self._frame = av.AudioFrame
        self._container: Any = av.open(buffer, "w", format="adts")
        self._stream = self._container.add_stream("aac", rate=rate, layout="mono")
        self._rate = rate

    def write(self, samples: np.ndarray) -> None:
        if len(samples):
            frame = self._frame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()
