"""Pages of other origins that call the server, in a browser."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_generator import FakeGenerator
from tests.fakes import FakeRunner
from tests.page_server import KEY, other_origin, serving_all
from tests.serving import Server, metric, serving


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    with other_origin() as port:
        yield port


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture(scope="module")
def server(browser: Any, elsewhere: int, generator: FakeGenerator) -> Iterator[Server]:
    with serving_all(generator, cors_origins=(f"http://127.0.0.1:{elsewhere}",)) as server:
        yield server


FETCH = """async ([url, key]) => {
    const response = await fetch(url + "/v1/chat/completions", {
        method: "POST",
        headers: {"content-type": "application/json", authorization: `Bearer ${key}`},
        body: JSON.stringify({messages: [{role: "user", content: "hi"}], stream: true}),
    });
    return [response.status, response.headers.get("x-request-id"), await response.text()];
}"""


def test_a_page_of_an_allowed_origin_can_call(visitor: Any, server: Server, elsewhere: int) -> None:
    visitor.goto(f"http://127.0.0.1:{elsewhere}/")
    status, request_id, text = visitor.evaluate(FETCH, [server.url, KEY])
    assert (status, bool(request_id)) == (200, True)
    assert text.endswith("data: [DONE]\n\n")
    status, _, text = visitor.evaluate(FETCH, [server.url, "wrong"])
    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    visitor.problems.ignore_status(401)


def test_a_page_of_another_origin_cannot(
    visitor: Any, server: Server, elsewhere: int, generator: FakeGenerator
) -> None:
    visitor.goto(f"http://localhost:{elsewhere}/")
    before = len(generator.payloads)
    refused = visitor.evaluate(
        f"args => ({FETCH})(args).catch(error => error.name)", [server.url, KEY]
    )
    assert refused == "TypeError"
    assert len(generator.payloads) == before
    assert all(
        "CORS" in message or "ERR_FAILED" in message for message in visitor.problems.messages
    )
    visitor.problems.messages.clear()


# A request without a preflight; the page cannot read the response, only whether there was one.
SEND = """async ([url, mode]) => {
    const response = await fetch(url, {method: "POST", body: "text", mode});
    return response.status;
}"""
POSTS = 'onequeue_requests_total{endpoint="/",status="%d"}'


def test_pages_of_other_sites_cannot_post_without_keys(visitor: Any, elsewhere: int) -> None:
    with serving(FakeRunner) as server:
        for host in ("localhost", "127.0.0.1"):  # another site, another port of the same one
            visitor.goto(f"http://{host}:{elsewhere}/")
            visitor.evaluate(SEND, [server.url, "no-cors"])
            visitor.problems.ignore_status(403)
        assert metric(server, POSTS % 403) == 2
        assert metric(server, POSTS % 200) == 0
        link = f"{server.url}/"
        visitor.evaluate("url => { location.href = url; }", link)  # from another origin
        visitor.wait_for_url(link)
        assert visitor.evaluate(SEND, [link, "cors"]) == 200
