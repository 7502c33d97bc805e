"""Audio and video files, decoded in processes that may die.

    MediaProcess ═ socket ═▶ main, the fork server: a fork for each file
                 ◀═ pipe ═══ a header → blocks of samples, or frames → a last byte

libsndfile and FFmpeg (PyAV) are C code that reads untrusted files. So this file runs as a program
(`main`), without our packages: it imports both libraries once, and each file is decoded in a fork
with limits of memory and of CPU time, which grows with the decoded audio. A fork that exceeds a
limit, or crashes, makes its file unreadable.

A video is read twice: by `probe` for its metadata, and by `write_frames` for the frames that were
chosen by it. Both read the times of all packets. A frame is decoded from the keyframe before it.

FFmpeg also reads playlists, scripts and URLs. It gets the open file without its name, one format by
the file's first bytes, no protocols, and a short list of codecs.
"""

import bisect
import contextlib
import fcntl
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

# Offset and bytes of a file's signature, and FFmpeg's name for the format.
FORMATS = ((4, b"ftyp", "mov"), (0, b"\x1a\x45\xdf\xa3", "matroska"))
CODECS = {
    "audio": "aac,alac,flac,mp3float,opus,libopus,vorbis,libvorbis,pcm_s16le",
    "video": "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,libdav1d,mpeg4",
}
# Open nothing but the given file; few streams, and a short search for them.
OPTIONS = {
    "protocol_whitelist": "none",
    "max_streams": "8",
    "probesize": "5000000",
    "analyzeduration": "5000000",
}
# Address space beside the libraries': for libsndfile, and for FFmpeg by the type of stream. A
# decoder of video keeps about twenty frames.
SOUND_FILE_MEMORY_BYTES = 64 << 20
MEMORY_BYTES = {"audio": 256 << 20, "video": 1 << 30}
CPU_S = 2  # CPU time before the first samples, and for each READ_BYTES of the file
VIDEO_CPU_S = 20  # likewise: each packet of a video is read
READ_BYTES = 32 << 20
MIN_SPEED = 1_000_000  # samples of all channels per second of CPU time; 20 million are usual
MIN_VIDEO_SPEED = 40_000_000  # pixels per second of CPU time; 200 million are usual
MAX_CPU_S = 180
POLL_MS = 500  # how often a reader looks whether its client has left
MAX_FRAME_PIXELS = 4096 * 2304
RATE_TOLERANCE = 0.01
MAX_PROCESSES = 64
NICE = 10  # lower priority than the model's
BLOCK_SAMPLES = 1 << 18  # decoded at a time by libsndfile, of all channels
FLOAT_BYTES = 4
UNKNOWN_FRAMES = (1 << 63) - 1  # libsndfile's value for a FLAC file without a length
STARTED = END = b"\1"
REQUEST_BYTES = 1 << 15
HEADER_BYTES = 1 << 10
NO_DECODER = (
    "m4a and WebM need the server's extra [audio], which is not installed: send WAV, FLAC, OGG or "
    "MP3"
)

_slots = threading.BoundedSemaphore(MAX_PROCESSES)


class UnreadableMedia(Exception):
    """The file is broken or of another format. With a message if a package is missing."""


class TooManyProcesses(OSError):
    """MAX_PROCESSES files are being read."""


class NotDecoded(Exception):
    """The program does not read this file, with a reason for the client."""


class MediaProcess:
    """The server's end of a process that reads a file, to be closed. `header`: of the file."""

    def __init__(self, path: str, task: str, kind: str, **options: Any) -> None:
        """`task`: a function of the program, which gets the `options`. `kind`: FFmpeg's name for
        the format, or none. Raises UnreadableMedia, TooManyProcesses, and OSError if no process
        starts."""
        if not _slots.acquire(blocking=False):
            raise TooManyProcesses
        try:
            with open(path, "rb") as file:
                request = {"task": task, "kind": kind, "options": options}
                self._output, owner = _start_fork(file.fileno(), request)
        except BaseException:
            _slots.release()
            raise
        self._end = weakref.finalize(self, _close, self._output, owner)
        try:
            self.header: dict[str, Any] = json.loads(self._output.readline(HEADER_BYTES))
        except ValueError:
            self.close()
            raise UnreadableMedia from None
        if reason := self.header.get("refused"):
            self.close()
            raise UnreadableMedia(reason)

    def close(self) -> None:
        self._end()


