"""Videos are decoded in a process of their own, within limits, however hostile the file."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import ClientGone, InvalidInput
from tests.clips import SIDE, av, clip, number_of
from tests.process.test_recording import contained
from tests.unit.test_media import tone
from worker.media import media_process
from worker.media.videos import VideoMetadata, probe_video, read_frames

MAX_PIXELS = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clip"


def probe(path: Path, video: bytes, max_pixels: int = MAX_PIXELS) -> VideoMetadata:
    path.write_bytes(video)
    return probe_video(str(path), "video", max_pixels)


def numbers(path: Path, indices: Sequence[int], size: tuple[int, int] = SIDE) -> list[int]:
    return [number_of(each) for each in read_frames(str(path), indices, size, "video")]


@pytest.mark.parametrize(
    ("kind", "codec", "pixel_format"),
    [
        ("mp4", "h264", "yuv420p"),
        ("mov", "h264", "yuv444p"),
        ("mp4", "hevc", "yuv420p10le"),
        ("mp4", "mpeg4", "yuv420p"),
        ("webm", "libvpx", "yuv420p"),
        ("webm", "libvpx-vp9", "yuva420p"),
        ("matroska", "libsvtav1", "yuv420p10le"),
    ],
)
def test_the_chosen_frames_of_any_codec_are_read(
    path: Path, kind: str, codec: str, pixel_format: str
) -> None:
    video = clip(kind=kind, codec=codec, pixel_format=pixel_format)
    metadata = probe(path, video)
    assert metadata == pytest.approx((20, 10, 2, *SIDE))
    assert numbers(path, range(20)) == [*range(20)]
    assert numbers(path, [19, 3, 3, 9, 17]) == [19, 3, 3, 9, 17]
    assert numbers(path, [7], (16, 12)) == [7]


def test_frames_are_those_of_the_file(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), np.uint8)
    video = clip(make=lambda number: noise[number])
    probe(path, video)
    with av.open(str(path)) as file:
        own = [each.to_ndarray(format="rgb24") for each in file.decode(video=0)]
    np.testing.assert_array_equal(read_frames(str(path), [2, 11], SIDE, "video"), own[2:12:9])


def test_frames_within_a_gradual_refresh_are_those_asked_for(path: Path) -> None:
    """A decoder shows nothing of one before its end."""
    probe(path, clip(frames=27, options={"x264-params": "intra-refresh=1:keyint=8"}))
    for asked in ([0, 26], [9], [17, 20], [25]):
        assert numbers(path, asked) == asked


def test_frames_of_a_variable_rate_are_numbered_by_time(path: Path) -> None:
    """Ten frames of the first second, and one each of the following nine."""
    times = [*range(0, 1000, 100), *range(1000, 10_000, 1000)]
    metadata = probe(path, clip(frames=19, times=times, options={"bf": "0"}))
    assert metadata.frames == 19
    assert metadata.seconds == pytest.approx(9.5, abs=0.1)
    assert numbers(path, [0, 1, 2, 4, 18]) == [0, 5, 10, 11, 18]


@pytest.mark.parametrize(("rotation", "corner"), [(90, (1, 0)), (180, (1, 1)), (-90, (0, 1))])
def test_frames_are_upright(path: Path, rotation: int, corner: tuple[int, int]) -> None:
    """A bright upper left corner is turned counterclockwise."""
    metadata = probe(path, clip(rotation=rotation))
    size = SIDE if rotation == 180 else SIDE[::-1]
    assert (metadata.width, metadata.height) == size
    [pixels] = read_frames(str(path), [0], size, "video")
    at = tuple(-1 if end else 0 for end in corner)
    assert pixels[at].mean() > 200
    assert pixels[tuple(-1 - end for end in at)].mean() < 100


def test_a_frame_costs_the_group_before_it_alone(path: Path) -> None:
    timeline = media_process.Timeline([*range(0, 1000, 10)], [*range(0, 1000, 100)])
    assert timeline.count([500, 520, 990]) == 3 + 10
    path.write_bytes(clip(frames=40, options={"bf": "0"}))
    container, stream, timeline = media_process.open_video(os.open(path, os.O_RDONLY), "mov")
    decoded: list[int] = []

    class CountedPacket:
        def __init__(self, packet: Any) -> None:
            self.pts, self.size, self.packet = packet.pts, packet.size, packet

        def decode(self) -> list[Any]:
            frames: list[Any] = self.packet.decode()
            decoded.extend(number_of(each.to_ndarray(format="rgb24")) for each in frames)
            return frames

    class CountedContainer:
        def demux(self, stream: Any) -> Iterator[CountedPacket]:
            return map(CountedPacket, container.demux(stream))

    times = [timeline.time(number) for number in (9, 26)]
    frames = [*media_process.decoded_frames(CountedContainer(), stream, timeline, times)]
    assert [number_of(each.to_ndarray(format="rgb24")) for each in frames] == [9, 26]
    assert decoded == [8, 9, 24, 25, 26]  # a group has eight frames


def test_truncated_files_give_what_they_have_or_are_refused(path: Path) -> None:
    video = clip(kind="matroska", frames=40)
    metadata = probe(path, video[: len(video) * 2 // 3])
    assert 10 < metadata.frames < 40
    assert numbers(path, [0, metadata.frames - 1])[0] == 0
    for content in (video[:300], clip()[:-2000], clip()[:40], b"", video[:4]):
        with pytest.raises(InvalidInput, match="can be read") as refusal:
            probe(path, content)
        assert refusal.value.param == "video"


def test_frames_that_are_broken_are_replaced_by_the_next(path: Path) -> None:
    video = bytearray(clip(kind="matroska", codec="mpeg4", frames=20, options={"g": "1"}))
    whole = probe(path, bytes(video))
    rng = np.random.default_rng(0)
    for at in range(len(video) // 3, len(video) * 2 // 3, 97):
        video[at] = rng.integers(256)
    path.write_bytes(video)
    assert len(read_frames(str(path), range(whole.frames), SIDE, "video")) == whole.frames


def test_random_bytes_end_the_process_and_not_the_server(path: Path) -> None:
    rng = np.random.default_rng(1)
    for kind in ("mp4", "matroska"):
        whole = clip(kind=kind)
        for _ in range(8):
            broken = bytearray(whole)
            for at in rng.integers(12, len(whole), 60):
                broken[at] = rng.integers(256)
            try:
                metadata = probe(path, bytes(broken))
                read_frames(str(path), [0, metadata.frames - 1], SIDE, "video")
            except InvalidInput:
                pass
    assert probe(path, clip()).frames == 20


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        (lambda: clip(kind="mov", codec="prores", pixel_format="yuv422p10le"), "codec prores"),
        (lambda: clip(kind="matroska", codec="ffv1"), "codec ffv1"),
        (lambda: clip(kind="avi", codec="mpeg4"), "can be read"),
        (lambda: clip(kind="matroska", frames=0), "can be read"),
        (lambda: tone(1.0), "can be read"),
        (lambda: contained("mp4", "aac"), "has no video"),
        (lambda: clip(frames=3, times=[0, 1000, 9_000_000]), "lasts 13500 seconds"),
        (lambda: clip(size=(1024, 1024)), "1024 x 1024 pixels; at most 1000000"),
    ],
)
def test_refusals_say_why(path: Path, video: object, reason: str) -> None:
    assert callable(video)
    with pytest.raises(InvalidInput, match=reason):
        probe(path, video())


def test_sizes_that_the_video_states_are_not_trusted(path: Path) -> None:
    """The container states a small size, the frames have more pixels than are decoded."""
    width, height = size = 4112, 2400
    video = clip(frames=1, kind="mp4", codec="mpeg4", size=size)
    stated = b"%b\0\0%b" % (width.to_bytes(2, "big"), height.to_bytes(2, "big"))
    small = video.replace(stated.replace(b"\0\0", b""), b"\0\x40\0\x30")
    assert small != video
    for content in (video, small):
        with pytest.raises(InvalidInput, match=f"{width} x {height} pixels; at most"):
            probe(path, content, 1 << 40)


def test_playlists_and_scripts_are_not_opened(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(clip())
    for text in (f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n", f"ffconcat version 1.0\nfile {secret}"):
        for head in (b"", b"\0\0\0\x18ftypmp42", b"\x1a\x45\xdf\xa3"):
            with pytest.raises(InvalidInput, match="can be read"):
                probe(path, head + text.encode())


def test_cpu_time_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_process, "VIDEO_CPU_S", 0)
    with pytest.raises(InvalidInput, match="can be read"):
        probe(path, clip(frames=400, size=(640, 480)))


def test_frames_that_are_too_large_are_refused_with_their_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_process, "MAX_FRAME_PIXELS", 1000)
    path.write_bytes(clip())
    with pytest.raises(media_process.NotDecoded, match="a frame has 64 x 48 pixels; at most 1000"):
        media_process.open_video(os.open(path, os.O_RDONLY), "mov")


def test_a_client_that_left_ends_the_decoding(path: Path) -> None:
    path.write_bytes(clip())
    with pytest.raises(ClientGone):
        read_frames(str(path), [1, 2], SIDE, "video", lambda: False)
