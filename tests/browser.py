"""A headless Chromium for tests of pages, one for a module; without one they are skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
]


@contextmanager
def launched() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=Path(program), args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """What goes wrong in a page: errors that its console shows, exceptions, a broken policy."""

    def __init__(self, page: Any) -> None:
        self.wrong: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def forgive(self, status: int) -> None:
        """One answer of that status, of which Chromium's console tells by itself."""
        [told] = [each for each in self.wrong if f"status of {status} " in each]
        self.wrong.remove(told)