class AudioProcess(MediaProcess):
    """The samples of a file's first audio stream.

    `rate`: samples a second; `frames`: samples per channel, 0 if the header does not state them."""

    def __init__(self, path: str) -> None:
        kind = container_format(path)
        if kind and importlib.util.find_spec("av") is None:
            raise UnreadableMedia(NO_DECODER)
        super().__init__(path, "samples", kind)
        self._ended = False
        self.rate: int = self.header["rate"]
        self.channels: int = self.header["channels"]
        self.frames: int = self.header["frames"]

    def read(self, count: int) -> np.ndarray:
        """Return mono float32 [n]; n is less than `count` at the end only, 0 after it. Raises
        UnreadableMedia for a broken file."""
        if self._ended:
            return np.zeros(0, np.float32)
        data = self._output.read(count * FLOAT_BYTES)
        samples, rest = divmod(len(data), FLOAT_BYTES)
        self._ended = samples < count
        if self._ended and rest != len(END):
            raise UnreadableMedia
        return np.frombuffer(data, np.float32, samples)


class VideoProcess(MediaProcess):
    """Frames of a file's first video stream.

    `header`: `frames`, `fps`, `seconds`, and `width` and `height` of an upright frame."""

    def wait(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait for the next frame, or the end; return False once not `is_wanted()`."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        while is_wanted():
            if poll.poll(POLL_MS):
                return True
        return False

    def read(self, width: int, height: int) -> np.ndarray:
        """Return the next frame [height, width, 3] uint8, or raise UnreadableMedia."""
        data = self._output.read(height * width * 3)
        if len(data) < height * width * 3:
            raise UnreadableMedia
        return np.frombuffer(data, np.uint8).reshape(height, width, 3)


def container_format(path: str) -> str:
    """Return FFmpeg's name for a file's format; empty for files that it does not read."""
    with open(path, "rb") as file:
        head = file.read(16)
    return next((name for at, magic, name in FORMATS if head.startswith(magic, at)), "")


def start_fork_server() -> None:
    """Start the program ahead of the first recording."""
    _fork_server.connect()


def _start_fork(file: int, request: dict[str, Any]) -> tuple[IO[bytes], int]:
    """Return the pipe of a new process' output, and a descriptor whose closing ends it."""
    per_read_s = CPU_S if request["task"] == "samples" else VIDEO_CPU_S
    cpu_s = per_read_s * (1 + os.fstat(file).st_size // READ_BYTES)
    message = json.dumps({**request, "cpu_s": cpu_s}).encode()
    for _ in range(2):
        connection = _fork_server.connect()
        read_end, write_end = os.pipe()
        owner_end, owner = os.pipe()
        output = os.fdopen(read_end, "rb")
        with contextlib.suppress(OSError):  # the fork server was killed from outside
            socket.send_fds(connection, [message], [file, write_end, owner_end])
        os.close(write_end)
        os.close(owner_end)
        if output.read(len(STARTED)):
            return output, owner
        output.close()
        os.close(owner)
        _fork_server.drop(connection)
    raise OSError("no process starts to decode the file")


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
                connection, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
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
        request, files, *_ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            return
        if os.fork() == 0:
            try:
                connection.close()
                decode(json.loads(request), *files)
            finally:
                os._exit(0)
        for file in files:
            os.close(file)


def decode(request: dict[str, Any], file: int, output: int, owner: int) -> None:
    """Run the task of a request, which writes a header and the content of the file."""
    stream, run = TASKS[request["task"]]
    kind, cpu_s = request["kind"], request["cpu_s"]
    end_with(owner)
    set_limits(MEMORY_BYTES[stream] if kind else SOUND_FILE_MEMORY_BYTES)
    allow_cpu(cpu_s)
    with open(output, "wb") as pipe:
        pipe.write(STARTED)
        pipe.flush()
        try:
            run(pipe, file, kind, cpu_s, **request["options"])
        except NotDecoded as reason:
            write_header(pipe, refused=str(reason))
        pipe.write(END)


def write_header(pipe: IO[bytes], **header: Any) -> None:
    pipe.write(json.dumps(header).encode() + b"\n")
    pipe.flush()


def write_samples(pipe: IO[bytes], file: int, kind: str, cpu_s: int) -> None:
    source = open_container(file, kind) if kind else open_sound_file(file)
    write_header(pipe, rate=source.rate, channels=source.channels, frames=source.frames)
    samples = 0
    for mono in source.blocks:
        pipe.write(mono.tobytes())
        samples += len(mono) * source.channels
        allow_cpu(cpu_s + samples // MIN_SPEED)


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
    """Open a file's audio with FFmpeg."""
    container, stream = open_stream(file, kind, "audio")
    codec = stream.codec_context
    # Browsers write while they record and leave the duration out.
    frames = round((container.duration or 0) / 1_000_000 * codec.sample_rate)
    return Source(codec.sample_rate, codec.channels, frames, container_blocks(container, stream))


def open_stream(file: int, kind: str, stream_type: str) -> tuple[Any, Any]:
    """Open a file with FFmpeg, and return its container and first stream of the type."""
    import av

    codecs = CODECS[stream_type]
    options = {**OPTIONS, "codec_whitelist": codecs}
    container: Any = av.open(os.fdopen(file, "rb"), format=kind, options=options)
    stream = next((each for each in container.streams if each.type == stream_type), None)
    if stream is None:
        raise NotDecoded(f"the file has no {stream_type}")
    if (codec := stream.codec_context.name) not in codecs.split(","):
        raise NotDecoded(f"the codec {codec} is not decoded")
    return container, stream


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


class Timeline(NamedTuple):
    """The times of a video's packets in display order, in units of the stream's time base.

    Frames are numbered as in a video of a constant rate: a frame is the packet nearest to its time.
    `keys`: of the keyframes."""

    times: list[int]
    keys: list[int]

    @property
    def interval(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    def time(self, frame: int) -> int:
        wanted = self.times[0] + frame * self.interval
        after = bisect.bisect_left(self.times, wanted)
        return min(self.times[max(0, after - 1) : after + 1], key=lambda time: abs(time - wanted))

    def key(self, time: int) -> int:
        """Return the time of the last keyframe up to `time`."""
        return self.keys[max(0, bisect.bisect_right(self.keys, time) - 1)]

    @property
    def sequential(self) -> "Timeline":
        """The same frames, all decoded from the first keyframe."""
        return self._replace(keys=self.keys[:1])

    def count(self, times: Sequence[int]) -> int:
        """Return how many frames are decoded for those of ascending `times`."""
        last = {self.key(time): time for time in times}
        return sum(
            bisect.bisect_right(self.times, time) - bisect.bisect_left(self.times, key)
            for key, time in last.items()
        )


def read_timeline(container: Any, stream: Any) -> Timeline:
    times, keys = set(), set()
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None:
            if packet.is_keyframe:
                keys.add(packet.pts)
            if not packet.is_discard:  # decoded, but not shown
                times.add(packet.pts)
    if not times or not keys:
        raise NotDecoded("the file has no frames")
    container.seek(0)
    return Timeline(sorted(times), sorted(keys))


def open_video(file: int, kind: str) -> tuple[Any, Any, Timeline]:
    container, stream = open_stream(file, kind, "video")
    stream.codec_context.thread_count = 1
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MAX_FRAME_PIXELS:
        limit = f"at most {MAX_FRAME_PIXELS} are decoded"
        raise NotDecoded(f"a frame has {width} x {height} pixels; {limit}")
    # The sizes in the container and in the video may differ.
    stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    return container, stream, read_timeline(container, stream)


def probe(pipe: IO[bytes], file: int, kind: str, cpu_s: int) -> None:
    """Write a video's metadata, with the size of its first frame that can be decoded."""
    container, stream, timeline = open_video(file, kind)
    first = next(decoded_frames(container, stream, timeline, timeline.times[:1]))
    frames, rate = len(timeline.times), stream.average_rate
    measured = 1 / (timeline.interval * stream.time_base) if timeline.interval else rate or 1
    # The stated rate is exact where times are rounded to milliseconds.
    fps = float(rate if rate and abs(rate / measured - 1) < RATE_TOLERANCE else measured)
    width, height = first.width, first.height
    if round(first.rotation / 90) % 2:
        width, height = height, width
    seconds = frames / fps
    write_header(pipe, frames=frames, fps=fps, seconds=seconds, width=width, height=height)


def write_frames(
    pipe: IO[bytes], file: int, kind: str, cpu_s: int, numbers: Sequence[int], size: Sequence[int]
) -> None:
    """Write the frames of ascending `numbers` as upright RGB of a size (width, height)."""
    container, stream, timeline = open_video(file, kind)
    times = [timeline.time(number) for number in numbers]
    write_header(pipe)
    pixels = stream.codec_context.width * stream.codec_context.height
    allow_cpu(cpu_s + timeline.sequential.count(times) * pixels // MIN_VIDEO_SPEED)
    for frame in decoded_frames(container, stream, timeline, times):
        turns = round(frame.rotation / 90)
        width, height = size[::-1] if turns % 2 else size
        rgb = frame.to_ndarray(format="rgb24", width=width, height=height)
        pipe.write(np.rot90(rgb, turns).tobytes())
        pipe.flush()


def decoded_frames(
    container: Any, stream: Any, timeline: Timeline, times: Sequence[int]
) -> Iterator[Any]:
    """Yield a frame for each of ascending `times`, decoded from the keyframe before it. If one does
    not appear, as where a keyframe begins a gradual refresh, the rest is decoded from the start;
    then the next is yielded instead of one that cannot be decoded, at the end the last."""
    import av

    codec, number, latest, frame = stream.codec_context, 0, timeline.times[0] - 1, None
    start: int | None = timeline.key(times[0])
    jumps = len(timeline.keys) > 1
    for packet in container.demux(stream):
        if start is not None and packet.size:
            if packet.pts != start:
                continue  # packets before the keyframe
            codec.flush_buffers()
            start = None
        frames: list[Any] = []
        with contextlib.suppress(av.error.FFmpegError):
            frames = packet.decode()
        latest = latest if packet.pts is None else max(latest, packet.pts)
        for frame in frames:
            while number < len(times) and (frame.pts or 0) >= times[number]:
                if jumps and (frame.pts or 0) > times[number]:
                    break
                yield frame
                number += 1
        if number == len(times):
            return
        if jumps and frame and (frame.pts or 0) > times[number]:
            break
        if frames and (key := timeline.key(times[number])) > latest:
            start = key
    if jumps:
        container.seek(0)
        yield from decoded_frames(container, stream, timeline.sequential, times[number:])
        return
    if frame is None:
        raise NotDecoded("no frame can be decoded")
    for _ in times[number:]:
        yield frame


TASKS: dict[str, tuple[str, Callable[..., None]]] = {
    "samples": ("audio", write_samples),
    "probe": ("video", probe),
    "frames": ("video", write_frames),
}


if __name__ == "__main__":
    main()
