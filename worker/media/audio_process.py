"""Audio files, decoded in processes that may die.

    AudioProcess ═ socket ═▶ main, the fork server: a fork for each file
                 ◀═ pipe ═══ its header → blocks of samples → a last byte

libsndfile and FFmpeg (PyAV) are C code that reads untrusted files. So this file runs as a program
(`main`), without our packages: it imports both libraries once, and each file is decoded in a fork
with limits of memory and of CPU time, which grows with the decoded audio. A fork that exceeds a
limit, or crashes, makes its file unreadable.

FFmpeg also reads playlists, scripts and URLs. It gets the open file without its name, one format by
the file's first bytes, no protocols, and a short list of codecs.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

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
# Address space beside the libraries': FFmpeg's, and libsndfile's.
CONTAINER_MEMORY_BYTES = 256 << 20
MEMORY_BYTES = 64 << 20
CPU_S = 2  # CPU time before the first samples, and for each READ_BYTES of the file
READ_BYTES = 32 << 20
MIN_SPEED = 1_000_000  # samples of all channels per second of CPU time; 20 million are usual
MAX_CPU_S = 180
MAX_PROCESSES = 64
NICE = 10  # lower priority than the model's
BLOCK_SAMPLES = 1 << 18  # decoded at a time by libsndfile, of all channels
FLOAT_BYTES = 4
UNKNOWN_FRAMES = (1 << 63) - 1  # libsndfile's value for a FLAC file without a length
STARTED = END = b"\1"
REQUEST = struct.Struct("10s I")  # FFmpeg's name for the format, or none; seconds of CPU time
NO_DECODER = (
    "m4a and WebM need the server's extra [audio], which is not installed: send WAV, FLAC, OGG or "
    "MP3"
)

_slots = threading.BoundedSemaphore(MAX_PROCESSES)


class UnreadableAudio(Exception):
    """The file is broken or of another format. With a message if a package is missing."""


class TooManyProcesses(Exception):
    """MAX_PROCESSES recordings are being read."""


class AudioProcess:
    """The server's end: the samples of a file's first audio stream. Close it after use.

    `rate`: samples a second; `frames`: samples per channel, 0 if the header does not state them."""

    def __init__(self, path: str) -> None:
        """Raises UnreadableAudio, TooManyProcesses, and OSError if no process starts."""
        with open(path, "rb") as file:
            kind = container_format(file.fileno())
            if kind and importlib.util.find_spec("av") is None:
                raise UnreadableAudio(NO_DECODER)
            if not _slots.acquire(blocking=False):
                raise TooManyProcesses
            try:
                self._output, owner = _start_fork(file.fileno(), kind)
            except BaseException:
                _slots.release()
                raise
        self._end = weakref.finalize(self, _close, self._output, owner)
        self._ended = False
        try:
            self.rate, self.channels, self.frames = map(int, json.loads(self._output.readline(100)))
        except (ValueError, TypeError):
            self.close()
            raise UnreadableAudio from None

    def read(self, count: int) -> np.ndarray:
        """Return mono float32 [n]; n is less than `count` at the end only, 0 after it. Raises
        UnreadableAudio for a broken file."""
        if self._ended:
            return np.zeros(0, np.float32)
        data = self._output.read(count * FLOAT_BYTES)
        samples, rest = divmod(len(data), FLOAT_BYTES)
        self._ended = samples < count
        if self._ended and rest != len(END):
            raise UnreadableAudio
        return np.frombuffer(data, np.float32, samples)

    def close(self) -> None:
        """End the process."""
        self._end()


def container_format(file: int) -> str:
    """Return FFmpeg's name for a file's format; empty for files that libsndfile reads."""
    head = os.pread(file, 16, 0)
    return next((name for at, magic, name in FORMATS if head.startswith(magic, at)), "")


def start_fork_server() -> None:
    """Start the program ahead of the first recording."""
    _fork_server.connect()


def _start_fork(file: int, kind: str) -> tuple[IO[bytes], int]:
    """Return the pipe of a new process' output, and a descriptor whose closing ends it."""
    cpu_s = CPU_S * (1 + os.fstat(file).st_size // READ_BYTES)
    request = REQUEST.pack(kind.encode(), cpu_s)
    for _ in range(2):
        connection = _fork_server.connect()
        read_end, write_end = os.pipe()
        owner_end, owner = os.pipe()
        output = os.fdopen(read_end, "rb")
        with contextlib.suppress(OSError):  # the fork server was killed from outside
            socket.send_fds(connection, [request], [file, write_end, owner_end])
        os.close(write_end)
        os.close(owner_end)
        if output.read(len(STARTED)):
            return output, owner
        output.close()
        os.close(owner)
        _fork_server.drop(connection)
    raise OSError("no process starts to decode audio")


def _close(output: IO[bytes], owner: int) -> None:
    os.close(owner)
    output.close()
    _slots.release()


class ForkServer:
    """Starts the program with the first connection, and again if it died. The program ends with its
    connection, however the server ends. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def connect(self) -> socket.socket:
        with self._lock:
            if self._running is None:
                connection, other = socket.socketpair()
                with other:
                    self._running = connection, self._start(other)
            return self._running[0]

    def drop(self, connection: socket.socket) -> None:
        """End the program of a connection that has failed."""
        with self._lock:
            if self._running and self._running[0] is connection:
                connection.close()
                with self._running[1] as process:
                    process.kill()
                self._running = None

    @staticmethod
    def _start(connection: socket.socket) -> "subprocess.Popen[bytes]":
        # Run by path: `worker` may not be importable. In a session of its own, out of reach of a
        # terminal's signals.
        return subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,  # libsndfile prints the headers of some formats
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


_fork_server = ForkServer()


# ── the program ──


def main() -> None:
    """Fork for each request until the connection ends."""
    import soundfile  # noqa: F401  # for the forks

    with contextlib.suppress(ImportError):
        import av  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
    connection = socket.socket(fileno=0)
    while True:
        request, files, *_ = socket.recv_fds(connection, REQUEST.size, 3)
        if not request:
            return
        if os.fork() == 0:
            try:
                connection.close()
                decode(*REQUEST.unpack(request), *files)
            finally:
                os._exit(0)
        for file in files:
            os.close(file)


def decode(kind: bytes, cpu_s: int, file: int, output: int, owner: int) -> None:
    """Write a file's header and samples."""
    container = kind.rstrip(b"\0").decode()
    end_with(owner)
    set_limits(CONTAINER_MEMORY_BYTES if container else MEMORY_BYTES)
    allow_cpu(cpu_s)
    with open(output, "wb") as pipe:
        pipe.write(STARTED)
        pipe.flush()
        source = open_container(file, container) if container else open_sound_file(file)
        pipe.write(json.dumps(source[:3]).encode() + b"\n")
        pipe.flush()
        samples = 0
        for mono in source.blocks:
            pipe.write(mono.tobytes())
            samples += len(mono) * source.channels
            allow_cpu(cpu_s + samples // MIN_SPEED)
        pipe.write(END)


def end_with(owner: int) -> None:
    """Let the kernel end this process (SIGIO) when the other end of the pipe is closed."""
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(owner, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([owner], [], [], 0)[0]:  # closed before
        os._exit(0)


def set_limits(memory_bytes: int) -> None:
    """Limit the process's memory and priority; it may write no files."""
    os.nice(NICE)
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = used + memory_bytes
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def allow_cpu(cpu_s: int) -> None:
    """Set the limit of the process's total CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_s, MAX_CPU_S), MAX_CPU_S))


class Source(NamedTuple):
    """An open file: its header, and its samples as mono float32 [n]."""

    rate: int
    channels: int
    frames: int  # samples per channel; 0: not stated
    blocks: Iterator[np.ndarray]


def open_sound_file(file: int) -> Source:
    """Open a file with libsndfile, which returns at most as many samples as the header states."""
    import soundfile

    sound = soundfile.SoundFile(file)
    frames = int(sound.frames)
    if frames == UNKNOWN_FRAMES:
        frames = 0
        # soundfile would seek to its position after each read, which fails at the end
        sound.seekable = lambda: False
    return Source(int(sound.samplerate), int(sound.channels), frames, sound_file_blocks(sound))


def sound_file_blocks(sound: Any) -> Iterator[np.ndarray]:
    count = max(1, BLOCK_SAMPLES // sound.channels)
    while len(block := sound.read(count, "float32", always_2d=True)):
        with np.errstate(all="ignore"):  # broken files hold any number
            yield block.mean(axis=1)


def open_container(file: int, kind: str) -> Source:
    """Open a file with FFmpeg."""
    import av

    container: Any = av.open(os.fdopen(file, "rb"), format=kind, options=OPTIONS)
    stream = container.streams.audio[0]
    codec = stream.codec_context
    if codec.name not in CODECS.split(","):
        raise SystemExit(f"{codec.name} is not decoded")
    # Browsers write while they record and leave the duration out.
    frames = round((container.duration or 0) / 1_000_000 * codec.sample_rate)
    return Source(codec.sample_rate, codec.channels, frames, container_blocks(container, stream))


def container_blocks(container: Any, stream: Any) -> Iterator[np.ndarray]:
    """Yield samples. Packets that cannot be decoded are skipped, as players do."""
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
