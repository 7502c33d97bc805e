"""m4a and WebM, decoded by FFmpeg (PyAV) in a process of its own.

    Container ═ pipe ═ main: open the file as one format → a header → blocks of samples

FFmpeg also reads playlists, scripts and URLs. So this file runs as a program (`main`) with the open
file and without its name, one format by the file's first bytes, no protocols, and a short list of
codecs. The process has a limit of memory, and one of CPU time that grows with the decoded audio: a
file that exceeds either is unreadable.
"""

import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

# Offset and bytes of a file's signature, and FFmpeg's name for the format.
FORMATS = ((4, b"ftyp", "mov"), (0, b"\x1a\x45\xdf\xa3", "matroska"))
CODECS = "aac,alac,flac,mp3float,opus,libopus,vorbis,libvorbis,pcm_s16le"
# Open nothing but the given file; few streams, and a short search for them.
OPTIONS = {
    "protocol_whitelist": "none",
    "codec_whitelist": CODECS,
    "max_streams": "8",
    "probesize": "5000000",
    "analyzeduration": "5000000",
}
MEMORY_BYTES = 256 << 20  # of address space, beside the libraries'
CPU_S = 5  # CPU time before the first samples
MIN_SPEED = 40  # seconds of audio per second of CPU time, from then on; 300 is usual
MAX_CPU_S = 180
MAX_PROCESSES = 32
NICE = 10  # lower priority than the model's
FLOAT_BYTES = 4
NO_DECODER = (
    "m4a and WebM need the server's extra [audio], which is not installed: send WAV, FLAC, OGG or "
    "MP3"
)

_slots = threading.BoundedSemaphore(MAX_PROCESSES)


class UnreadableAudio(Exception):
    """The file is broken or of another format. With a message if a package is missing."""


class TooManyProcesses(Exception):
    """MAX_PROCESSES recordings are being read."""


def container_format(path: str) -> str | None:
    """Return FFmpeg's name for a file's format; None for files that libsndfile reads."""
    with open(path, "rb") as file:
        head = file.read(16)
    return next((name for at, magic, name in FORMATS if head.startswith(magic, at)), None)


class Container:
    """The server's end: the samples of a file's first audio stream. Same interface as SoundFile."""

    def __init__(self, path: str, kind: str) -> None:
        if importlib.util.find_spec("av") is None:
            raise UnreadableAudio(NO_DECODER)
        if not _slots.acquire(blocking=False):
            raise TooManyProcesses
        try:
            self._process = self._start(path, kind)
        except BaseException:
            _slots.release()
            raise
        self._end = weakref.finalize(self, _stop, self._process)
        try:
            header = json.loads(self._output.readline(1000))
            self.rate, self.channels, self.frames = map(int, header)
        except (ValueError, TypeError):
            self.close()
            raise UnreadableAudio from None

    @staticmethod
    def _start(path: str, kind: str) -> "subprocess.Popen[bytes]":
        # Run by path: `worker` may not be importable. In a session of its own, out of reach of a
        # terminal's signals.
        with open(path, "rb") as file:
            return subprocess.Popen(
                [sys.executable, "-P", __file__, kind, str(CPU_S)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def read(self, count: int) -> np.ndarray:
        data = self._output.read(count * FLOAT_BYTES)
        if not data and self._process.wait():
            raise UnreadableAudio
        return np.frombuffer(data, np.float32, len(data) // FLOAT_BYTES)

    def close(self) -> None:
        self._end()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(OSError), process:
        pass
    _slots.release()


# ── the process ──


def main() -> None:
    import av

    kind, cpu_s = sys.argv[1], int(sys.argv[2])
    set_limits()
    allow_cpu(cpu_s)
    output, samples = sys.stdout.buffer, 0
    file: Any = av.open(sys.stdin.buffer, format=kind, options=OPTIONS)
    with file as container:
        stream = container.streams.audio[0]
        if stream.codec_context.name not in CODECS.split(","):
            raise SystemExit(f"{stream.codec_context.name} is not decoded")
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        # Browsers write while they record and leave the duration out.
        frames = round((container.duration or 0) / 1_000_000 * rate)
        output.write(json.dumps([rate, channels, frames]).encode() + b"\n")
        output.flush()
        for mono in blocks(container, stream):
            samples += len(mono)
            output.write(mono.tobytes())
            allow_cpu(cpu_s + samples // (rate * MIN_SPEED))
    output.flush()


def set_limits() -> None:
    """Limit the process's memory and priority; it may write no files."""
    os.nice(NICE)
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = used + MEMORY_BYTES
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def allow_cpu(cpu_s: int) -> None:
    """Set the limit of the process's total CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_s, MAX_CPU_S), MAX_CPU_S))


def blocks(container: Any, stream: Any) -> Iterator[np.ndarray]:
    """Yield mono float32 samples. Packets that cannot be decoded are skipped, as players do."""
    import av

    planes = av.AudioResampler(format="fltp")
    for packet in container.demux(stream):
        frames: list[Any] = []
        with contextlib.suppress(av.error.InvalidDataError):
            frames = packet.decode()
        for frame in frames:
            for plane in planes.resample(frame):
                yield plane.to_ndarray().mean(axis=0, dtype=np.float32)


if __name__ == "__main__":
    main()
