"""A server for tests of the page, one per module, and the page in a browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page_server import GENERATOR, open_page, serving_all
from tests.serving import Server


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    with serving_all(GENERATOR) as server:
        yield server


@pytest.fixture
def page(visitor: Any, server: Server) -> Any:
    return open_page(visitor, server)
