"""Videos in the messages of chats and responses, over a real socket with a fake generator."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.http import fetch
from tests.event_streams import post
from tests.fake_generator import FakeGenerator
from tests.http.test_chat_audio import AT, CHAT, RESPONSES, chat, text, user
from tests.http.test_fetch import replying
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving
from worker.messages.generation import MediaInput

DATA = base64.b64encode(b"mp4").decode()
URL = f"data:video/mp4;base64,{DATA}"
PLACE = {"type": "video"}


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    fake = FakeGenerator()
    fake.refused_media = {}
    return fake


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator, image_fetch=("127.0.0.1",)) as started:
        yield started


@pytest.fixture(autouse=True)
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")


def video(data: str = DATA, format: str = "mp4") -> dict[str, Any]:
    return {"type": "input_video", "input_video": {"data": data, "format": format}}


def link(url: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def expected(param: str, **limits: float) -> MediaInput:
    return MediaInput(b"mp4", "auto", param, kind="video", limits=tuple(limits.items()))


def test_videos_keep_their_positions_among_text(generator: FakeGenerator, server: Server) -> None:
    image = {"type": "image_url", "image_url": f"data:image/png;base64,{DATA}"}
    got = chat(generator, server, user(video(), text("one"), image, link(URL)))
    assert got.messages[0]["content"] == [PLACE, text("one"), {"type": "image"}, PLACE]
    first, _, last = got.media
    assert first == expected(f"{AT}.input_video")
    assert last == expected("messages[0].content[3].video_url")


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"mm_processor_kwargs": {"fps": 1.5}}, {"fps": 1.5}),
        ({"mm_processor_kwargs": {"num_frames": 8, "max_pixels": 4000}}, {"num_frames": 8}),
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, {"num_frames": 8}),
        ({"media_io_kwargs": {"image": {"image_mode": "RGB"}}}, {}),
    ],
)
def test_a_request_chooses_frames(
    generator: FakeGenerator, server: Server, options: dict[str, Any], limits: dict[str, float]
) -> None:
    image = {"type": "image_url", "image_url": f"data:image/png;base64,{DATA}"}
    got = chat(generator, server, {**user(link(URL), image), **options})
    assert got.media[0] == expected(f"{AT}.video_url", **limits)
    assert dict(got.media[1].limits).keys() <= {"max_pixels"}
    assert got.media[0].digest != expected("", fps=4.5).digest


def test_the_sound_of_a_video_follows_it(generator: FakeGenerator, server: Server) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nContent-Length: 3\r\n\r\n"
    sound = {"mm_processor_kwargs": {"use_audio_in_video": True, "fps": 2}}
    with replying(head + b"mp4") as (port, requests):
        parts = link(f"http://127.0.0.1:{port}/a.mp4"), text("one"), video()
        got = chat(generator, server, {**user(*parts), **sound})
    place = {"type": "audio"}
    assert got.messages[0]["content"] == [PLACE, place, text("one"), PLACE, place]
    assert [(file.kind, file.data) for file in got.media] == 2 * [
        ("video", b"mp4"),
        ("audio", b"mp4"),
    ]
    assert [file.limits for file in got.media] == 2 * [(("fps", 2.0),), ()]
    assert len(requests) == 1  # the link is fetched once
    with_text = [{"role": "system", "content": "Hi."}, *user(video())["messages"]]
    got = chat(generator, server, {"messages": with_text, **sound})
    assert [message["content"] for message in got.messages] == ["Hi.", [PLACE, place]]
    error = error_of(post(server, CHAT, {**user(*[video()] * 11), **sound}))
    assert error["param"] == "mm_processor_kwargs.use_audio_in_video"


def test_responses_accept_videos_and_their_conversations_keep_them(
    generator: FakeGenerator, server: Server
) -> None:
    linked = {"type": "input_video", "video_url": URL}
    content = [{"type": "input_text", "text": "what?"}, video(), linked]
    body = {"input": [{"role": "user", "content": content}]}
    got = chat(generator, server, body, RESPONSES)
    assert got.messages[0]["content"] == [text("what?"), PLACE, PLACE]
    assert got.media == (
        expected("input[0].content[1].input_video"),
        expected("input[0].content[2].video_url"),
    )
    first = post(server, RESPONSES, body).json()
    items = httpx.get(f"{server.url}{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1:] == [video(), linked]
    more = {"input": [video(), linked], "previous_response_id": first["id"]}
    assert len(chat(generator, server, more, RESPONSES).media) == 4


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (user(video("%")), f"{AT}.input_video.data", "base64"),
        (user(video(format="avi")), f"{AT}.input_video.format", "mp4, m4v"),
        (user({"type": "input_video"}), f"{AT}.input_video", "required"),
        (user({"type": "video_url"}), f"{AT}.video_url", "required"),
        (user(link("/etc/passwd")), f"{AT}.video_url", "paths are not opened"),
        (user(link("https://example.com/a")), f"{AT}.video_url", "IMAGE_FETCH"),
        (user(*[video()] * 21), "messages[0]", "at most 20"),
        (user(video(), role="assistant"), f"{AT}.type", "of the user only"),
        ({**user(video()), "mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps", "> 0"),
        (
            {**user(video()), "mm_processor_kwargs": {"num_frames": 769}},
            "mm_processor_kwargs.num_frames",
            "<= 768",
        ),
        (
            {**user(video()), "mm_processor_kwargs": {"fps": 1, "num_frames": 4}},
            "mm_processor_kwargs.num_frames",
            "cannot be combined with fps",
        ),
    ],
)
def test_invalid_videos_are_refused(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    error = error_of(post(server, CHAT, body))
    assert error["param"].startswith(param)
    assert reason in error["message"]


def test_text_model_refuses_videos() -> None:
    with serving(load_chat=FakeGenerator) as started:
        for path in (CHAT, "/tokenize"):
            error = error_of(post(started, path, user(video())))
            assert error["param"] == f"{AT}.input_video"
            assert "takes text, no videos" in error["message"]


@pytest.mark.parametrize(("media", "status"), [("video/mp4", 200), ("image/png", 400)])
def test_links_of_videos_are_fetched(
    generator: FakeGenerator, server: Server, media: str, status: int
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media}\r\nContent-Length: 3\r\n\r\n"
    with replying(head.encode() + b"mp4") as (port, requests):
        answer = post(server, CHAT, user(link(f"http://127.0.0.1:{port}/a.mp4")))
    assert answer.status_code == status
    assert b"Accept: video/*" in requests[0]
