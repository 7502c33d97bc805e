"""m4a and WebM, decoded by FFmpeg (PyAV) in a process of its own.

    Container ═ pipe ═ main: open, of one format → a header → blocks of samples, as they are read

FFmpeg reads much else: playlists, scripts, addresses. So this file runs as a program (`main`) that
is told the format by how the file begins, is given its open file and no name, knows no protocol,
and decodes one stream of sound by a codec of a short list. What a broken file costs is the
process's: it is held to a memory of its own and to a time that grows with the sound that it gives,
and its end by those is an unreadable file.
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

# How a file begins, from which byte on, and FFmpeg's name for what it then is.
FORMATS = ((4, b"ftyp", "mov"), (0, b"\x1a\x45\xdf\xa3", "matroska"))
CODECS = "aac,alac,flac,mp3float,opus,libopus,vorbis,libvorbis,pcm_s16le"
# Nothing beside the file that is given is opened; few streams, and no long search for more.
OPTIONS = {
    "protocol_whitelist": "none",
    "codec_whitelist": CODECS,
    "max_streams": "8",
    "probesize": "5000000",
    "analyzeduration": "5000000",
}
MEMORY_BYTES = 256 << 20  # of address space, beyond the libraries'
CPU_S = 5  # of a core, before there is any sound
SLOWEST = 40  # times as fast as it is heard, from there on; 300 is usual
MOST_CPU_S = 180
MOST = 32  # processes at a time
NICE = 10  # the model goes first
FLOAT_BYTES = 4
NO_DECODER = (
    "m4a, WebM and their like are read where the server has its extra [audio] installed, and here "
    "it is not: send WAV, FLAC, OGG or MP3"
)

_places = threading.BoundedSemaphore(MOST)


class Unreadable(Exception):
    """It is not what it looks like, or broken, or read where more is installed: then it says so."""


class TooMany(Exception):
    """As many are being read as may be at a time."""


def container_format(path: str) -> str | None:
    """FFmpeg's name for a file; None: it is not left to FFmpeg."""
    with open(path, "rb") as opened:
        head = opened.read(16)
    return next((name for at, mark, name in FORMATS if head.startswith(mark, at)), None)


class Container:
    """The server's end: the samples of a file's first stream of sound, as SoundFile gives them."""

    def __init__(self, path: str, kind: str) -> None:
        if importlib.util.find_spec("av") is None:
            raise Unreadable(NO_DECODER)
        if not _places.acquire(blocking=False):
            raise TooMany
        try:
            self._process = self._start(path, kind)
        except BaseException:
            _places.release()
            raise
        self._end = weakref.finalize(self, _stop, self._process)
        try:
            header = json.loads(self._output.readline(1000))
            self.rate, self.channels, self.frames = map(int, header)
        except (ValueError, TypeError):
            self.close()
            raise Unreadable from None

    @staticmethod
    def _start(path: str, kind: str) -> "subprocess.Popen[bytes]":
        # By its file, which imports nothing of ours: `worker` may not be on the path. In a session
        # of its own, so that a terminal's signals do not reach it.
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
            raise Unreadable
        return np.frombuffer(data, np.float32, len(data) // FLOAT_BYTES)

    def close(self) -> None:
        self._end()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(OSError), process:
        pass
    _places.release()


# ── the process ──


def main() -> None:
    import av

    kind, cpu_s = sys.argv[1], int(sys.argv[2])
    limit()
    allow(cpu_s)
    output, heard = sys.stdout.buffer, 0
    opened: Any = av.open(sys.stdin.buffer, format=kind, options=OPTIONS)
    with opened as container:
        stream = container.streams.audio[0]
        if stream.codec_context.name not in CODECS.split(","):
            raise SystemExit(f"{stream.codec_context.name} is not decoded")
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        # A browser writes while it records, and leaves the duration out.
        frames = round((container.duration or 0) / 1_000_000 * rate)
        output.write(json.dumps([rate, channels, frames]).encode() + b"\n")
        output.flush()
        for mono in blocks(container, stream):
            heard += len(mono)
            output.write(mono.tobytes())
            allow(cpu_s + heard // (rate * SLOWEST))
    output.flush()


def limit() -> None:
    """What the kernel lets the process have from here on; it writes no files."""
    os.nice(NICE)
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = used + MEMORY_BYTES
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def allow(cpu_s: int) -> None:
    """So many seconds of a core in all."""
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_s, MOST_CPU_S), MOST_CPU_S))


def blocks(container: Any, stream: Any) -> Iterator[np.ndarray]:
    """Mono float32 samples; what cannot be decoded is left out, as players do."""
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
