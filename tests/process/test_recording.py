"""Recordings are read in windows, in any format, with no more than a window in memory."""

import ctypes
import gc
import importlib.util
import io
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np
import pytest
import soundfile

from batching.errors import InvalidInput, QueueFull
from tests.serving import wait_until
from tests.transcribing import CTC, WHISPER, new_speech_engine, prepared
from tests.unit.test_media import tone, without_length
from worker.media import audio, media_process
from worker.media.audio import Recording
from worker.messages.transcription import TranscriptionInput

RATE = 16_000
av = pytest.importorskip("av")
FOLDER = TemporaryDirectory()


def path_of(sound: bytes) -> str:
    path = Path(FOLDER.name) / str(uuid4())
    path.write_bytes(sound)
    return str(path)


def contained(kind: str, codec: str, seconds: float = 2.0, duration: bool = True) -> bytes:
    """Return a tone in m4a or WebM; without `duration` as browsers record it."""
    at = np.arange(round(seconds * 48_000)) / 48_000
    samples = (0.3 * np.sin(2 * np.pi * 440 * at)).astype(np.float32)
    buffer = io.BytesIO()
    options = {} if duration else {"live": "1"}
    with av.open(buffer, "w", format=kind, options=options) as file:
        stream = file.add_stream(codec, rate=48_000, layout="stereo")
        both = np.stack([samples, samples])
        frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "codec", "duration"),
    [("mp4", "aac", True), ("webm", "libopus", True), ("webm", "libopus", False)],
)
def test_the_formats_of_phones_and_browsers_are_read(kind: str, codec: str, duration: bool) -> None:
    sound = contained(kind, codec, 2.0, duration)
    with Recording(path_of(sound), RATE) as recording:
        assert recording.seconds == pytest.approx(2.0 if duration else 0.0, abs=0.1)
        samples = recording.window(0, 10 * RATE)
        assert recording.seconds == pytest.approx(2.0, abs=0.1)
    assert len(samples) == pytest.approx(2 * RATE, abs=0.1 * RATE)
    assert np.abs(samples[RATE // 2 : RATE]).max() == pytest.approx(0.3, abs=0.05)


def test_windows_are_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = tone(2.0, 44_100, channels=2)
    with Recording(path_of(sound), RATE) as recording:
        whole = recording.window(0, 10 * RATE).copy()
    monkeypatch.setattr(audio, "BLOCK", 3000)
    with Recording(path_of(sound), RATE) as recording:
        for start, count in ((0, 100), (50, 9000), (9000, 10), (20_000, 20_000), (50_000, 5)):
            np.testing.assert_allclose(
                recording.window(start, count), whole[start : start + count], atol=1e-5
            )
        np.testing.assert_allclose(recording.window(10, 90), whole[10:100], atol=1e-5)  # again


def test_the_buffer_holds_no_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "BLOCK", 1000)
    with Recording(path_of(tone(5.0, RATE)), RATE) as recording:
        for start in range(0, 5 * RATE, 4000):
            recording.window(start, 4000)
            assert recording._buffer.base is None
            assert len(recording._buffer) <= 5000


def test_the_length_in_the_header_is_not_trusted() -> None:
    whole = tone(4.0, kind="MP3")
    with Recording(path_of(whole[: len(whole) // 2]), RATE) as recording:
        header_s = recording.seconds
        recording.window(0, 10 * RATE)
        assert recording.seconds < 0.7 * header_s
    silent = path_of(contained("webm", "libopus", 3.0, duration=False))
    with (
        Recording(silent, RATE, max_s=2.0) as recording,
        pytest.raises(InvalidInput, match="at most 2 seconds"),
    ):
        recording.window(0, 10 * RATE)


def test_without_pyav_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = contained("mp4", "aac")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"extra \[audio\]"):
        Recording(path_of(sound), RATE)


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_broken_containers_are_refused(kind: str) -> None:
    whole = contained(kind, "aac" if kind == "mp4" else "libopus")
    rng = np.random.default_rng(0)
    for cut in (16, 40, 200, len(whole) // 2):
        broken = bytearray(whole[:cut])
        broken[12:] = rng.integers(0, 256, len(broken) - 12, np.uint8).tobytes()
        with (
            pytest.raises(InvalidInput, match="can be read"),
            Recording(path_of(bytes(broken)), RATE) as it,
        ):
            it.window(0, RATE)


def test_a_file_without_audio_is_cut_off_by_its_cpu_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has many packets of half a sample."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska", options={"live": "1"}) as file:
        stream = file.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for at in range(250_000):
            packet = av.Packet(b"x")
            packet.stream, packet.pts, packet.dts = stream, at, at
            file.mux(packet)
    monkeypatch.setattr(media_process, "CPU_S", 1)
    with (
        Recording(path_of(buffer.getvalue()), RATE) as hollow,
        pytest.raises(InvalidInput, match="can be"),
    ):
        hollow.window(0, RATE)


def test_only_the_given_file_is_opened(tmp_path: Path) -> None:
    """Playlists and lists of files are formats that are not read."""
    secret = tmp_path / "secret.wav"
    secret.write_bytes(tone(1.0))
    for text in (
        f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n",
        f"ffconcat version 1.0\nfile {secret}\n",
    ):
        for head in (b"", b"\0\0\0\x18ftypM4A ", b"\x1a\x45\xdf\xa3"):
            with pytest.raises(InvalidInput, match="can be read"):
                Recording(path_of(head + text.encode()), RATE)


def processes() -> list[str]:
    """Return the ids of the processes that decode recordings."""
    server = fork_server()
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def fork_server() -> int:
    running = media_process._fork_server._running
    assert running
    return running[1].pid


@pytest.mark.parametrize("sound", [tone(60.0), contained("webm", "libopus", 60.0)])
def test_closing_a_recording_ends_its_process(sound: bytes) -> None:
    with Recording(path_of(sound), RATE) as recording:
        recording.window(0, 100)
        wait_until(lambda: len(processes()) == 1)  # blocked on the pipe; those of others have ended
    wait_until(lambda: not processes())


def test_processes_are_limited_and_a_short_recording_keeps_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(media_process, "_slots", threading.BoundedSemaphore(1))
    (tmp_path / "a.webm").write_bytes(contained("webm", "libopus"))
    payload = TranscriptionInput(str(tmp_path / "a.webm"))
    waiting = [prepared(new_speech_engine(kind), payload) for kind in (WHISPER, CTC, WHISPER)]
    with Recording(payload.path, RATE), pytest.raises(QueueFull, match="files decoded at a time"):
        Recording(payload.path, RATE)
    with pytest.raises(InvalidInput):
        Recording(path_of(b"\x1a\x45\xdf\xa3 and no more"), RATE)
    Recording(payload.path, RATE).close()
    assert len(waiting) == 3


def test_a_refused_recording_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process ends although the exception is still referenced."""
    monkeypatch.setattr(media_process, "_slots", threading.BoundedSemaphore(1))
    broken = np.full(RATE, np.nan, np.float32)
    (tmp_path / "a.webm").write_bytes(contained("webm", "libopus"))
    payload, refusals = TranscriptionInput(str(tmp_path / "a.webm")), []
    for invalid in (replace(payload, language="klingon"), replace(payload, prompt="<|en|>")):
        for kind in (WHISPER, CTC):
            with pytest.raises(InvalidInput) as refusal:
                prepared(new_speech_engine(kind), invalid)
            refusals.append(refusal)
    monkeypatch.setattr(media_process.AudioProcess, "read", lambda self, count: broken)
    for kind in (WHISPER, CTC):
        with pytest.raises(InvalidInput, match="too large") as refusal:
            prepared(new_speech_engine(kind), payload)
        refusals.append(refusal)
    assert len(refusals) == 6


def test_a_dropped_recording_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client disconnected before the worker got the item."""
    monkeypatch.setattr(media_process, "_slots", threading.BoundedSemaphore(1))
    path = path_of(contained("webm", "libopus", 60.0))
    gc.disable()
    try:
        for _ in range(2):
            assert len(Recording(path, RATE).window(0, 100)) == 100
    finally:
        gc.enable()


class Bits:
    """Numbers of given widths, lowest bit first."""

    def __init__(self, *fields: tuple[int, int]) -> None:
        self.value = self.width = 0
        for value, width in fields:
            self.value |= value << self.width
            self.width += width

    def __bytes__(self) -> bytes:
        return self.value.to_bytes(-(-self.width // 8), "little")


def ogg_page(packets: list[bytes], number: int, kind: int) -> bytes:
    sizes = b"".join(b"\xff" * (len(p) // 255) + bytes([len(p) % 255]) for p in packets)
    head = struct.pack("<4sBBqIIIB", b"OggS", 0, kind, 0, 1, number, 0, len(sizes))
    page, checksum = head + sizes + b"".join(packets), 0
    for byte in page:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1) ^ (0x104C11DB7 if checksum >> 31 else 0)
    return page[:22] + struct.pack("<I", checksum) + page[26:]


def vorbis_with_codebooks(count: int, log_entries: int) -> bytes:
    """Return OGG whose setup header has large codebooks in few bytes: "ordered" ones, in which all
    entries have words of the same length."""
    entries = 1 << log_entries
    book = (0x564342, 24), (1, 16), (entries, 24), (1, 1), (log_entries - 1, 5)
    books = [*book, (entries, log_entries + 1), (0, 4)] * count
    floors = (0, 6), (1, 16), (0, 5), (0, 2), (4, 4)
    residues = (0, 6), (0, 16), (0, 24), (16, 24), (15, 24), (0, 6), (0, 8), (0, 4)
    mappings_and_modes = (0, 6), (0, 16), (0, 28), (0, 6), (0, 41), (1, 1)
    fields = (count - 1, 8), *books, (0, 22), *floors, *residues, *mappings_and_modes
    setup = b"\5vorbis" + bytes(Bits(*fields))
    format_ = b"\1vorbis" + struct.pack("<IBIIIIH", 0, 1, RATE, 0, 0, 0, 0x188)
    comment = b"\3vorbis" + struct.pack("<IIB", 0, 0, 1)
    first, second = ogg_page([format_], 0, 2), ogg_page([comment, setup], 1, 0)
    return first + second + ogg_page([b"\0"] * 4, 2, 4)


@pytest.mark.parametrize(("count", "log_entries"), [(1, 20), (255, 18)])
def test_a_file_that_crashes_its_decoder_or_needs_much_memory_is_refused(
    count: int, log_entries: int
) -> None:
    with pytest.raises(InvalidInput, match="can be read"):
        Recording(path_of(vorbis_with_codebooks(count, log_entries)), RATE)


def test_a_killed_fork_server_is_started_again() -> None:
    Recording(path_of(tone(1.0)), RATE).close()
    os.kill(fork_server(), signal.SIGKILL)
    for _ in range(2):
        with Recording(path_of(tone(1.0)), RATE) as recording:
            assert len(recording.window(0, 2 * RATE)) == RATE


def test_the_processes_end_with_a_killed_server() -> None:
    program = (
        "import sys, time; from worker.media import audio, media_process;"
        "recording = audio.Recording(sys.argv[1], 16_000);"
        "server = media_process._fork_server._running[1].pid;"
        "children = open(f'/proc/{server}/task/{server}/children').read();"
        "print(server, children, flush=True);"
        "time.sleep(60)"
    )
    words = [sys.executable, "-c", program, path_of(tone(60.0))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        started = [int(word) for word in server.stdout.readline().split()]
        server.kill()
    assert len(started) == 2
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in started))


def test_decoders_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """libsndfile prints the bytes that are wrong in a MIDI Sample Dump."""
    sound = bytearray(tone(1.0, kind="SDS"))
    sound[21] = 0
    with suppress(InvalidInput), Recording(path_of(bytes(sound)), RATE) as recording:
        recording.window(0, RATE)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")


def unknown_length(samples: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(samples, np.int16), RATE, format="FLAC")
    return without_length(buffer.getvalue())


def test_flac_of_unknown_length_is_read_to_its_end_within_bounds() -> None:
    with Recording(path_of(unknown_length(3 * RATE)), RATE) as recording:
        assert recording.seconds == 0
        assert len(recording.window(0, 10 * RATE)) == 3 * RATE
        assert recording.seconds == 3
    with Recording(path_of(unknown_length(3 * RATE)), RATE) as recording:
        assert recording.length() == 3
        assert len(recording.window(0, RATE)) == RATE
        assert recording.seconds == 3  # also while it is read again
        assert len(recording.window(0, 10 * RATE)) == 3 * RATE
    with (
        Recording(path_of(unknown_length(3 * RATE)), RATE, max_s=2) as recording,
        pytest.raises(InvalidInput, match="at most 2 seconds"),
    ):
        recording.length()


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38])
def test_samples_whose_power_overflows_are_refused(odd: float) -> None:
    samples = np.zeros(RATE, np.float32)
    samples[-1] = odd
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="FLOAT")
    with (
        Recording(path_of(buffer.getvalue()), RATE) as recording,
        pytest.raises(InvalidInput, match="too large"),
    ):
        recording.window(0, RATE)
