"""Images, recordings and videos in the messages of chats and responses, over a real socket with a
fake generator."""

import base64
import socket
import threading
from typing import Any

import httpx
import pytest

from server.http import fetch
from tests.event_streams import error_of, open_stream, post
from tests.fake_generator import FakeGenerator
from tests.http.test_fetch import IMAGE, replying
from tests.serving import Server, chat_server_fixture, serving, wait_until
from worker.messages.generation import Chat, MediaInput

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
AT = "messages[0].content[0]"
DATA = base64.b64encode(b"data").decode()
LINK = f"data:;base64,{DATA}"


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    fake = FakeGenerator()
    fake.refused_media = {}
    return fake


server = chat_server_fixture(image_fetch=("127.0.0.1",))


@pytest.fixture(autouse=True)
def _loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")


def image(url: Any = LINK, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def link(kind: str, url: Any = LINK) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def sound(data: str = DATA, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def video(data: str = DATA, format: str = "mp4") -> dict[str, Any]:
    return {"type": "input_video", "input_video": {"data": data, "format": format}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def media(kind: Any, param: str, **limits: float) -> MediaInput:
    return MediaInput(b"data", "auto", param, kind=kind, limits=tuple(limits.items()))


def chat(generator: FakeGenerator, server: Server, body: Any, path: str = CHAT) -> Chat:
    """Return the input that the worker receives."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_media_keep_their_positions_among_text(generator: FakeGenerator, server: Server) -> None:
    parts = [text("one"), image(detail="low"), sound(), text("two"), link("audio"), video()]
    parts += [link("video"), {"type": "image_url", "image_url": LINK}]
    parts += [{"type": "input_image", "image_url": LINK, "detail": "low"}]
    before = {"role": "system", "content": [text("be"), text("brief")]}
    got = chat(generator, server, {"messages": [before, *user(*parts)["messages"]]})
    kinds = ["image", "audio", "audio", "video", "video", "image", "image"]
    first, second, *others = [{"type": kind} for kind in kinds]
    assert got.messages == (
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": [text("one"), first, second, text("two"), *others]},
    )
    assert generator.payloads[-1].cache_namespace
    at = "messages[1].content"
    assert got.media == (
        MediaInput(b"data", "low", f"{at}[1].image_url"),
        media("audio", f"{at}[2].input_audio"),
        media("audio", f"{at}[4].audio_url"),
        media("video", f"{at}[5].input_video"),
        media("video", f"{at}[6].video_url"),
        media("image", f"{at}[7].image_url"),
        MediaInput(b"data", "low", f"{at}[8].image_url"),
    )


def test_options_of_images_apply_to_each(generator: FakeGenerator, server: Server) -> None:
    options: dict[str, Any] = {
        "mm_processor_kwargs": {"max_pixels": 9},
        "media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}, "audio": {"fps": 2}},
    }
    got = chat(generator, server, user(image(), image()) | options)
    assert {each.limits for each in got.media} == {(("max_pixels", 9),)}
    assert {each.background for each in got.media} == {(1, 2, 3)}
    named = post(server, CHAT, user(image()) | options).headers["x-ignored-fields"]
    assert named == "media_io_kwargs.audio"
    options["media_io_kwargs"]["image"]["rgba_background_color"] = [1, 2, 300]
    refused = error_of(post(server, CHAT, user(image()) | options))
    assert refused["param"] == "media_io_kwargs.image.rgba_background_color[2]"


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
    got = chat(generator, server, {**user(link("video"), image()), **options})
    assert got.media[0] == media("video", f"{AT}.video_url", **limits)
    assert dict(got.media[1].limits).keys() <= {"max_pixels"}
    assert got.media[0].digest != media("video", "", fps=4.5).digest


def test_the_sound_of_a_video_follows_it(generator: FakeGenerator, server: Server) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nContent-Length: 4\r\n\r\n"
    asked = {"mm_processor_kwargs": {"use_audio_in_video": True, "fps": 2}}
    with replying(head + b"data") as (port, requests):
        parts = link("video", f"http://127.0.0.1:{port}/a.mp4"), text("one"), video()
        got = chat(generator, server, {**user(*parts), **asked})
    first, second = {"type": "video"}, {"type": "audio", "in_video": True}
    assert got.messages[0]["content"] == [first, second, text("one"), first, second]
    kinds = [("video", b"data"), ("audio", b"data")]
    assert [(file.kind, file.data) for file in got.media] == 2 * kinds
    assert [file.limits for file in got.media] == 2 * [(("fps", 2.0),), ()]
    assert len(requests) == 1  # the link is fetched once
    before = {"role": "system", "content": "Hi."}
    got = chat(generator, server, {"messages": [before, *user(video())["messages"]], **asked})
    assert [message["content"] for message in got.messages] == ["Hi.", [first, second]]
    error = error_of(post(server, CHAT, {**user(*[video()] * 11), **asked}))
    assert error["param"] == "mm_processor_kwargs.use_audio_in_video"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("image", {"type": "input_image", "image_url": LINK, "detail": "auto"}),
        ("audio", sound()),
        ("video", video()),
        ("video", {"type": "input_video", "video_url": LINK}),
    ],
)
def test_responses_accept_media_and_their_conversations_keep_them(
    generator: FakeGenerator, server: Server, kind: str, part: dict[str, Any]
) -> None:
    content = [{"type": "input_text", "text": "what?"}, part]
    body = {"input": [{"role": "user", "content": content}]}
    got = chat(generator, server, body, RESPONSES)
    assert got.messages[0]["content"] == [text("what?"), {"type": kind}]
    name = next(name for name in part if name not in ("type", "detail"))
    assert got.media == (media(kind, f"input[0].content[1].{name}"),)
    first = post(server, RESPONSES, body).json()
    items = httpx.get(f"{server.url}{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1] == part
    more = {"input": [part], "previous_response_id": first["id"]}
    assert [file.data for file in chat(generator, server, more, RESPONSES).media] == [b"data"] * 2


FRAMES = "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (user(image("/etc/passwd")), f"{AT}.image_url", "paths are not opened"),
        (user(image("file:///a.png")), f"{AT}.image_url", "paths are not"),
        (user(image("data:image/png,abc")), f"{AT}.image_url", "base64"),
        (user(image("data:;base64,a")), f"{AT}.image_url", "base64"),
        (user(image(detail="huge")), f"{AT}.image_url.detail", "'huge'"),
        (user(image(None)), f"{AT}.image_url", "expected"),
        (user(text("a"), *[image()] * 21), "messages[0]", "at most 20 images"),
        (user(image(), role="system"), f"{AT}.type", "of the user and of tools"),
        (user(image("https://example.com/a")), f"{AT}.image_url", "IMAGE_FETCH"),
        (user(sound("%")), f"{AT}.input_audio.data", "base64"),
        (user(sound(format="xyz")), f"{AT}.input_audio.format", "wav, mp3"),
        (user({"type": "input_audio"}), f"{AT}.input_audio", "required"),
        (user(*[sound()] * 21), "messages[0]", "at most 20"),
        (user(video("%")), f"{AT}.input_video.data", "base64"),
        (user(video(format="avi")), f"{AT}.input_video.format", "mp4, m4v"),
        (user({"type": "input_video"}), f"{AT}.input_video", "required"),
        (user({"type": "video_url"}), f"{AT}.video_url", "required"),
        (user(*[video()] * 21), "messages[0]", "at most 20"),
        (user(video()) | {FRAMES: {"fps": 0}}, f"{FRAMES}.fps", "> 0"),
        (user(video()) | {FRAMES: {"num_frames": 769}}, f"{FRAMES}.num_frames", "<= 768"),
        (
            user(video()) | {FRAMES: {"fps": 1, "num_frames": 4}},
            f"{FRAMES}.num_frames",
            "cannot be combined with fps",
        ),
        *(
            (user(link(kind, url)), f"{AT}.{kind}_url", reason)
            for kind in ("audio", "video")
            for url, reason in (
                ("/etc/passwd", "paths are not opened"),
                (None, "expected"),
                ("https://example.com/a", "IMAGE_FETCH"),
            )
        ),
        *(
            (user(part, role="assistant"), f"{AT}.type", "of the user and of tools")
            for part in (image(), sound(), video())
        ),
    ],
)
def test_invalid_media_are_refused(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = post(server, CHAT, body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"].startswith(param)
    assert reason in error["message"]


def test_twenty_images_are_accepted(generator: FakeGenerator, server: Server) -> None:
    assert len(chat(generator, server, user(*[image()] * 20)).media) == 20


def test_uploaded_files_are_not_supported(server: Server) -> None:
    part = {"type": "input_image", "file_id": "file-1"}
    answer = post(server, RESPONSES, {"input": [{"role": "user", "content": [part]}]})
    assert error_of(answer)["param"] == "input[0].content[0].file_id"


def test_text_model_refuses_media() -> None:
    with serving(load_chat=FakeGenerator, image_fetch=("any",)) as started:
        for part, name, files in (
            (image(), "image_url", "images"),
            (image("http://127.0.0.1:1/"), "image_url", "images"),
            (sound(), "input_audio", "recordings"),
            (video(), "input_video", "videos"),
        ):
            for path in (CHAT, "/tokenize"):
                error = error_of(post(started, path, user(part)))
                assert error["param"] == f"{AT}.{name}"
                assert f"takes text, no {files}" in error["message"]
        url = started.url + "/v1/audio/transcriptions"
        answer = httpx.post(url, files={"file": ("a", b"a")})
        assert "takes text, no recordings" in error_of(answer)["message"]


# ── links ──


def test_links_are_fetched_before_the_request_is_submitted(
    generator: FakeGenerator, server: Server
) -> None:
    with replying(IMAGE, IMAGE) as (port, _):
        url = f"http://127.0.0.1:{port}/a.png"
        got = chat(generator, server, user(image(url), image(), image(url)))
    assert [entry.data for entry in got.media] == [b"png", b"data", b"png"]
    assert not any(entry.link for entry in got.media)


@pytest.mark.parametrize(
    ("kind", "type", "status"),
    [
        ("audio", "audio/ogg", 200),
        ("audio", "image/png", 400),
        ("video", "video/mp4", 200),
        ("video", "image/png", 400),
    ],
)
def test_links_have_the_type_of_their_part(
    server: Server, kind: str, type: str, status: int
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {type}\r\nContent-Length: 3\r\n\r\n"
    with replying(head.encode() + b"abc") as (port, requests):
        answer = post(server, CHAT, user(link(kind, f"http://127.0.0.1:{port}/a")))
    assert answer.status_code == status
    assert f"Accept: {kind}/*".encode() in requests[0]
    if status == 400:
        assert f"not {kind}/" in error_of(answer)["message"]


def test_disconnect_cancels_the_fetches(server: Server) -> None:
    left, fetching = threading.Event(), threading.Event()

    def stall(client: socket.socket) -> None:
        fetching.set()
        client.settimeout(60)
        client.recv(1)  # until the other end closes
        left.set()

    with replying(stall) as (port, _):
        client = open_stream(server, CHAT, user(image(f"http://127.0.0.1:{port}/")))
        assert fetching.wait(60)
        client.close()
        assert left.wait(60)
    wait_until(lambda: server.app.memory.used == 0)


def test_deadline_includes_the_fetches(server: Server) -> None:
    def stall(client: socket.socket) -> None:
        client.settimeout(60)
        client.recv(1)

    with replying(stall) as (port, _):
        body = user(image(f"http://127.0.0.1:{port}/"))
        answer = post(server, CHAT, body, **{"X-Request-Timeout-Ms": "100"})
    assert answer.status_code == 504
    assert "not fetched" in answer.json()["error"]["message"]
    wait_until(lambda: server.app.memory.used == 0)


def test_memory_of_transcribed_recordings_is_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, count = [], type(server.app).count_body

    def count_body(self: Any, scope: Any, size: int) -> None:
        counted.append(size)
        count(self, scope, size)

    monkeypatch.setattr(type(server.app), "count_body", count_body)
    url = server.url + "/v1/audio/transcriptions"
    assert httpx.post(url, files={"file": ("a.wav", bytes(1000))}).status_code == 200
    assert counted == [1000]
    wait_until(lambda: server.app.memory.used == 0)
