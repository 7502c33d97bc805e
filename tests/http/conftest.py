"""The fake generator of a test module, and a server with it."""

from collections.abc import Iterator

import pytest

from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture(scope="module")
def server(generator: FakeGenerator) -> Iterator[Server]:
    with serving(load_chat=lambda: generator) as started:
        yield started
