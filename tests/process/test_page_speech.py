"""The page's speech, in a headless Chromium: an answer of a chat, and a text, as audio players."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests import tiny_speech as tiny_speech  # adds its models to the list
from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving
from tests.tiny import folder


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    model = f"tts={folder('vits-noisy')}"
    options: dict[str, Any] = {"pipeline_task": "text-to-audio", "device": "cpu"}
    with serving(load_chat=FakeGenerator, pipeline_model=model, **options) as server:
        yield server


@pytest.fixture(scope="module")
def chat_alone(browser: Any) -> Iterator[Server]:
    with serving(load_chat=FakeGenerator) as server:
        yield server


def seconds(page: Any, player: str) -> float:
    page.locator(player).wait_for()
    loaded = f"document.querySelector('{player}').readyState > 0"
    page.wait_for_function(loaded)
    return float(page.evaluate(f"document.querySelector('{player}').duration"))


def test_an_answer_is_spoken(visitor: Any, server: Server) -> None:
    visitor.goto(server.url)
    visitor.get_by_label("Message", exact=True).fill("hello")
    visitor.keyboard.press("Enter")
    visitor.get_by_role("button", name="Speak").click()
    assert seconds(visitor, "article.assistant audio") > 0.05


def test_a_text_is_spoken_in_a_voice(visitor: Any, server: Server) -> None:
    visitor.goto(f"{server.url}/#pipeline")
    visitor.get_by_label("Text", exact=True).press("Enter")
    assert seconds(visitor, "#pipeline audio") > 0.05
    visitor.get_by_role("button", name="Parameters").click()
    visitor.get_by_label("Parameters of the task").fill('{"voice": "alloy"}')
    visitor.get_by_role("button", name="Run").click()
    visitor.get_by_role("alert").get_by_text("voice must be one of 0, 1, 2").wait_for()
    visitor.problems.ignore_status(400)


def test_without_a_model_that_speaks_there_is_no_button(visitor: Any, chat_alone: Server) -> None:
    visitor.goto(chat_alone.url)
    visitor.get_by_label("Message", exact=True).fill("hello")
    visitor.keyboard.press("Enter")
    visitor.get_by_role("button", name="Regenerate").wait_for()
    assert visitor.get_by_role("button", name="Speak").count() == 0
