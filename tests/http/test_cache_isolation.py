"""The prefix cache is not shared across API keys and cache salts."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.core.api_keys import ApiKey
from server.core.request_context import RequestContext
from tests import tiny_chat
from tests.serving import Server, serving

TEXT = "Tell me of the sea, and of ships. " * 4
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/decisions": {"input": TEXT, "questions": [{"type": "predicate", "instructions": "?"}]},
}
PATHS = pytest.mark.parametrize("path", ASKED)


def test_a_namespace_depends_on_each_of_its_parts_and_on_nothing_else() -> None:
    parts: list[tuple[str, bytes, str]] = [
        ("m", b"", ""), ("", b"m", ""), ("", b"", "m"),
        ("m", b"k", "s"), ("m", b"ks", ""), ("m", b"", "ks"),
    ]  # fmt: skip

    def namespace_of(model: str, key: bytes, salt: str) -> bytes:
        return RequestContext(b"", key=ApiKey(key, "")).cache_namespace(model, salt)

    namespaces = [namespace_of(*arguments) for arguments in parts]
    assert len(set(namespaces)) == len(parts)
    assert namespaces == [namespace_of(*arguments) for arguments in parts]
    assert {len(namespace) for namespace in namespaces} == {16}


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_chat.folder())


@pytest.fixture(scope="module")
def shared(folder: str) -> Iterator[Server]:
    with _serving(folder, api_keys=("one", "two"), admin_keys=("admin",)) as running:
        yield running


@pytest.fixture
def keyed(shared: Server) -> Server:
    """A server without cached prefixes."""
    headers = {"x-api-key": "admin"}
    assert httpx.post(shared.url + "/reset_prefix_cache", headers=headers).status_code == 200
    return shared


def _serving(folder: str, **settings: Any) -> Any:
    return serving(chat_model=folder, dtype="float32", kv_cache_gb=0.05, compile="off", **settings)


def cached(server: Server, path: str, key: str, **fields: Any) -> int:
    """Return how many of the prompt's tokens were in the prefix cache."""
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(server.url + path, json=ASKED[path] | fields, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


@PATHS
def test_an_api_key_reuses_its_own_prompts_only(keyed: Server, path: str) -> None:
    assert cached(keyed, path, "one") == 0
    assert cached(keyed, path, "two") == 0
    assert cached(keyed, path, "one") > 0
    assert cached(keyed, path, "two") > 0


@PATHS
def test_a_cache_salt_divides_an_api_keys_cache(keyed: Server, path: str) -> None:
    assert cached(keyed, path, "one", cache_salt="a") == 0
    assert cached(keyed, path, "one") == 0
    assert cached(keyed, path, "one", cache_salt="b") == 0
    assert cached(keyed, path, "two", cache_salt="a") == 0  # the same salt of another key
    assert cached(keyed, path, "one", cache_salt="a") > 0


def test_without_api_keys_the_cache_is_shared(folder: str) -> None:
    path = "/v1/completions"
    with _serving(folder) as server:
        assert cached(server, path, "one") == 0
        assert cached(server, path, "two") > 0
        assert cached(server, path, "one", cache_salt="a") == 0
        assert cached(server, path, "two", cache_salt="a") > 0


def test_a_reset_drops_the_prefixes(folder: str) -> None:
    path = "/v1/completions"
    with _serving(folder, model_control=True) as server:
        assert [cached(server, path, "any") > 0 for _ in range(2)] == [False, True]
        assert httpx.post(server.url + "/reset_prefix_cache").status_code == 200
        assert [cached(server, path, "any") > 0 for _ in range(2)] == [False, True]
