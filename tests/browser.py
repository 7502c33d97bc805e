"""A headless Chromium for tests of pages, one per module. Without Chromium they are skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--use-fake-device-for-media-stream",  # a microphone with a beep
    "--use-fake-ui-for-media-stream",
]


@contextmanager
def launch_browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=Path(program), args=FLAGS)
        yield browser
        browser.close()


class PageProblems:
    """Records errors and warnings in a page's console, and exceptions."""

    def __init__(self, page: Any) -> None:
        self.messages: list[str] = []
        page.on("console", self._record)
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    def _record(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(message.text)

    def ignore_status(self, status: int) -> None:
        """Remove the console's message about the one response with this status."""
        [message] = [text for text in self.messages if f"status of {status} " in text]
        self.messages.remove(message)
