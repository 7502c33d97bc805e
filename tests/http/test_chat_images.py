"""Images in the messages of chats and responses, over a real socket, with a fake generator."""

import base64
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.http import fetch
from tests.event_streams import open_stream, post
from tests.fake_generator import FakeGenerator
from tests.http.test_fetch import IMAGE, replying
from tests.http.test_pipeline_http import error_of
from tests.serving import Server, serving, wait_until
from worker.messages.generation import Chat, MediaInput

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
DATA = "data:image/png;base64," + base64.b64encode(b"png").decode()


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


def image(url: Any = DATA, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def chat(generator: FakeGenerator, server: Server, body: Any, path: str = CHAT) -> Chat:
    """Return the input that the worker receives."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    prompt = generator.payloads[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_images_keep_their_positions_among_text(generator: FakeGenerator, server: Server) -> None:
    parts = text("one"), image(detail="low"), text("two"), {"type": "image_url", "image_url": DATA}
    before = {"role": "system", "content": [text("be"), text("brief")]}
    body = {"messages": [before, *user(*parts)["messages"]]}
    got = chat(generator, server, body)
    place = {"type": "image"}
    assert got.messages == (
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": [text("one"), place, text("two"), place]},
    )
    path = "messages[1].content"
    assert generator.payloads[-1].cache_namespace
    assert got.media == (
        MediaInput(b"png", "low", f"{path}[1].image_url"),
        MediaInput(b"png", "auto", f"{path}[3].image_url"),
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


def test_responses_accept_images_and_their_conversations_keep_them(
    generator: FakeGenerator, server: Server
) -> None:
    part = {"type": "input_image", "image_url": DATA, "detail": "high"}
    content = [{"type": "input_text", "text": "what?"}, part]
    body = {"input": [{"role": "user", "content": content}]}
    got = chat(generator, server, body, RESPONSES)
    assert got.messages[0]["content"] == [text("what?"), {"type": "image"}]
    param = "input[0].content[1].image_url"
    assert got.media == (MediaInput(b"png", "high", param),)
    first = post(server, RESPONSES, body).json()
    items = httpx.get(f"{server.url}{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1] == part
    more = {"input": "and now?", "previous_response_id": first["id"]}
    again = chat(generator, server, more, RESPONSES)
    assert [image.data for image in again.media] == [b"png"]
    assert again.messages[-1]["content"] == "and now?"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (user(image("/etc/passwd")), "messages[0].content[0].image_url", "paths are not opened"),
        (user(image("file:///a.png")), "messages[0].content[0].image_url", "paths are not"),
        (user(image("data:image/png,abc")), "messages[0].content[0].image_url", "base64"),
        (user(image("data:;base64,a")), "messages[0].content[0].image_url", "base64"),
        (user(image(detail="huge")), "messages[0].content[0].image_url.detail", "'huge'"),
        (user(image(None)), "messages[0].content[0].image_url", "expected"),
        (user(text("a"), *[image()] * 21), "messages[0]", "at most 20 images"),
        (user(image(), role="assistant"), "messages[0].content[0].type", "of the user only"),
        (user(image(), role="system"), "messages[0].content[0].type", "of the user only"),
        (user(image(), role="tool"), "messages[0].content[0].type", "of the user only"),
        (user(image("https://example.com/a")), "messages[0].content[0].image_url", "IMAGE_FETCH"),
    ],
)
def test_invalid_images_are_refused(
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


def test_text_model_refuses_images() -> None:
    with serving(load_chat=FakeGenerator, image_fetch=("any",)) as started:
        for url in (DATA, "http://127.0.0.1:1/"):
            error = error_of(post(started, CHAT, user(image(url))))
            assert error["param"] == "messages[0].content[0].image_url"
            assert "takes text, no images" in error["message"]
            assert "no images" in error_of(post(started, "/tokenize", user(image(url))))["message"]


def test_links_are_fetched_before_the_request_is_submitted(
    generator: FakeGenerator, server: Server
) -> None:
    with replying(IMAGE, IMAGE) as (port, _):
        link = f"http://127.0.0.1:{port}/a.png"
        got = chat(generator, server, user(image(link), image(), image(link)))
    assert [entry.data for entry in got.media] == [b"png"] * 3
    assert not any(entry.link for entry in got.media)


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
