"""A server of a test module with a fake generator, and SDK clients of servers with real models."""

from collections.abc import Iterator

import pytest

from tests import sdk
from tests.fake_generator import FakeGenerator
from tests.sdk import Sdk
from tests.serving import chat_server_fixture


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    return FakeGenerator()


server = chat_server_fixture()


@pytest.fixture(scope="package")
def demo() -> Iterator[Sdk]:
    with sdk.demo() as connected:
        yield connected


@pytest.fixture(scope="package")
def tiny() -> Iterator[Sdk]:
    with sdk.tiny() as connected:
        yield connected


@pytest.fixture(params=["demo", "tiny"])
def target(request: pytest.FixtureRequest) -> Sdk:
    connected: Sdk = request.getfixturevalue(request.param)
    return connected
